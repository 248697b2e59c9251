"""Sparse attention with sinks for few rows, over records as they are stored (model.md 3.10, 4.2).

For decoding with `nvfp4_ds_mla`: Mxfp8Record window rows [n, 33/32 d] and Nvfp4Record pool rows [m, 9/16 d], both
bytes, are decoded in registers to the bf16 numbers that `records.read_rows` gives, so that no workspace is written. A
row's keys are shared out over several programs, each of which leaves its maximum, sum and weighted rows; a second
kernel adds these up, with the sink.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paraflash.cache.pool import RecordPool
from paraflash.cache.records import Mxfp8Record, Nvfp4Record, Record
from paraflash.kernels.cuda.launch import ceil_div, kernel
from paraflash.kernels.cuda.records import Page, e2m1, e4m3, e8m0
from paraflash.kernels.sizes import power_of_2

PROGRAMS = 132  # what a step's work is shared out over at most, unless it has more rows: the SMs of an H200


def pays(rows: int, heads: int) -> bool:
    """Whether this beats decoding into a workspace for so many queries and local heads, as timed on an H200.

    Each program decodes the keys of its heads anew, so that it loses once there are rows enough to fill the GPU.
    """
    return rows <= (256 if heads <= 16 else 16)


def heads_at_once(rows: int) -> int:
    """The most heads of a program, each of which decodes its keys: few where rows alone do not fill the GPU."""
    return 32 if rows < 16 else 64


def fits(window: Record, stored: Record | None, width: int) -> bool:
    """Whether `attend` reads these records: they lie back to back, row by row."""
    return isinstance(window, Mxfp8Record) and isinstance(stored, Nvfp4Record | None) and width >= 32


@triton.jit
def _scaled(value, scale, KEYS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """value [KEYS, GROUPS * SIZE] times scale [KEYS, GROUPS] of its group."""
    return tl.reshape(tl.reshape(value, (KEYS, GROUPS, SIZE)) * scale[:, :, None], (KEYS, GROUPS * SIZE))


@triton.jit
def _add_keys(q, k, ok, m, norm, acc, scale):
    """A block of keys [KEYS, d]: the next running maximum, sum and weighted rows."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    s = tl.where(ok[None, :], s, float("-inf"))
    top = tl.maximum(m, tl.max(s, axis=1))
    p = tl.exp(s - top[:, None])
    fade = tl.exp(m - top)
    norm = norm * fade + tl.sum(p, axis=1)
    return top, norm, tl.dot(p.to(k.dtype), k, acc=acc * fade[:, None], input_precision="ieee")


