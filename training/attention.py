"""The trainer's attention: rotation, choice of entries, and the joint softmax over window, entries and sink.

Formulas as in model.md 3.4, 3.9 and 3.10, over whole sequences; on a GPU by the kernels of fused.py.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

Turns = tuple[Tensor, Tensor]  # cos and sin [positions, rope / 2]


def fused(x: Tensor) -> bool:
    """Whether to use the kernels of fused.py, which need a GPU."""
    return x.is_cuda


def rotate(x: Tensor, turn: Turns, sign: float = 1.0) -> Tensor:
    """Interleaved RoPE on the last channels; x [B, T, .., D], turn (cos, sin) [T, rope/2] each (model.md 3.4)."""
    cos, sin = turn
    if fused(x):
        from training.fused import Turn

        return Turn.apply(x, cos, sin, sign)
    width = 2 * cos.shape[-1]
    shape = (1, len(cos), *([1] * (x.dim() - 3)), width // 2)
    cos, sin = cos.view(shape), sin.view(shape) * sign
    a, b = x[..., -width:].float().unflatten(-1, (width // 2, 2)).unbind(-1)
    tail = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([x[..., :-width], tail.to(x.dtype)], -1)


def largest(score: Tensor, count: int) -> Tensor:
    """Mask of the `count` largest of each row above -inf; equal ones from the left, as the engine takes them.

    Scores of exactly 0 are common: an entry that no index head likes has one.
    """
    least = score.topk(min(count, score.shape[-1]), -1).values[..., -1:]
    above, equal = score > least, score == least
    room = count - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))) & (score > -math.inf)


def attend(
    q: Tensor, kv: Tensor, latents: Tensor | None, allowed: Tensor | None, sink: Tensor, window: int
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """One shared-latent attention: scaled q [B, T, H, D], kv [B, T, D], latents [B, n, D], allowed [B|1, T, n].

    Window scores are computed in blocks of `window` queries against two blocks of keys. Returns the output
    [B, T, H, D] and, where latents are read, their attention [B, T, H, n] and its sum over them [B, T, H].
    """
    b, t, heads, dim = q.shape
    blocks = -(-t // window)
    pad = blocks * window - t
    qb = (F.pad(q, (0, 0, 0, 0, 0, pad)) if pad else q).reshape(b * blocks, window * heads, dim)
    own = (F.pad(kv, (0, 0, 0, pad)) if pad else kv).reshape(b, blocks, window, dim)
    keys = torch.cat([F.pad(own[:, :-1], (0, 0, 0, 0, 1, 0)), own], 2).reshape(b * blocks, 2 * window, dim)
    near = (qb @ keys.transpose(1, 2)).view(b, blocks * window, heads, 2 * window)
    if latents is not None and not latents.shape[1]:
        latents = None
    far = None
    if latents is not None:
        far = (q.reshape(b, t * heads, dim) @ latents.transpose(1, 2)).view(b, t, heads, -1)
    if fused(q) and not pad:
        from training.fused import Softmax

        near, far, mass = Softmax.apply(near, far, allowed, sink)
    else:
        near, far, mass = softmax(near, far, allowed, sink)
    out = (near.view(b * blocks, window * heads, 2 * window) @ keys).view(b, blocks * window, heads, dim)[:, :t]
    if latents is None:
        return out, None
    return out + (far.view(b, t * heads, -1) @ latents).view(b, t, heads, dim), (far, mass)


def softmax(near: Tensor, far: Tensor | None, allowed: Tensor | None, sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Joint softmax of window scores [B, padded T, H, 2W], far scores [B, T, H, n] and the sinks."""
    b, padded, heads, width = near.shape
    window, blocks = width // 2, 2 * padded // width
    i = torch.arange(window, device=near.device)[:, None]
    j = torch.arange(width, device=near.device) - window
    shut = (j > i) | (j <= i - window) | ((j < 0) & (torch.arange(blocks, device=near.device) == 0)[:, None, None])
    near = near.masked_fill(shut.view(1, padded, 1, width), -math.inf)
    parts = [near, sink.to(near.dtype).view(1, 1, heads, 1).expand(b, padded, heads, 1)]
    if far is not None:
        open_far = F.pad(far.masked_fill(~allowed[:, :, None], -math.inf), (0, 0, 0, 0, 0, padded - far.shape[1]))
        parts.append(open_far)
    p = torch.cat(parts, -1).softmax(-1)
    far = p[:, : far.shape[1] if far is not None else 0, :, width + 1 :].contiguous()
    return p[..., :width].contiguous(), far, far.sum(-1, dtype=torch.float32)
