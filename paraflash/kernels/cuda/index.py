"""Entry selection on the GPU: index keys as fp8 with one scale a row, scores in chunks of queries, exact top-k.

Trained index keys and queries (e2m1 with a power-of-two scale per 32 channels) are e4m3 numbers times one power of two
a row unless their group scales lie 2^14 apart, so fp8 scoring sees the same values. All requests of a step are scored
in one launch: their keys lie one after another, row t looks at [start, start + visible), its scores begin at column 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from paraflash.cache.pool import RecordPool
from paraflash.cache.records import PlainRecord
from paraflash.kernels.cuda.formats import exp2_int, pow2_ceil_exponent
from paraflash.kernels.cuda.launch import ceil_div, kernel
from paraflash.kernels.cuda.records import read_rows
from paraflash.kernels.interface import IndexRows

SCORE_BYTES = 1 << 30  # scores held at a time
MIN_ROWS = 528  # rows of a chunk that still fill a GPU of 132 multiprocessors

TopK = Callable[..., Tensor]


@kernel(do_not_specialize=("rows",))
def _fp8_rows_kernel(
    x_ptr, out_ptr, scale_ptr, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    mask = (row < rows)[:, None] & (c >= 0)[None, :]
    at = row.to(tl.int64)[:, None] * WIDTH + c[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    exponent = pow2_ceil_exponent(tl.maximum(tl.max(tl.abs(x), axis=1), 1e-30) * 0.002232142857142857)
    tl.store(out_ptr + at, (x * exp2_int(-exponent)[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row, exp2_int(exponent), mask=row < rows)


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, width] -> e4m3 codes [n, width] and fp32 power-of-two scales [n]."""
    n, width = x.shape
    codes = torch.empty(n, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(n, dtype=torch.float32, device=x.device)
    rows = max(1, 2048 // width)
    _fp8_rows_kernel[(ceil_div(n, rows),)](x, codes, scale, n, WIDTH=width, ROWS=rows, num_warps=4)
    return codes, scale


@kernel(do_not_specialize=("table_width", "entries"))
def _gather_keys_kernel(
    pool_ptr, table_ptr, counts_ptr, starts_ptr, out_ptr, scale_ptr, table_width, entries,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    entry = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    count = tl.load(counts_ptr + request)
    if tl.program_id(1) * ROWS < count:
        ok = entry < count
        page = tl.load(table_ptr + request * table_width + entry // entries, mask=ok, other=0)
        slot = page * entries + entry % entries
        c = tl.arange(0, WIDTH)
        mask = ok[:, None] & (c >= 0)[None, :]
        x = tl.load(pool_ptr + slot.to(tl.int64)[:, None] * WIDTH + c[None, :], mask=mask, other=0.0)
        row = tl.load(starts_ptr + request) + entry
        at = row.to(tl.int64)[:, None] * WIDTH + c[None, :]
        if FP8:
            f = x.to(tl.float32)
            exponent = pow2_ceil_exponent(tl.maximum(tl.max(tl.abs(f), axis=1), 1e-30) * 0.002232142857142857)
            tl.store(out_ptr + at, (f * exp2_int(-exponent)[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
            tl.store(scale_ptr + row, exp2_int(exponent), mask=ok)
        else:
            tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass
class Keys:
    """Index keys of all requests with rows here, back to back. rows [n, di]: fp8 with scale [n], or the pool's dtype.
    start [T] int32: first key of the row's request."""

    rows: Tensor
    scale: Tensor
    start: Tensor
    width: int  # at least the most entries any row may use


def gather_keys(pool: RecordPool, rows: IndexRows, fp8: bool, dtype: torch.dtype) -> Keys:
    """Pulls the keys that this step's rows may see out of the pool's pages: fp8, or the pool's dtype if it is plain,
    or `dtype`. There is room for rows.total keys; what lies behind the last one is not written."""
    record, device = pool.record, pool.storage.device
    total, width = rows.total, record.dim
    start = rows.starts[rows.row_request].to(torch.int32)
    if not isinstance(record, PlainRecord):
        key = torch.arange(total, device=device)
        owner = torch.searchsorted(rows.starts + rows.counts, key, right=True).clamp_max(len(rows.counts) - 1)
        entry = key - rows.starts[owner]
        page = rows.block_tables[owner, (entry // rows.entries).clamp_max(rows.block_tables.shape[1] - 1)]
        slots = torch.where(entry < rows.counts[owner], page * rows.entries + entry % rows.entries, -1)
        values = torch.empty(total, width, dtype=dtype, device=device)
        read_rows(pool, slots, values)
        return (
            Keys(*fp8_rows(values), start, rows.width) if fp8 else Keys(values, values.new_empty(0), start, rows.width)
        )
    out = torch.empty(total, width, dtype=torch.float8_e4m3fn if fp8 else record.dtype, device=device)
    scale = torch.empty(total if fp8 else 0, dtype=torch.float32, device=device)
    block = max(1, 4096 // width)
    _gather_keys_kernel[(len(rows.counts), ceil_div(rows.width, block))](
        pool.storage.view(record.dtype), rows.block_tables, rows.counts, rows.starts, out, scale,
        rows.block_tables.shape[1], rows.entries, WIDTH=width, ROWS=block, FP8=fp8, num_warps=4,
    )  # fmt: skip
    return Keys(out, scale, start, rows.width)


@kernel(do_not_specialize=("rows",))
def _scores_kernel(
    q_ptr, w_ptr, k_ptr, start_ptr, visible_ptr, out_ptr, out_stride, rows,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    ok = t < rows
    visible = tl.load(visible_ptr + t, mask=ok, other=0).to(tl.int32)
    start = tl.load(start_ptr + t, mask=ok, other=0).to(tl.int32)
    column = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    if tl.program_id(1) * KEYS < tl.max(visible, axis=0):
        c = tl.arange(0, WIDTH)
        head = tl.arange(0, QUERIES * HEADS)
        line = tl.program_id(0).to(tl.int64) * QUERIES * HEADS + head
        live = line < rows.to(tl.int64) * HEADS
        q = tl.load(q_ptr + line[:, None] * WIDTH + c[None, :], mask=live[:, None] & (c >= 0)[None, :], other=0.0)
        w = tl.load(w_ptr + line, mask=live, other=0.0)
        # A block of queries is of one request where it can be; otherwise the requests take turns.
        low, high = tl.min(tl.where(ok, start, 2147483647), axis=0), tl.max(start, axis=0)
        out = tl.full((QUERIES, KEYS), float("-inf"), tl.float32)
        base = low
        while base <= high:
            mine = ok & (start == base)
            count = tl.max(tl.where(mine, visible, 0), axis=0)
            k = tl.load(
                k_ptr + (base + column).to(tl.int64)[None, :] * WIDTH + c[:, None],
                mask=(column < count)[None, :] & (c >= 0)[:, None], other=0.0,
            )  # fmt: skip
            if EXACT:
                dots = tl.dot(q, k, input_precision="ieee")
            else:
                dots = tl.dot(q, k)
            parts = tl.reshape(tl.maximum(dots, 0.0) * w[:, None], (QUERIES, HEADS, KEYS))
            inside = mine[:, None] & (column[None, :] < visible[:, None])
            out = tl.where(inside, tl.sum(parts, axis=1), out)
            base = tl.min(tl.where(ok & (start > base), start, 2147483647), axis=0)
        tl.store(out_ptr + t.to(tl.int64)[:, None] * out_stride + column[None, :], out, mask=ok[:, None])


def triton_scores(q: Tensor, weights: Tensor, keys: Keys, start: Tensor, visible: Tensor) -> Tensor:
    """q [T, heads, di], weights [T, heads] fp32 (scaled) -> fp32 [T, width]; what a row may not see is not written."""
    rows, heads, width = q.shape
    block = 128
    out = torch.empty(rows, ceil_div(keys.width, block) * block, dtype=torch.float32, device=q.device)
    queries = max(1, min(4, 128 // heads))
    _scores_kernel[(ceil_div(rows, queries), ceil_div(keys.width, block))](
        q, weights, keys.rows, start, visible, out, out.stride(0), rows,
        HEADS=heads, WIDTH=width, QUERIES=queries, KEYS=block, EXACT=q.dtype == torch.float32, num_warps=8,
    )  # fmt: skip
    return out


@kernel
def _block_best_kernel(
    scores_ptr, stride, visible_ptr, out_ptr, blocks, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    visible = tl.load(visible_ptr + row).to(tl.int32)
    b = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    e = b[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    s = tl.load(scores_ptr + row.to(tl.int64) * stride + e, mask=e < visible, other=float("-inf"))
    best = tl.where(b == (visible - 1) // SIZE, float("inf"), tl.max(s, axis=1))
    tl.store(out_ptr + row.to(tl.int64) * blocks + b, best, mask=b < blocks)


def block_best(scores: Tensor, visible: Tensor, width: int, size: int) -> Tensor:
    """Best score of each block of `size` entries [T, ceil(width / size)]; the newest visible block is +inf."""
    blocks = -(-width // size)
    out = torch.empty(scores.shape[0], blocks, dtype=torch.float32, device=scores.device)
    _block_best_kernel[(scores.shape[0], ceil_div(blocks, 256))](
        scores, scores.stride(0), visible, out, blocks, SIZE=size, BLOCK=256, num_warps=4
    )
    return out


@dataclass
class Candidates:
    """Kept blocks of each row as bits [T, words] int32; None: every visible block is kept."""

    bits: Tensor | None
    block_size: int


def all_visible(visible: Tensor, topk: int) -> Tensor:
    """Entries [T, topk] where each row may use all of its visible ones."""
    entry = torch.arange(topk, device=visible.device)
    return torch.where(entry[None] < visible[:, None], entry[None], -1)


def chunk_rows(rows: int, width: int) -> int:
    """Rows scored at a time: scores stay within SCORE_BYTES, and a chunk still fills the GPU."""
    return max(1, min(rows, max(MIN_ROWS, SCORE_BYTES // (4 * max(1, width)))))


def select(
    scorer: Callable[[slice], Tensor],
    width: int,
    visible: Tensor,
    topk: int,
    candidates: Candidates | None,
    publish: tuple[int, int] | None,
    select_topk: TopK,
    select_bits: TopK,
) -> tuple[Tensor, Candidates | None]:
    """Top-k and candidate blocks of all rows, a chunk at a time; `scorer(rows)` gives scores [n, >= width]."""
    rows = visible.shape[0]
    entries = torch.empty(rows, topk, dtype=torch.int64, device=visible.device)
    published: Candidates | None = None
    if publish is not None:
        blocks, size = publish
        bits = None
        if width > blocks * size:
            words = ceil_div(ceil_div(width, size), 32)
            bits = torch.empty(rows, words, dtype=torch.int32, device=visible.device)
        published = Candidates(bits, size)
    step = chunk_rows(rows, width)
    for first in range(0, rows, step):
        part = slice(first, min(rows, first + step))
        scores = scorer(part)
        seen = visible[part].contiguous()
        if published is not None and published.bits is not None and publish is not None:
            size = publish[1]
            best = block_best(scores, seen, width, size)
            published.bits[part] = select_bits(best, (seen + size - 1) // size, publish[0])
        if candidates is not None and candidates.bits is not None:
            entries[part] = select_topk(scores, seen, topk, candidates.bits[part], candidates.block_size)
        else:
            entries[part] = select_topk(scores, seen, topk)
    return entries, published


def index_weights(weights: Tensor, scale: float, q_scale: Tensor | None) -> Tensor:
    """fp32 [T, heads]: head weights with the score scale and the queries' fp8 scales folded in."""
    w = weights.float() * scale
    return w if q_scale is None else w * q_scale.view(w.shape)


def triton_usable(heads: int, width: int) -> bool:
    return heads & (heads - 1) == 0 and heads <= 128 and width >= 16 and math.log2(width).is_integer()