@kernel(do_not_specialize=("W", "K", "share", "splits"))
def _attend_kernel(
    q_ptr, window_ptr, window_index_ptr, pool_ptr, slots_ptr, sink_ptr, out_ptr, part_ptr, state_ptr,
    scale, W, K, share, splits,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = WIDTH // 2
    BLOCKS: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    split = tl.program_id(1)
    head = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, WIDTH)
    q = tl.load(
        q_ptr + (row * HEADS + head)[:, None] * WIDTH + c[None, :],
        mask=(head < HEADS)[:, None] & (c >= 0)[None, :],
        other=0.0,
    )
    m = tl.full((BLOCK,), -1e30, dtype=tl.float32)
    norm = tl.zeros((BLOCK,), dtype=tl.float32)
    acc = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
    # Blocks of keys are numbered through the window's list, then the slots; a program takes `share` of them.
    own = (W + KEYS - 1) // KEYS
    first, end = split * share, tl.minimum(split * share + share, own + (K + KEYS - 1) // KEYS)
    # What does not change from block to block is computed anew in each: kept in registers, it would spill others.
    for block in tl.range(first, tl.minimum(end, own), disable_licm=True):
        place = block * KEYS + tl.arange(0, KEYS)
        index = tl.load(window_index_ptr + row * W + place, mask=place < W, other=-1)
        ok = index >= 0
        data = window_ptr + (tl.where(ok, index, 0) * (WIDTH + WIDTH // 32))[:, None]
        g = tl.arange(0, WIDTH // 32)
        byte = tl.load(data + c[None, :], mask=ok[:, None], other=0).to(tl.int32)
        size = tl.load(data + WIDTH + g[None, :], mask=ok[:, None], other=1).to(tl.int32)
        k = _scaled(e4m3(byte), e8m0(size), KEYS, WIDTH // 32, 32).to(q.dtype)
        m, norm, acc = _add_keys(q, k, ok, m, norm, acc, scale)
    for block in tl.range(tl.maximum(first, own), end, disable_licm=True):
        place = (block - own) * KEYS + tl.arange(0, KEYS)
        slot = tl.load(slots_ptr + row * K + place, mask=place < K, other=-1)
        ok = slot >= 0
        data = pool_ptr + (tl.where(ok, slot, 0) * (HALF + WIDTH // 16))[:, None]
        g = tl.arange(0, WIDTH // 16)
        byte = tl.load(data + tl.arange(0, HALF)[None, :], mask=ok[:, None], other=0).to(tl.int32)
        size = tl.load(data + HALF + g[None, :], mask=ok[:, None], other=0).to(tl.int32)
        value = tl.interleave(e2m1(byte & 15), e2m1(byte >> 4))
        k = _scaled(value, e4m3(size), KEYS, WIDTH // 16, 16).to(q.dtype)
        m, norm, acc = _add_keys(q, k, ok, m, norm, acc, scale)
    held = (head < HEADS)[:, None] & (c >= 0)[None, :]
    if WHOLE:
        sink = tl.load(sink_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32)
        top = tl.maximum(m, sink)
        fade = tl.exp(m - top)
        norm = norm * fade + tl.exp(sink - top)
        acc *= (fade / tl.where(norm > 0, norm, 1.0))[:, None]
        out = out_ptr + (row * HEADS + head)[:, None] * WIDTH + c[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=held)
    else:
        place = (row * splits + split) * HEADS + head
        tl.store(part_ptr + place[:, None] * WIDTH + c[None, :], acc, mask=held)
        tl.store(state_ptr + place * 2, m, mask=head < HEADS)
        tl.store(state_ptr + place * 2 + 1, norm, mask=head < HEADS)


@kernel(do_not_specialize=("splits",))
def _combine_kernel(
    part_ptr, state_ptr, sink_ptr, out_ptr, splits, HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, c = tl.arange(0, PADDED), tl.arange(0, WIDTH)
    place = (row * splits + split) * HEADS + head
    m = tl.load(state_ptr + place * 2, mask=split < splits, other=-1e30)
    norm = tl.load(state_ptr + place * 2 + 1, mask=split < splits, other=0.0)
    mask = (split < splits)[:, None] & (c >= 0)[None, :]
    acc = tl.load(part_ptr + place[:, None] * WIDTH + c[None, :], mask=mask, other=0.0)
    # The sink is a logit without a value: it counts in the denominator alone.
    sink = tl.load(sink_ptr + head).to(tl.float32)
    top = tl.maximum(tl.max(m, axis=0), sink)
    fade = tl.exp(m - top)
    norm = tl.sum(norm * fade, axis=0) + tl.exp(sink - top)
    out = tl.sum(acc * (fade / tl.where(norm > 0, norm, 1.0))[:, None], axis=0)
    tl.store(out_ptr + (row * HEADS + head) * WIDTH + c, out.to(out_ptr.dtype.element_ty))


def attend(
    q: Tensor,
    window: Page,
    window_index: Tensor,
    pool: RecordPool | None,
    slots: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """q [T, H, d] over the records that `fits` names: window_index [T, W] into `window`, slots [T, k] of `pool` int64
    (-1: none) -> [T, H, d]. How the work is shared out follows from shapes alone."""
    rows, heads, width = q.shape
    exact = q.dtype == torch.float32
    block = 16 if exact else min(heads_at_once(rows), max(16, power_of_2(heads)))
    keys = 16 if exact or block == 64 else 32  # what registers hold
    w, k = window_index.shape[1], 0 if slots is None else slots.shape[1]
    blocks, every = ceil_div(heads, block), ceil_div(w, keys) + ceil_div(k, keys)
    share = ceil_div(every, max(1, PROGRAMS // (rows * blocks)))
    splits = ceil_div(every, share)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    part, state = out, out  # not looked at without splits
    if splits > 1:
        part = torch.empty(rows, splits, heads, width, dtype=torch.float32, device=q.device)
        state = torch.empty(rows, splits, heads, 2, dtype=torch.float32, device=q.device)
    own = window.storage
    _attend_kernel[(rows * blocks, splits)](
        q.contiguous(), own, window_index, own if pool is None else pool.storage,
        window_index if slots is None else slots, sink, out, part, state, scale, w, k, share, splits,
        HEADS=heads, BLOCK=block, WIDTH=width, KEYS=keys, WHOLE=splits == 1,
        num_warps=4 if block == 16 else 8, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(rows, heads)](
            part, state, sink, out, splits, HEADS=heads, WIDTH=width, PADDED=power_of_2(splits), num_warps=4
        )
    return out
