"""Routed experts on the GPU: router, permutation by expert, two grouped products, SwiGLU between them, combine.

h [T, D] with ids [T, k] -> N = T * k assignments, of which the local ones are ordered by expert (stable, so results do
not depend on timing); the number of local ones stays on the device, buffers have room for all N. The products run on
packed FP4 weights (humming) or on bf16 weights (torch grouped matmul).
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from paraflash.checkpoint.quant import QuantTensor
from paraflash.kernels.cuda.formats import mxfp8_round_trip
from paraflash.kernels.cuda.launch import ceil_div, kernel
from paraflash.kernels.cuda.linear import linear_fp32
from paraflash.kernels.interface import Expert
from paraflash.kernels.sizes import power_of_2

log = logging.getLogger("paraflash.kernels")

# Rows for which FP4 products are tuned, half an octave or an octave apart: a kernel tuned for 8,192 rows takes 20 %
# longer for 12,288 of 48 experts than one tuned for these, and one for 2,048 takes a third longer for 3,072.
TUNED_ROWS = (64, 256, 768, 1536, 3072, 6144, 12288, 24576)

BACKENDS = {  # --moe-backend, vLLM's names included -> what runs
    "auto": "auto",
    "humming": "humming",
    "marlin": "humming",
    "triton": "grouped_mm",
    "grouped_mm": "grouped_mm",
}


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
def _activation_kernel(
    x_ptr, source_ptr, weights_ptr, end_ptr, out_ptr, limit,
    INNER: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr,
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
        a = a.to(out_ptr.dtype.element_ty).to(tl.float32)
        if ROUND:
            a = tl.reshape(mxfp8_round_trip(tl.reshape(a, (1, BLOCK)), 1, BLOCK // 32, 32), (BLOCK,))
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


class GroupedMatmul:
    """Expert products on bf16 weights through torch's grouped matmul."""

    def __init__(self, weight: Tensor):
        self.weight = weight  # [E, out, in]

    def __call__(self, x: Tensor, offsets: Tensor, rows: int) -> Tensor:
        return torch._grouped_mm(x, self.weight.transpose(1, 2), offs=offsets[1:].to(torch.int32))


def tuned_for(rows: int) -> int:
    """The nearest of TUNED_ROWS by ratio."""
    return min(TUNED_ROWS, key=lambda size: max(rows, 1) / size + size / max(rows, 1))


class HummingFp4:
    """Expert products on packed FP4 weights (bf16 activations) through humming-kernels."""

    def __init__(self, module: Any, weight: QuantTensor):
        """weight [E, out, in] of kind fp4."""
        experts, out, width = weight.shape
        with torch.device(weight.data.device):
            self.layer = module.HummingLayer(
                shape_n=out,
                shape_k=width,
                weight_config={"quant_method": "mxfp4"},
                num_experts=experts,
                torch_dtype=torch.bfloat16,
            )
        self.layer.weight.data.copy_(weight.data)
        self.layer.weight_scale.data.copy_(weight.scale)
        self.layer.transform()
        self._configs: dict[int, Any] = {}

    def __call__(self, x: Tensor, offsets: Tensor, rows: int) -> Tensor:
        from humming.ops import launch_kernel

        size = tuned_for(rows)
        if size not in self._configs:
            self._configs[size] = self._compile(size)
        layer = self.layer
        return launch_kernel(
            configs=self._configs[size],
            inputs=x,
            weight=layer.weight,
            weight_scale=layer.weight_scale,
            outputs=torch.empty(x.shape[0], layer.shape_n, dtype=x.dtype, device=x.device),
            expert_layout=offsets,
            locks=layer.locks,
        )

    def _compile(self, rows: int) -> Tensor:
        """The kernel for about this many rows: a few sizes stand for all, since each costs a compilation."""
        from humming.kernel.humming import HummingKernel
        from humming.tune import get_heuristics_config

        config, device = self.layer.humming_config, self.layer.weight.device
        tuning = get_heuristics_config(config, rows, gemm_type="grouped_contiguous", device=device)
        compute = json.dumps({"gemm_type": "grouped_contiguous"})
        return HummingKernel.prepare_kernels(config.to_str(), compute, json.dumps(tuning), device)


