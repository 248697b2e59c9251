"""Top-k of rows of scores on the GPU: a CUDA radix selection compiled at first use, exact and deterministic.

PyTorch's own topk leaves open which of equal scores it keeps and is far from the speed of memory; see topk.cu.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("paraflash.kernels")

THREADS, MAX_K, MAX_ENTRIES = 512, 2048, 1 << 22  # as in topk.cu


@lru_cache
def _kernel(device: int) -> Any:
    source = (Path(__file__).parent / "topk.cu").read_text(encoding="utf-8")
    with torch.cuda.device(device):
        return torch.cuda._compile_kernel(source, "select_topk")


def select_topk(scores: Tensor, lengths: Tensor, k: int, allowed: Tensor | None = None, block_size: int = 1) -> Tensor:
    """scores [T, n] fp32 (rows may be strided), lengths [T] int64 -> indices [T, k] int64, ascending, -1 behind.

    Only the first lengths[t] entries count, and with `allowed` [T, words] int32 only those whose block (of block_size,
    a power of two) has its bit set.
    """
    out = torch.empty(scores.shape[0], k, dtype=torch.int64, device=scores.device)
    _launch(scores, lengths, k, allowed, block_size, out, None)
    return out


def select_bits(scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    """As `select_topk`, but of equal scores the higher index, as a bit set [T, ceil(n / 32)] int32."""
    words = -(-scores.shape[1] // 32)
    out = torch.empty(scores.shape[0], words, dtype=torch.int32, device=scores.device)
    _launch(scores, lengths, k, None, 1, None, out)
    return out


def _launch(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    allowed: Tensor | None,
    block_size: int,
    indices: Tensor | None,
    bits: Tensor | None,
) -> None:
    rows, n = scores.shape
    if k > MAX_K or n > MAX_ENTRIES or block_size & (block_size - 1):
        raise ValueError(
            f"top-k of {k} out of {n} in blocks of {block_size}: at most {MAX_K} of {MAX_ENTRIES}, powers of two"
        )
    if rows == 0:
        return
    unused = lengths
    _kernel(scores.device.index or 0)(
        grid=(rows, 1, 1),
        block=(THREADS, 1, 1),
        args=[
            scores,
            scores.stride(0),
            lengths,
            unused if allowed is None else allowed,
            0 if allowed is None else allowed.shape[1],
            block_size.bit_length() - 1,
            unused if indices is None else indices,
            unused if bits is None else bits,
            0 if bits is None else bits.shape[1],
            k,
        ],
    )
