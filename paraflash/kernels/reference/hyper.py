"""Hyper-connections, norms, rope, linears and the Engram gate, as model.md writes them."""

from __future__ import annotations

import torch
from torch import Tensor

from paraflash.formats import round_activation
from paraflash.kernels.interface import Rotary


def linear(x: Tensor, weight: Tensor, round_input: bool = False) -> Tensor:
    return (round_activation(x) if round_input else x) @ weight.T


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    return x.float() @ weight.float().T


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    f = x.float()
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def hc_mixes(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iters: int, hc_eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    k = streams.shape[1]
    v = streams.flatten(1).float()
    m = (v @ fn.T) * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + rms_eps)
    pre = torch.sigmoid(m[:, :k] * scale[0] + base[:k]) + hc_eps
    post = 2 * torch.sigmoid(m[:, k : 2 * k] * scale[1] + base[k : 2 * k])
    comb = (m[:, 2 * k :] * scale[2] + base[2 * k :]).unflatten(1, (k, k)).softmax(-1) + hc_eps
    comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    return pre, post, comb


def hc_collapse(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = (pre[..., None] * streams.float()).sum(1).to(streams.dtype)
    return rms_norm(h, weight, eps)


def hc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = torch.einsum("tjk,tjd->tkd", comb, streams.float())
    return (post[..., None] * y.float()[:, None] + mixed).to(streams.dtype)


def rope(x: Tensor, rotary: Rotary, inverse: bool = False) -> Tensor:
    cos, sin = rotary.cos, rotary.sin
    n = 2 * cos.shape[-1]
    while cos.dim() < x.dim():
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if inverse:
        sin = -sin
    head, tail = x[..., :-n], x[..., -n:].float()
    a, b = tail[..., 0::2], tail[..., 1::2]
    rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([head, rotated.to(x.dtype)], -1)


def engram_write(streams: Tensor, u: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    t, k, d = streams.shape
    s, u = streams.float(), u.float()
    key, value = u[:, : k * d].view(t, k, d), u[:, k * d :]
    dot = (s * q_weight.float() * k_weight.float() * key).sum(-1)
    norms = torch.sqrt(s.pow(2).mean(-1) + eps) * torch.sqrt(key.pow(2).mean(-1) + eps)
    dot = dot / norms * d**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    return (s + gate[..., None] * value[:, None]).to(streams.dtype)