@dataclass
class PackedExperts:
    """What `experts` takes: both products of the local experts."""

    up: Any  # [E, 2 * I, D]: gate over up
    down: Any  # [E, D, I]
    first: int
    total: int  # routed experts of the model
    count: int
    inner: int


def choose_backend(name: str, humming: Any, dtype: torch.dtype) -> str:
    """Backend for `--moe-backend name`. Raises ValueError for an unknown or unavailable one."""
    if name not in BACKENDS:
        raise ValueError(f"moe_backend is {name!r}; {', '.join(BACKENDS)} is needed")
    chosen = BACKENDS[name]
    if chosen == "auto":
        return "humming" if humming is not None and dtype == torch.bfloat16 else "grouped_mm"
    if chosen == "humming" and dtype != torch.bfloat16:
        raise ValueError(f"moe_backend {name} computes in bfloat16, dtype is {dtype}; use triton or auto")
    if chosen == "humming" and humming is None:
        raise ValueError(f"moe_backend {name} needs the package humming-kernels; use triton or auto")
    if chosen != name:
        log.info("moe_backend %s runs as %s", name, chosen)
    return chosen


def pack_experts(experts: Expert, backend: str, humming: Any, dtype: torch.dtype) -> PackedExperts | Expert:
    """Experts as `run_experts` takes them. Widths that no grouped product takes, and fp32, stay an Expert."""
    count, inner, width = experts.w1.shape
    if backend == "humming" and isinstance(experts.w1, QuantTensor) and not (inner % 128 or width % 128):
        up = QuantTensor(
            "fp4",
            torch.cat([experts.w1.data, experts.w3.data], 1),
            torch.cat([experts.w1.scale, experts.w3.scale], 1),
        )
        products = HummingFp4(humming, up), HummingFp4(humming, experts.w2)
        return PackedExperts(*products, experts.first, experts.total, count, inner)
    w1, w2, w3 = (
        w.dequantise(dtype) if isinstance(w, QuantTensor) else w for w in (experts.w1, experts.w2, experts.w3)
    )
    if (w1.is_cuda and dtype != torch.bfloat16) or inner % 32 or width % 32:
        return Expert(w1, w2, w3, experts.first, experts.total)
    gate_up = GroupedMatmul(torch.cat([w1, w3], 1))
    return PackedExperts(gate_up, GroupedMatmul(w2), experts.first, experts.total, count, inner)


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
    topk, total, inner = ids.shape[1], ids.numel(), packed.inner
    if total == 0:
        return torch.zeros_like(h)
    p = permute(ids, packed.first, packed.count)
    end = p.offsets[packed.count :]
    x = torch.empty(total, d, dtype=h.dtype, device=h.device)
    _gather_kernel[(total,)](h, p.source, end, x, D=d, TOPK=topk, BLOCK=1024, num_warps=4)
    gate_up = packed.up(x, p.offsets, expected)
    a = torch.empty(total, inner, dtype=h.dtype, device=h.device)
    block = min(1024, power_of_2(inner))
    _activation_kernel[(total, ceil_div(inner, block))](
        gate_up, p.source, weights, end, a, limit, INNER=inner, BLOCK=block, ROUND=round_input, num_warps=4
    )
    y = packed.down(a, p.offsets, expected)
    out = torch.empty_like(h)
    block = min(1024, power_of_2(d))
    _combine_kernel[(rows, ceil_div(d, block))](
        y, ids, p.place, y if more is None else more.contiguous(), out, packed.first, packed.count,
        D=d, TOPK=topk, BLOCK=block, MORE=more is not None, num_warps=4,
    )  # fmt: skip
    return out
