"""Hyper-connections, norms, rope, linears and the Engram gate, as model.md writes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor

from paraflash.formats import round_activation
from paraflash.kernels.interface import Rotary


def rounded(x: Tensor) -> Tensor:
    return round_activation(x)


def total(parts: Sequence[Tensor]) -> Tensor:
    return reduce(add, parts)


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
    return pre, post, sinkhorn(comb, iters, hc_eps)


def sinkhorn(comb: Tensor, iters: int, eps: float) -> Tensor:
    """Columns, then rows and columns in turn, of comb [T, K, K] are divided by their sums."""
    # A step has hundreds of these divisions: they run in place, along T (the longest dimension, here the last one),
    # and with eps as a tensor, which saves a conversion each.
    across = torch.full((), eps, dtype=comb.dtype, device=comb.device)
    comb = comb.permute(1, 2, 0).contiguous()
    comb.div_(comb.sum(0, keepdim=True).add_(across))
    for _ in range(iters - 1):
        comb.div_(comb.sum(1, keepdim=True).add_(across))
        comb.div_(comb.sum(0, keepdim=True).add_(across))
    return comb.permute(2, 0, 1).contiguous()


def hc_collapse(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = (pre[..., None] * streams.float()).sum(1).to(streams.dtype)
    return rms_norm(h, weight, eps)


def hc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = comb.mT @ streams.float()
    return (post[..., None] * y.float()[:, None] + mixed).to(streams.dtype)


def rope(x: Tensor, rotary: Rotary, inverse: bool = False) -> Tensor:
    """Adjacent channels (a, b) are turned as the complex number a + bi by cos + i sin."""
    turn = torch.complex(rotary.cos, -rotary.sin if inverse else rotary.sin)
    n = 2 * turn.shape[-1]
    while turn.dim() < x.dim():
        turn = turn.unsqueeze(1)
    out = x.clone()
    pairs = torch.view_as_complex(x[..., -n:].float().unflatten(-1, (-1, 2)))
    out[..., -n:] = torch.view_as_real(pairs * turn).flatten(-2)
    return out


def engram_write(streams: Tensor, u: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    t, k, d = streams.shape
    s, u = streams.float(), u.float()
    key, value = u[:, : k * d].view(t, k, d), u[:, k * d :]
    dot = (s * q_weight.float() * k_weight.float() * key).sum(-1)
    norms = torch.sqrt(s.pow(2).mean(-1) + eps) * torch.sqrt(key.pow(2).mean(-1) + eps)
    dot = dot / norms * d**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    return (s + gate[..., None] * value[:, None]).to(streams.dtype)
