"""Sparse attention with sinks over window rows and chosen pool rows, both bf16 (model.md 3.10).

With FlashMLA (heads padded to 64) both lists are merged into one list of rows of one allocation, the cache's arena,
in whose spare rows the step's window rows are laid; no key is gathered and none dequantised. The Triton kernel reads
the two tensors where they are; it serves other widths and dtypes, more heads, and installations without the package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paraflash.kernels.cuda.launch import ceil_div, kernel
from paraflash.kernels.sizes import power_of_2

FLASH_HEADS, FLASH_WIDTH, FLASH_KEYS = 64, 512, 128  # what FlashMLA takes: heads, channels, multiple of keys


def flash_takes(q: Tensor) -> bool:
    """Whether FlashMLA takes q [T, H, d], its heads padded: on an H200 the faster one at any T, from 8 heads on."""
    return q.dtype == torch.bfloat16 and q.shape[1] <= FLASH_HEADS and q.shape[2] == FLASH_WIDTH


@kernel(do_not_specialize=("window_base", "slot_base"))
def _merge_kernel(
    window_ptr, slots_ptr, out_ptr, lengths_ptr, window_base, slot_base,
    W: tl.constexpr, K: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr, HAS_SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    value = tl.load(window_ptr + row * W + c, mask=c < W, other=-1)
    value = tl.where(value >= 0, value + window_base, -1)
    if HAS_SLOTS:
        at = c - W
        slot = tl.load(slots_ptr + row * K + at, mask=(at >= 0) & (at < K), other=-1)
        value = tl.where(c >= W, tl.where(slot >= 0, slot + slot_base, -1), value)
    value = tl.where(c < TOTAL, value, -1)
    tl.store(out_ptr + row * TOTAL + c, value.to(tl.int32), mask=c < TOTAL)
    tl.store(lengths_ptr + row, tl.max(tl.where(value >= 0, c + 1, 0), axis=0).to(tl.int32))


def merge_indices(window: Tensor, slots: Tensor | None, window_base: int, slot_base: int) -> tuple[Tensor, Tensor]:
    """window [T, W] and slots [T, K] int64 (-1: none) -> rows [T, W + K padded] int32 and their used length [T]."""
    rows, w = window.shape
    k = 0 if slots is None else slots.shape[1]
    total = ceil_div(w + k, FLASH_KEYS) * FLASH_KEYS
    out = torch.empty(rows, total, dtype=torch.int32, device=window.device)
    lengths = torch.empty(rows, dtype=torch.int32, device=window.device)
    _merge_kernel[(rows,)](
        window, window if slots is None else slots, out, lengths, window_base, slot_base,
        W=w, K=k, TOTAL=total, BLOCK=power_of_2(total), HAS_SLOTS=slots is not None, num_warps=4,
    )  # fmt: skip
    return out, lengths


class MergedIndices:
    """Keeps the last merge: layers that share a selection share it, and a step has few selections."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._merged: tuple[Tensor, Tensor] | None = None

    def of(self, window: Tensor, slots: Tensor | None, window_base: int, slot_base: int) -> tuple[Tensor, Tensor]:
        old, key = self._key, (window, slots, window_base, slot_base)
        same = bool(old) and old[0] is window and old[1] is slots and old[2:] == key[2:]
        if self._merged is None or not same:
            self._key, self._merged = key, merge_indices(window, slots, window_base, slot_base)
        return self._merged


def flash_attention(
    run: Callable[..., Tensor], q: Tensor, rows: Tensor, index: Tensor, lengths: Tensor, sink: Tensor, scale: float
) -> Tensor:
    """q [T, H <= 64, 512] over rows [n, 512] -> [T, H, 512]; with fewer than 64 heads the tokens lie apart."""
    padded, sinks = pad_heads(q, sink)
    o = run(padded, rows.unsqueeze(1), index.unsqueeze(1), scale, sinks, lengths)
    return o[:, : q.shape[1]]


def pad_heads(q: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, H <= 64, d] and sink [H] with 64 heads, of which the last 64 - H hold anything: heads do not touch."""
    heads = q.shape[1]
    if heads == FLASH_HEADS:
        return q.contiguous(), sink
    padded = q.new_empty(q.shape[0], FLASH_HEADS, q.shape[2])
    padded[:, :heads] = q
    return padded, torch.nn.functional.pad(sink, (0, FLASH_HEADS - heads), value=float("-inf"))


@triton.jit
def _attend_part(
    q, m, norm, acc, keys_ptr, index_ptr, count, scale,
    WIDTH: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, WIDTH)
    for first in range(0, count, KEYS):
        at = first + tl.arange(0, KEYS)
        index = tl.load(index_ptr + at, mask=at < count, other=-1)
        ok = index >= 0
        k = tl.load(keys_ptr + tl.where(ok, index, 0)[:, None] * WIDTH + c[None, :], mask=ok[:, None], other=0.0)
        if EXACT:
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        else:
            s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where(ok[None, :], s, float("-inf"))
        top = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp(s - top[:, None])
        fade = tl.exp(m - top)
        norm = norm * fade + tl.sum(p, axis=1)
        if EXACT:
            acc = acc * fade[:, None] + tl.dot(p.to(k.dtype), k, input_precision="ieee")
        else:
            acc = acc * fade[:, None] + tl.dot(p.to(k.dtype), k)
        m = top
    return m, norm, acc


@kernel(do_not_specialize=("heads", "W", "K"))
def _attend_kernel(
    q_ptr, window_ptr, window_index_ptr, pool_ptr, slots_ptr, sink_ptr, out_ptr, heads, scale, W, K,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, HAS_SLOTS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    c = tl.arange(0, WIDTH)
    mask = (head < heads)[:, None] & (c >= 0)[None, :]
    at = (row * heads + head)[:, None] * WIDTH + c[None, :]
    q = tl.load(q_ptr + at, mask=mask, other=0.0)
    # The sink is a logit without a value: it starts the running maximum and the denominator.
    m = tl.load(sink_ptr + head, mask=head < heads, other=0.0).to(tl.float32)
    m = tl.maximum(m, -1e30)
    norm = tl.exp(tl.load(sink_ptr + head, mask=head < heads, other=0.0).to(tl.float32) - m)
    acc = tl.zeros((HEADS, WIDTH), dtype=tl.float32)
    m, norm, acc = _attend_part(q, m, norm, acc, window_ptr, window_index_ptr + row * W, W, scale, WIDTH, KEYS, EXACT)
    if HAS_SLOTS:
        m, norm, acc = _attend_part(q, m, norm, acc, pool_ptr, slots_ptr + row * K, K, scale, WIDTH, KEYS, EXACT)
    out = acc / tl.where(norm > 0, norm, 1.0)[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


def triton_attention(
    q: Tensor,
    window: Tensor,
    window_index: Tensor,
    pool: Tensor | None,
    slots: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """q [T, H, d] over window rows [n, d] and pool rows [m, d] of q's dtype -> [T, H, d]."""
    rows, heads, width = q.shape
    out = torch.empty_like(q)
    block = min(64, max(16, power_of_2(heads)))
    _attend_kernel[(rows, ceil_div(heads, block))](
        q, window, window_index, window if pool is None else pool, window_index if slots is None else slots, sink, out,
        heads, scale, window_index.shape[1], 0 if slots is None else slots.shape[1],
        WIDTH=width, HEADS=block, KEYS=32 if width * block <= 16384 else 16, HAS_SLOTS=slots is not None,
        EXACT=q.dtype == torch.float32, num_warps=2 if block == 16 else 4, num_stages=3,
    )  # fmt: skip
    return out
