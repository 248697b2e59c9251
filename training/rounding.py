"""The trained roundings as straight-through functions: forward rounds, backward passes the gradient on unchanged.

Pure arithmetic without tables or host copies, so that a whole training step can be captured in a CUDA graph. A test
compares every function with the engine's own codes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _pow2_ceil(x: Tensor) -> Tensor:
    """2^ceil(log2(x)) for positive normal fp32 x, by the bits."""
    bits = x.view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def _e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with sign, ties to the even code; x in [-6, 6]."""
    a = x.abs()
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    return torch.round(x / step) * step


def _e4m3(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).float()


def _grouped(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    g = x.detach().float().unflatten(-1, (-1, size))
    return g, g.abs().amax(-1, keepdim=True)


def _through(x: Tensor, rounded: Tensor) -> Tensor:
    return x + (rounded.reshape(x.shape).to(x.dtype) - x.detach())


def mxfp8(x: Tensor, size: int = 32) -> Tensor:
    """Window latents and Engram rows: e4m3 per 32 values (model.md 3.6, 2.3)."""
    g, amax = _grouped(x, size)
    s = _pow2_ceil(amax.clamp_min(1e-4) * (1 / 448))
    return _through(x, _e4m3((g / s).clamp(-448, 448)) * s)


def nvfp4(x: Tensor, size: int = 16) -> Tensor:
    """Compressed latents: e2m1 per 16 channels with an e4m3 scale (model.md 3.7)."""
    g, amax = _grouped(x, size)
    s = _e4m3(amax.clamp_min(6 * 2.0**-9) / 6)
    return _through(x, _e2m1((g / s).clamp(-6, 6)) * s)


def mxfp4(x: Tensor, size: int = 32) -> Tensor:
    """Index queries and keys, and FP4 experts: e2m1 per 32 values (model.md 3.8, 2.3)."""
    g, amax = _grouped(x, size)
    s = _pow2_ceil(amax.clamp_min(6 * 2.0**-126) * (1 / 6))
    return _through(x, _e2m1((g / s).clamp(-6, 6)) * s)


def blocks(w: Tensor, size: int = 32) -> Tensor:
    """FP8 weights [.., out, in] in 32x32 blocks (model.md 2.3); sizes must be multiples of 32."""
    g = w.detach().float().unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # [.., o/32, 32, i/32, 32]
    amax = g.abs().amax((-3, -1), keepdim=True)
    s = _pow2_ceil(amax.clamp_min(1e-4) * (1 / 448))
    return _through(w, _e4m3((g / s).clamp(-448, 448)) * s)


def bf16(w: Tensor) -> Tensor:
    """Weights that the checkpoint stores in BF16."""
    return w + (w.detach().bfloat16().float() - w.detach())
