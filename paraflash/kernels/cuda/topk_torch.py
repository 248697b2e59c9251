"""The selections of topk.py in plain PyTorch: a stable sort. For tests and for devices that cannot run topk.cu."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _masked(scores: Tensor, lengths: Tensor) -> Tensor:
    entry = torch.arange(scores.shape[1], device=scores.device)
    return scores.masked_fill(entry[None] >= lengths[:, None], -math.inf)


def _best(scores: Tensor, k: int) -> Tensor:
    value, place = scores.sort(dim=-1, descending=True, stable=True)
    place = torch.where(value[:, :k] > -math.inf, place[:, :k], scores.shape[1]).sort(-1).values
    place = torch.nn.functional.pad(place, (0, k - place.shape[1]), value=scores.shape[1])
    return torch.where(place < scores.shape[1], place, -1)


def select_topk(scores: Tensor, lengths: Tensor, k: int, allowed: Tensor | None = None, block_size: int = 1) -> Tensor:
    scores = _masked(scores, lengths)
    if allowed is not None:
        block = torch.arange(scores.shape[1], device=scores.device) // block_size
        block = block.clamp_max(32 * allowed.shape[1] - 1)  # scores may be padded
        bit = (allowed[:, block // 32] >> (block % 32).to(torch.int32)) & 1
        scores = scores.masked_fill(bit == 0, -math.inf)
    return _best(scores, k)


def select_bits(scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    """Of equal scores the higher index is taken."""
    place = _best(_masked(scores, lengths).flip(-1), k)
    place = torch.where(place < 0, -1, scores.shape[1] - 1 - place)
    width = -(-scores.shape[1] // 32) * 32
    hit = torch.zeros(len(scores), width + 1, dtype=torch.int64, device=scores.device).scatter_(
        1, place % (width + 1), 1
    )
    words = (hit[:, :width].unflatten(1, (-1, 32)) << torch.arange(32, device=scores.device)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
