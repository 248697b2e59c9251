"""Triton kernels of the residual streams: mixes with Sinkhorn, collapse, expand, RMSNorm and the Engram write.

All of them are bound by memory: streams [T, K, D] are read once in 16-byte pieces and fp32 exists in registers only.
The mixes' projection multiplies bf16 streams by three bf16 pieces of the fp32 matrix, which is exact up to the order of
the fp32 sum and still runs on the tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from paraflash.kernels.cuda.launch import ceil_div, kernel
from paraflash.kernels.cuda.linear import RoundedInputs, store_rounded
from paraflash.kernels.sizes import power_of_2

MIX_SPLITS = 16  # parts of the K * D channels that run side by side in the projection


@kernel
def _norm_kernel(
    x_ptr, x_stride, w_ptr, out_ptr, rounded_ptr, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < WIDTH
    x = tl.load(x_ptr + row * x_stride + c, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + c, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    y = (x * rstd * w).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + c, y, mask=mask)
    if ROUND:
        store_rounded(rounded_ptr + row * WIDTH + c, y, mask, BLOCK)


def rms_norm(x: Tensor, weight: Tensor, eps: float, inputs: RoundedInputs) -> Tensor:
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rounded = inputs.room(out)
    block = power_of_2(width)
    _norm_kernel[(flat.shape[0],)](
        flat, flat.stride(0), weight, out, out if rounded is None else rounded, eps,
        WIDTH=width, BLOCK=block, ROUND=rounded is not None, num_warps=_warps(block),
    )  # fmt: skip
    return out


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))


@kernel(do_not_specialize=("rows",))
def _mix_kernel(
    x_ptr, fn_ptr, dots_ptr, squares_ptr, rows,
    WIDTH: tl.constexpr, PART: tl.constexpr, MIXES: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    part = tl.program_id(1)
    acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    square = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, PART, BLOCK):
        at = start + tl.arange(0, BLOCK)
        k = part * PART + at
        inside = (at < PART) & (k < WIDTH)
        x = tl.load(
            x_ptr + row.to(tl.int64)[:, None] * WIDTH + k[None, :],
            mask=(row < rows)[:, None] & inside[None, :],
            other=0.0,
        )
        f = tl.load(
            fn_ptr + col[None, :] * WIDTH + k[:, None], mask=(col < MIXES)[None, :] & inside[:, None], other=0.0
        )
        wide = x.to(tl.float32)
        square += tl.sum(wide * wide, axis=1)
        if PIECES == 0:
            acc += tl.dot(x, f, input_precision="ieee")
        else:
            for _ in tl.static_range(PIECES):
                piece = f.to(tl.bfloat16)
                acc += tl.dot(x, piece)
                f -= piece.to(tl.float32)
    mask = (row < rows)[:, None] & (col < MIXES)[None, :]
    tl.store(dots_ptr + (part * rows + row)[:, None] * MIXES + col[None, :], acc, mask=mask)
    tl.store(squares_ptr + part * rows + row, square, mask=row < rows)


@kernel(do_not_specialize=("rows",))
def _sinkhorn_kernel(
    dots_ptr, squares_ptr, scale_ptr, base_ptr, pre_ptr, post_ptr, comb_ptr, rows, hc_eps, rms_eps,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, K: tl.constexpr, ITERS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    MIXES: tl.constexpr = K * (K + 2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = row < rows
    k = tl.arange(0, K)
    kk = tl.arange(0, K * K)
    small = ok[:, None] & (k >= 0)[None, :]
    large = ok[:, None] & (kk >= 0)[None, :]
    square = tl.zeros((ROWS,), dtype=tl.float32)
    pre = tl.zeros((ROWS, K), dtype=tl.float32)
    post = tl.zeros((ROWS, K), dtype=tl.float32)
    comb = tl.zeros((ROWS, K * K), dtype=tl.float32)
    for s in tl.static_range(SPLITS):
        square += tl.load(squares_ptr + s * rows + row, mask=ok, other=0.0)
        at = dots_ptr + (s * rows + row)[:, None] * MIXES
        pre += tl.load(at + k[None, :], mask=small, other=0.0)
        post += tl.load(at + K + k[None, :], mask=small, other=0.0)
        comb += tl.load(at + 2 * K + kk[None, :], mask=large, other=0.0)
    rstd = tl.rsqrt(square / WIDTH + rms_eps)[:, None]
    s0, s1, s2 = tl.load(scale_ptr), tl.load(scale_ptr + 1), tl.load(scale_ptr + 2)
    pre = tl.sigmoid(pre * rstd * s0 + tl.load(base_ptr + k)[None, :]) + hc_eps
    post = 2 * tl.sigmoid(post * rstd * s1 + tl.load(base_ptr + K + k)[None, :])
    tl.store(pre_ptr + row[:, None] * K + k[None, :], pre, mask=small)
    tl.store(post_ptr + row[:, None] * K + k[None, :], post, mask=small)
    c = tl.reshape(comb * rstd * s2 + tl.load(base_ptr + 2 * K + kk)[None, :], (ROWS, K, K))
    c = tl.exp(c - tl.max(c, axis=2)[:, :, None])
    c = c / tl.sum(c, axis=2)[:, :, None] + hc_eps
    c = c / (tl.sum(c, axis=1)[:, None, :] + hc_eps)
    for _ in range(ITERS - 1):
        c = c / (tl.sum(c, axis=2)[:, :, None] + hc_eps)
        c = c / (tl.sum(c, axis=1)[:, None, :] + hc_eps)
    tl.store(comb_ptr + row[:, None] * K * K + kk[None, :], tl.reshape(c, (ROWS, K * K)), mask=large)


def hc_mixes(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iters: int, hc_eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, k, d = streams.shape
    width, mixes = k * d, k * (k + 2)

    def fp32(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=streams.device)

    part = ceil_div(ceil_div(width, MIX_SPLITS), 128) * 128
    splits = ceil_div(width, part)
    dots, squares = fp32(splits, rows, mixes), fp32(splits, rows)
    block_rows = 128 if rows >= 2048 else 64 if rows >= 512 else 16
    bf16 = streams.dtype == torch.bfloat16
    _mix_kernel[(ceil_div(rows, block_rows), splits)](
        streams, fn, dots, squares, rows,
        WIDTH=width, PART=part, MIXES=mixes, ROWS=block_rows, COLS=max(16, power_of_2(mixes)),
        BLOCK=128 if bf16 else 32, PIECES=3 if bf16 else 0, num_warps=8 if block_rows == 128 else 4, num_stages=3,
    )  # fmt: skip
    pre, post, comb = fp32(rows, k), fp32(rows, k), fp32(rows, k, k)
    _sinkhorn_kernel[(ceil_div(rows, 32),)](
        dots, squares, scale, base, pre, post, comb, rows, hc_eps, rms_eps,
        WIDTH=width, SPLITS=splits, K=k, ITERS=iters, ROWS=32, num_warps=1,
    )  # fmt: skip
    return pre, post, comb


@kernel
def _collapse_kernel(
    s_ptr, pre_ptr, w_ptr, out_ptr, rounded_ptr, eps,
    D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < D
    h = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(K):
        s = tl.load(s_ptr + (row * K + k) * D + c, mask=mask, other=0.0).to(tl.float32)
        h += tl.load(pre_ptr + row * K + k) * s
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    h = h.to(dtype).to(tl.float32)
    w = tl.load(w_ptr + c, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h, axis=0) / D + eps)
    y = (h * rstd * w).to(dtype)
    tl.store(out_ptr + row * D + c, y, mask=mask)
    if ROUND:
        store_rounded(rounded_ptr + row * D + c, y, mask, BLOCK)


def hc_collapse(streams: Tensor, pre: Tensor, weight: Tensor, eps: float, inputs: RoundedInputs) -> Tensor:
    rows, k, d = streams.shape
    out = torch.empty(rows, d, dtype=streams.dtype, device=streams.device)
    rounded = inputs.room(out)
    block = power_of_2(d)
    _collapse_kernel[(rows,)](
        streams, pre, weight, out, out if rounded is None else rounded, eps,
        D=d, K=k, BLOCK=block, ROUND=rounded is not None, num_warps=_warps(block),
    )  # fmt: skip
    return out


@kernel
def _expand_kernel(
    y_ptr, s_ptr, post_ptr, comb_ptr, out_ptr, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < D
    y = tl.load(y_ptr + row * D + c, mask=mask, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        value = tl.load(post_ptr + row * K + k) * y
        for j in tl.static_range(K):
            # The K reads of a stream hit the L1 cache after the first.
            s = tl.load(s_ptr + (row * K + j) * D + c, mask=mask, other=0.0).to(tl.float32)
            value += tl.load(comb_ptr + (row * K + j) * K + k) * s
        tl.store(out_ptr + (row * K + k) * D + c, value.to(out_ptr.dtype.element_ty), mask=mask)


def hc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    rows, k, d = streams.shape
    out = torch.empty_like(streams)
    block = min(1024, power_of_2(d))
    _expand_kernel[(rows, ceil_div(d, block))](y, streams, post, comb, out, D=d, K=k, BLOCK=block, num_warps=4)
    return out


@kernel(do_not_specialize=("count",))
def _total_kernel(a_ptr, b_ptr, c_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    dtype = out_ptr.dtype.element_ty
    a = tl.load(a_ptr + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, ((a + b).to(dtype).to(tl.float32) + c).to(dtype), mask=mask)


def total(parts: Sequence[Tensor]) -> Tensor:
    """Three at a time: one pass over memory instead of two, with the bits of two."""
    done, left = parts[0], parts[1:]
    while len(left) > 1:
        a, b, c = done.contiguous(), left[0].contiguous(), left[1].contiguous()
        done, left = torch.empty_like(a), left[2:]
        _total_kernel[(ceil_div(a.numel(), 2048),)](a, b, c, done, a.numel(), BLOCK=2048, num_warps=4)
    return done + left[0] if left else done


@kernel
def _engram_kernel(
    s_ptr, u_ptr, q_ptr, k_ptr, out_ptr, eps, root, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1)
    c = tl.arange(0, BLOCK)
    mask = c < D
    s = tl.load(s_ptr + (row * K + k) * D + c, mask=mask, other=0.0).to(tl.float32)
    key = tl.load(u_ptr + (row * (K + 1) + k) * D + c, mask=mask, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + k * D + c, mask=mask, other=0.0).to(tl.float32)
    kw = tl.load(k_ptr + k * D + c, mask=mask, other=0.0).to(tl.float32)
    dot = tl.sum(s * q * kw * key, axis=0)
    norms = tl.sqrt(tl.sum(s * s, axis=0) / D + eps) * tl.sqrt(tl.sum(key * key, axis=0) / D + eps)
    dot = dot / norms * root
    size = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
    # copysign: a negative zero counts as negative, but no sum of products makes one that matters here.
    gate = tl.sigmoid(tl.where(dot < 0, -size, size))
    value = tl.load(u_ptr + (row * (K + 1) + K) * D + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + (row * K + k) * D + c, (s + gate * value).to(out_ptr.dtype.element_ty), mask=mask)


def engram_write(streams: Tensor, u: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    rows, k, d = streams.shape
    out = torch.empty_like(streams)
    block = power_of_2(d)
    _engram_kernel[(rows, k)](
        streams, u, q_weight, k_weight, out, eps, d**-0.5, D=d, K=k, BLOCK=block, num_warps=_warps(block)
    )
    return out
