"""Routed experts on the GPU: router, permutation by expert, two grouped products, SwiGLU between them, combine.

h [T, D] with ids [T, k] -> N = T * k assignments, of which the local ones are ordered by expert (stable, so results do
not depend on timing); the number of local ones stays on the device, buffers have room for all N. Where the products
take FP8 inputs, gathering and SwiGLU write e4m3 codes with one scale a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from paraflash.kernels.cuda.expert_products import PackedExperts
from paraflash.kernels.cuda.formats import e4m3_row, mxfp8_round_trip
from paraflash.kernels.cuda.launch import ceil_div, kernel
from paraflash.kernels.cuda.linear import linear_fp32
from paraflash.kernels.sizes import power_of_2


@kernel(do_not_specialize=("rows",))
def _route_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, rows, factor, temperature,
    E: tl.constexpr, BLOCK: tl.constexpr, TOPK: tl.constexpr, KPAD: tl.constexpr,
    ROWS: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (e < E)[None, :]
    x = tl.load(logits_ptr + row[:, None] * E + e[None, :], mask=mask, other=0.0) / temperature
    # log1p(t) = log(u) * t / (u - 1) with u = 1 + t keeps small scores exact (model.md 8.23).
    t = tl.exp(-tl.abs(x))
    u = 1.0 + t
    soft = tl.maximum(x, 0.0) + tl.where(u == 1.0, t, tl.log(u) * t / tl.where(u == 1.0, 1.0, u - 1.0))
    score = tl.sqrt(soft)
    key = tl.where(mask, score + tl.load(bias_ptr + e, mask=e < E, other=0.0)[None, :], float("-inf"))
    column = tl.arange(0, KPAD)
    ids = tl.zeros((ROWS, KPAD), dtype=tl.int64)
    weights = tl.zeros((ROWS, KPAD), dtype=tl.float32)
    for k in tl.static_range(TOPK):
        best = tl.argmax(key, axis=1)  # of equal keys the lowest id
        hit = e[None, :] == best[:, None]
        value = tl.sum(tl.where(hit, score, 0.0), axis=1)
        ids = tl.where((column == k)[None, :], best.to(tl.int64)[:, None], ids)
        weights = tl.where((column == k)[None, :], value[:, None], weights)
        key = tl.where(hit, float("-inf"), key)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, axis=1) + 1e-20)[:, None]
    at = row[:, None] * TOPK + column[None, :]
    keep = (row < rows)[:, None] & (column < TOPK)[None, :]
    tl.store(ids_ptr + at, ids, mask=keep)
    tl.store(weights_ptr + at, weights * factor, mask=keep)


def route(
    h: Tensor, gate: Tensor, bias: Tensor, topk: int, factor: float, renormalise: bool, temperature: float
) -> tuple[Tensor, Tensor]:
    rows, count = h.shape[0], gate.shape[0]
    logits = linear_fp32(h, gate)
    ids = torch.empty(rows, topk, dtype=torch.int64, device=h.device)
    weights = torch.empty(rows, topk, dtype=torch.float32, device=h.device)
    _route_kernel[(ceil_div(rows, 4),)](
        logits, bias, ids, weights, rows, factor, temperature,
        E=count, BLOCK=power_of_2(count), TOPK=topk, KPAD=power_of_2(topk),
        ROWS=4, RENORMALISE=renormalise, num_warps=4,
    )  # fmt: skip
    return ids, weights


@kernel(do_not_specialize=("first", "total"))
def _count_kernel(ids_ptr, counts_ptr, first, total, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    count = 0
    for start in range(0, total, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + at, mask=at < total, other=-1)
        count += tl.sum((ids == expert + first).to(tl.int32), axis=0)
    tl.store(counts_ptr + expert, count)


@kernel(do_not_specialize=("first", "total", "experts"))
def _place_kernel(
    ids_ptr, counts_ptr, offsets_ptr, source_ptr, place_ptr, first, total, experts,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + e, mask=e < experts, other=0)
    base = tl.sum(tl.where(e < expert, counts, 0), axis=0)
    end = base + tl.sum(tl.where(e == expert, counts, 0), axis=0)
    if expert == 0:
        tl.store(offsets_ptr, 0)
    tl.store(offsets_ptr + expert + 1, end)
    for start in range(0, total, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mine = tl.load(ids_ptr + at, mask=at < total, other=-1) == expert + first
        hit = mine.to(tl.int32)
        row = base + tl.cumsum(hit, axis=0) - hit
        tl.store(source_ptr + row, at, mask=mine)
        tl.store(place_ptr + at, row, mask=mine)
        base += tl.sum(hit, axis=0)


@dataclass
class Permutation:
    """offsets [E + 1] int64: rows of each local expert; source [N] int32: assignment of each row (valid below
    offsets[E]); place [T, k] int32: row of each assignment (valid for local experts)."""

    offsets: Tensor
    source: Tensor
    place: Tensor


def permute(ids: Tensor, first: int, experts: int) -> Permutation:
    total, device = ids.numel(), ids.device
    offsets = torch.empty(experts + 1, dtype=torch.int64, device=device)
    counts, source, place = torch.empty(experts + 2 * total, dtype=torch.int32, device=device).split(
        [experts, total, total]
    )
    block = min(2048, max(64, power_of_2(total)))
    _count_kernel[(experts,)](ids, counts, first, total, BLOCK=block, num_warps=4)
    _place_kernel[(experts,)](
        ids, counts, offsets, source, place, first, total, experts,
        BLOCK=block, EXPERTS=power_of_2(experts), num_warps=4,
    )  # fmt: skip
    return Permutation(offsets, source, place.view(ids.shape))


@kernel
def _gather_kernel(
    h_ptr, source_ptr, end_ptr, out_ptr, D: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    if row < tl.load(end_ptr):
        token = (tl.load(source_ptr + row) // TOPK).to(tl.int64)
        for start in tl.static_range(0, D, BLOCK):
            c = start + tl.arange(0, BLOCK)
            x = tl.load(h_ptr + token * D + c, mask=c < D, other=0.0)
            tl.store(out_ptr + row.to(tl.int64) * D + c, x, mask=c < D)


@kernel
def _gather_fp8_kernel(
    h_ptr, source_ptr, end_ptr, out_ptr, scale_ptr, D: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    if row < tl.load(end_ptr):
        token = (tl.load(source_ptr + row) // TOPK).to(tl.int64)
        c = tl.arange(0, BLOCK)
        codes, scale = e4m3_row(tl.load(h_ptr + token * D + c, mask=c < D, other=0.0).to(tl.float32))
        tl.store(out_ptr + row.to(tl.int64) * D + c, codes.to(out_ptr.dtype.element_ty), mask=c < D)
        tl.store(scale_ptr + row, scale)


@kernel
def _activation_kernel(
    x_ptr, source_ptr, weights_ptr, end_ptr, out_ptr, scale_ptr, limit,
    INNER: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row < tl.load(end_ptr):
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = c < INNER
        at = row.to(tl.int64) * 2 * INNER + c
        g = tl.minimum(tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32), limit)
        u = tl.load(x_ptr + at + INNER, mask=mask, other=0.0).to(tl.float32)
        u = tl.minimum(tl.maximum(u, -limit), limit)
        # The routing weight goes in before the second product: it changes the rounding (model.md 3.13).
        a = g * tl.sigmoid(g) * u * tl.load(weights_ptr + tl.load(source_ptr + row))
        a = a.to(x_ptr.dtype.element_ty).to(tl.float32)
        if ROUND:
            a = tl.reshape(mxfp8_round_trip(tl.reshape(a, (1, BLOCK)), 1, BLOCK // 32, 32), (BLOCK,))
        if FP8:  # the program holds the whole row
            a, scale = e4m3_row(a)
            tl.store(scale_ptr + row, scale)
        tl.store(out_ptr + row.to(tl.int64) * INNER + c, a.to(out_ptr.dtype.element_ty), mask=mask)


@kernel(do_not_specialize=("first", "experts"))
def _combine_kernel(
    y_ptr, ids_ptr, place_ptr, more_ptr, out_ptr, first, experts,
    D: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOPK):
        expert = tl.load(ids_ptr + token * TOPK + k) - first
        if (expert >= 0) & (expert < experts):
            row = tl.load(place_ptr + token * TOPK + k).to(tl.int64)
            total += tl.load(y_ptr + row * D + c, mask=c < D, other=0.0).to(tl.float32)
    if MORE:
        total += tl.load(more_ptr + token * D + c, mask=c < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + c, total.to(out_ptr.dtype.element_ty), mask=c < D)


def gather(h: Tensor, p: Permutation, end: Tensor, fp8: bool) -> tuple[Tensor, Tensor | None]:
    """Row of each local assignment: h [T, D] -> [N, D], or e4m3 codes [N, D] and a power of two a row [N, 1] fp32."""
    total, d, topk = p.source.shape[0], h.shape[1], p.place.shape[1]
    if not fp8:
        x = torch.empty(total, d, dtype=h.dtype, device=h.device)
        _gather_kernel[(total,)](h, p.source, end, x, D=d, TOPK=topk, BLOCK=1024, num_warps=4)
        return x, None
    x, scale = fp8_rows(total, d, h.device)
    _gather_fp8_kernel[(total,)](h, p.source, end, x, scale, D=d, TOPK=topk, BLOCK=power_of_2(d), num_warps=8)
    return x, scale


def activate(
    gate_up: Tensor, p: Permutation, end: Tensor, weights: Tensor, limit: float, round_input: bool, fp8: bool
) -> tuple[Tensor, Tensor | None]:
    """SwiGLU times the routing weight: gate_up [N, 2 * I] -> [N, I], or codes and scales as in `gather`."""
    total, inner, scale = len(gate_up), gate_up.shape[1] // 2, None
    if fp8:
        a, scale = fp8_rows(total, inner, gate_up.device)
        block, warps = power_of_2(inner), 8
    else:
        a = torch.empty(total, inner, dtype=gate_up.dtype, device=gate_up.device)
        block, warps = min(1024, power_of_2(inner)), 4
    _activation_kernel[(total, ceil_div(inner, block))](
        gate_up, p.source, weights, end, a, end if scale is None else scale, limit,
        INNER=inner, BLOCK=block, ROUND=round_input, FP8=fp8, num_warps=warps,
    )  # fmt: skip
    return a, scale


def fp8_rows(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for e4m3 codes [rows, width] and scales [rows, 1] fp32."""
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty(rows, 1, dtype=torch.float32, device=device)


