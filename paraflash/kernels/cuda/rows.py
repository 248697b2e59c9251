"""Triton kernels over rows of one power-of-two width: norm, rope, trained rounding and the store, in one pass.

They make window latents, compressed latents, index keys and index queries (model.md 3.6 to 3.9), pool ratio-2 pairs and
rotate q and o in place. The rounding points are the reference's: after the norm and after rope values take x's dtype.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from paraflash.cache.records import PlainRecord, Record
from paraflash.kernels.cuda.formats import load_angles, mxfp4_round_trip, mxfp8_round_trip, nvfp4_round_trip, rope_tail
from paraflash.kernels.cuda.launch import ceil_div, kernel
from paraflash.kernels.interface import Rotary
from paraflash.kernels.sizes import power_of_2

NONE, WINDOW, LATENT, INDEX = 0, 1, 2, 3  # which trained rounding
BLOCK_ELEMENTS = 2048


@kernel(do_not_specialize=("rows", "heads"))
def _row_kernel(
    x_ptr, x_stride, w_ptr, cos_ptr, sin_ptr, out_ptr, rows, heads, eps,
    WIDTH: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    mask = row < rows
    both = mask[:, None] & (column >= 0)[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * x_stride + column[None, :], mask=both, other=0.0).to(tl.float32)
    if NORM:
        weight = tl.load(w_ptr + column).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
        x = (x * rstd[:, None] * weight[None, :]).to(dtype).to(tl.float32)
    cos, sin = load_angles(cos_ptr, sin_ptr, row // heads, mask, WIDTH, ROPE)
    x = rope_tail(x, cos, sin, ROWS, WIDTH, ROPE).to(dtype).to(tl.float32)
    if ROUND == 1:
        x = mxfp8_round_trip(x, ROWS, WIDTH // 32, 32)
    elif ROUND == 2:
        x = nvfp4_round_trip(x, ROWS, WIDTH // 16, 16)
    elif ROUND == 3:
        x = mxfp4_round_trip(x, ROWS, WIDTH // 32, 32)
    at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=both)


def fits(width: int, rope: int) -> bool:
    """Whether rows of this width can go through `_row_kernel`."""
    return width >= 32 and width & (width - 1) == 0 and 0 < rope <= width


def transform_rows(
    x: Tensor, weight: Tensor | None, eps: float, rotary: Rotary, rounding: int, dtype: torch.dtype, heads: int = 1
) -> Tensor:
    """x [n, width] -> [n, width] in dtype; `heads` consecutive rows share one row of the angles."""
    n, width = x.shape
    out = torch.empty(n, width, dtype=dtype, device=x.device)
    rows = max(1, BLOCK_ELEMENTS // width)
    _row_kernel[(ceil_div(n, rows),)](
        x, x.stride(0), weight if weight is not None else x, rotary.cos, rotary.sin, out, n, heads, eps,
        WIDTH=width, ROPE=2 * rotary.cos.shape[-1], ROWS=rows, NORM=weight is not None, ROUND=rounding, num_warps=4,
    )  # fmt: skip
    return out


def record_rows(
    x: Tensor, weight: Tensor | None, eps: float, rotary: Rotary, record: Record, rounding: int, trained: bool
) -> Tensor:
    """Rows x [n, record.dim] as bytes [n, record.nbytes]; `rounding` is applied unless the record itself is it."""
    rounding = rounding if trained and not record.trained else NONE
    if isinstance(record, PlainRecord):
        return transform_rows(x, weight, eps, rotary, rounding, record.dtype).view(torch.uint8)
    return record.encode(transform_rows(x, weight, eps, rotary, rounding, x.dtype))


@kernel(do_not_specialize=("rows", "heads"))
def _rope_kernel(
    x_ptr, stride, token_stride, cos_ptr, sin_ptr, rows, heads,
    START: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, PAIRS)
    mask = (row < rows)[:, None] & (pair >= 0)[None, :]
    angle = (row // heads)[:, None] * PAIRS + pair[None, :]
    cos = tl.load(cos_ptr + angle, mask=mask, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)
    if INVERSE:
        sin = -sin
    column = tl.arange(0, 2 * PAIRS)
    at = ((row // heads).to(tl.int64) * token_stride + (row % heads) * stride)[:, None] + START + column[None, :]
    wide = (row < rows)[:, None] & (column >= 0)[None, :]
    a, b = tl.split(tl.reshape(tl.load(x_ptr + at, mask=wide, other=0.0).to(tl.float32), (ROWS, PAIRS, 2)))
    turned = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (ROWS, 2 * PAIRS))
    tl.store(x_ptr + at, turned.to(x_ptr.dtype.element_ty), mask=wide)


def rope_in_place(x: Tensor, rotary: Rotary, inverse: bool) -> Tensor:
    """Rotates the tail of x [T, H, d] (each token's part contiguous) where it lies and returns x."""
    width, pairs = x.shape[-1], rotary.cos.shape[-1]
    rows = x.numel() // width
    block = max(1, BLOCK_ELEMENTS // (2 * pairs))
    _rope_kernel[(ceil_div(rows, block),)](
        x, width, x.stride(0), rotary.cos, rotary.sin, rows, x.shape[1],
        START=width - 2 * pairs, PAIRS=pairs, ROWS=block, INVERSE=inverse, num_warps=4,
    )  # fmt: skip
    return x


@kernel
def _pool_kernel(first_ptr, second_ptr, out_ptr, first_stride, second_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < WIDTH
    one, two = first_ptr + row * first_stride + c, second_ptr + row * second_stride + c
    g1, g2 = tl.load(one + WIDTH, mask=mask, other=0.0), tl.load(two + WIDTH, mask=mask, other=0.0)
    top = tl.maximum(g1, g2)
    e1, e2 = tl.exp(g1 - top), tl.exp(g2 - top)
    value = (e1 * tl.load(one, mask=mask, other=0.0) + e2 * tl.load(two, mask=mask, other=0.0)) / (e1 + e2)
    tl.store(out_ptr + row * WIDTH + c, value, mask=mask)


def pool_pairs(first: Tensor, second: Tensor) -> Tensor:
    groups, width = first.shape[0], first.shape[1] // 2
    out = torch.empty(groups, width, dtype=torch.float32, device=first.device)
    block = min(512, power_of_2(width))
    _pool_kernel[(groups, ceil_div(width, block))](
        first, second, out, first.stride(0), second.stride(0), WIDTH=width, BLOCK=block, num_warps=4
    )
    return out