def run_experts(
    h: Tensor,
    ids: Tensor,
    weights: Tensor,
    packed: PackedExperts,
    limit: float,
    round_input: bool,
    expected: int,
    more: Tensor | None = None,
) -> Tensor:
    """Local experts' share of h [T, D] (already rounded where wanted), plus `more` -> h's dtype [T, D].

    `expected` local assignments are likely; it picks kernel settings and never bounds the rows.
    """
    h, ids, weights = h.contiguous(), ids.contiguous(), weights.contiguous()
    rows, d = h.shape
    topk, total = ids.shape[1], ids.numel()
    if total == 0:
        return torch.zeros_like(h)
    p = permute(ids, packed.first, packed.count)
    end = p.offsets[packed.count :]
    x, scale = gather(h, p, end, packed.fp8_inputs)
    gate_up = packed.up(x, scale, p.offsets, expected)
    a, scale = activate(gate_up, p, end, weights, limit, round_input, packed.fp8_inputs)
    y = packed.down(a, scale, p.offsets, expected)
    out = torch.empty_like(h)
    block = min(1024, power_of_2(d))
    _combine_kernel[(rows, ceil_div(d, block))](
        y, ids, p.place, y if more is None else more.contiguous(), out, packed.first, packed.count,
        D=d, TOPK=topk, BLOCK=block, MORE=more is not None, num_warps=4,
    )  # fmt: skip
    return out
