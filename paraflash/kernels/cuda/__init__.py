"""The kernel interface on NVIDIA GPUs: Triton and CUDA kernels, cuBLAS, and optional packages where they are faster.

An operation falls back to the reference, which runs on any device, where a shape or dtype does not fit its kernel (tiny
test models, fp32 attention, records other than bf16). Importing this module needs Triton; nothing else imports it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from paraflash.cache.pool import RecordPool
from paraflash.cache.records import PlainRecord, Record
from paraflash.checkpoint.quant import QuantTensor
from paraflash.kernels.cuda import expert_products, fp8_linear, hyper, index, linear, moe, records, rows
from paraflash.kernels.cuda.attend import Attention, WindowKeys, window_keys
from paraflash.kernels.cuda.packages import Packages, find_packages
from paraflash.kernels.interface import Expert, IndexRows, Kernels, Rotary
from paraflash.kernels.reference import attention as reference_attention
from paraflash.kernels.reference import hyper as reference_hyper
from paraflash.kernels.reference import moe as reference_moe

log = logging.getLogger("paraflash.kernels")

FAST_INDEX_HEADS = (32, 64)  # what DeepGEMM's index logits take on Hopper
MAX_BLOCK = 16384  # widest row that one Triton program holds


class CudaKernels:
    """All operations of `Kernels`. trained: whether caches hold trained rounding (then fp8 index scores are exact)."""

    name = "cuda"

    def __init__(
        self, packages: Packages, dtype: torch.dtype, moe_backend: str, trained: bool, use_cuda_topk: bool = True
    ):
        self.packages, self.dtype, self.moe_backend, self.trained = packages, dtype, moe_backend, trained
        self._rounded = linear.RoundedInputs()
        self._attend = Attention(packages)
        self._use_cuda_topk = use_cuda_topk
        self.stored: tuple[str, ...] = ("fp4",)

    @property
    def info(self) -> dict[str, str]:
        """What runs the operations that have a choice, and the state of each optional package."""
        return {
            "sparse_attention": "flash_mla" if self.packages.sparse_attention else "triton",
            "index_logits": "deep_gemm" if self.packages.index_logits else "triton",
            "moe_backend": self.moe_backend,
            **self.packages.notes,
        }

    # Dense layers

    @property
    def why_no_fp8_linears(self) -> str:
        return fp8_linear.why_not(self.packages.humming, self.dtype, torch.cuda.get_device_capability())

    def pack_linear(self, weight: QuantTensor) -> fp8_linear.Fp8Linear:
        return fp8_linear.Fp8Linear(self.packages.humming, weight)

    def linear(self, x: Tensor, weight: Any, round_input: bool = False) -> Tensor:
        x = self._round(x, round_input)
        return weight(x) if isinstance(weight, fp8_linear.Fp8Linear) else x @ weight.T

    def _round(self, x: Tensor, wanted: bool) -> Tensor:
        if not wanted:
            return x
        return self._rounded.of(x) if x.shape[-1] % 32 == 0 else reference_hyper.round_activation(x)

    def linear_fp32(self, x: Tensor, weight: Any) -> Tensor:
        return linear.linear_fp32(x, weight)

    def grouped_output(self, o: Tensor, wo_a: Tensor, round_input: bool) -> Tensor:
        if round_input and o.shape[-1] % 32:
            return reference_attention.grouped_output(o, wo_a, round_input)
        return linear.grouped_product(linear.round_rows(o) if round_input else o, wo_a)

    def swiglu(self, gate: Tensor, up: Tensor, limit: float) -> Tensor:
        return linear.swiglu(gate, up, limit, self._rounded)

    # Norms and residual streams

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.shape[-1] > MAX_BLOCK or x.stride(-1) != 1:
            return reference_hyper.rms_norm(x, weight, eps)
        return hyper.rms_norm(x, weight, eps, self._rounded)

    def hc_mixes(
        self, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iters: int, hc_eps: float, rms_eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        k = streams.shape[1]
        run = hyper.hc_mixes if k & (k - 1) == 0 and 2 <= k <= 8 else reference_hyper.hc_mixes
        return run(streams, fn, scale, base, iters, hc_eps, rms_eps)

    def hc_collapse(self, streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
        if streams.shape[2] > MAX_BLOCK:
            return reference_hyper.hc_collapse(streams, pre, weight, eps)
        return hyper.hc_collapse(streams, pre, weight, eps, self._rounded)

    def hc_expand(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return hyper.hc_expand(y.contiguous(), streams, post, comb)

    def engram_write(self, streams: Tensor, u: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
        run = hyper.engram_write if streams.shape[2] <= MAX_BLOCK else reference_hyper.engram_write
        return run(streams, u, q_weight, k_weight, eps)

    def rope(self, x: Tensor, rotary: Rotary, inverse: bool = False) -> Tensor:
        """Rotates x itself where it is contiguous."""
        pairs = rotary.cos.shape[-1]
        if pairs & (pairs - 1) or x.dim() != 3:
            return reference_hyper.rope(x, rotary, inverse)
        lies_well = x.stride(2) == 1 and x.stride(1) == x.shape[2]
        return rows.rope_in_place(x if lies_well else x.contiguous(), rotary, inverse)

    # Cache rows

    def window_rows(
        self, kv: Tensor, weight: Tensor, eps: float, rotary: Rotary, record: Record, trained: bool
    ) -> Tensor:
        if not self._row_kernel(kv, rotary):
            return reference_attention.window_rows(kv, weight, eps, rotary, record, trained)
        return rows.record_rows(kv, weight, eps, rotary, record, rows.WINDOW, trained)

    def latent_rows(self, latent: Tensor, rotary: Rotary, record: Record, trained: bool) -> Tensor:
        if not self._row_kernel(latent, rotary):
            return reference_attention.latent_rows(latent, rotary, record, trained)
        return rows.record_rows(latent, None, 0.0, rotary, record, rows.LATENT, trained)

    def index_rows(
        self, latent: Tensor, wk: Any, weight: Tensor, eps: float, rotary: Rotary, record: Record, trained: bool
    ) -> Tensor:
        keys = self.linear(latent, wk)
        if not self._row_kernel(keys, rotary):
            return reference_attention.index_rows(latent, wk, weight, eps, rotary, record, trained)
        return rows.record_rows(keys, weight, eps, rotary, record, rows.INDEX, trained)

    def index_queries(self, q: Tensor, rotary: Rotary, trained: bool) -> Tensor:
        t, heads, width = q.shape
        if not self._row_kernel(q, rotary):
            return reference_attention.index_queries(q, rotary, trained)
        rounding = rows.INDEX if trained else rows.NONE
        flat = q.reshape(t * heads, width)
        return rows.transform_rows(flat, None, 0.0, rotary, rounding, q.dtype, heads).view(t, heads, width)

    def _row_kernel(self, x: Tensor, rotary: Rotary) -> bool:
        return rows.fits(x.shape[-1], 2 * rotary.cos.shape[-1]) and x.stride(-1) == 1

    def pool_pairs(self, first: Tensor, second: Tensor) -> Tensor:
        return rows.pool_pairs(first, second)

    # Attention

    def window_keys(self, ring: RecordPool, prior_slots: Tensor, step_rows: Tensor) -> WindowKeys:
        return window_keys(ring, prior_slots, step_rows)

    def attend(
        self,
        q: Tensor,
        keys: WindowKeys,
        window_index: Tensor,
        pool: RecordPool | None,
        slots: Tensor | None,
        sink: Tensor,
        scale: float,
    ) -> Tensor:
        return self._attend(q, keys, window_index, pool, slots, sink, scale)

    # Entry selection

    def select_entries(
        self,
        q: Tensor,
        weights: Tensor,
        pool: RecordPool,
        rows: IndexRows,
        topk: int,
        scale: float,
        candidates: Any = None,
        publish: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Any]:
        t, heads, width = q.shape
        kept = candidates if isinstance(candidates, index.Candidates) else None
        narrowed = candidates is not None and (kept is None or kept.bits is not None)  # kept is None: by the reference
        if t == 0 or (
            rows.width <= topk and not narrowed and (publish is None or rows.width <= publish[0] * publish[1])
        ):
            published = None if publish is None else index.Candidates(None, publish[1])
            return index.all_visible(rows.visible, topk), published
        known = isinstance(pool.record, PlainRecord) or records.readable(pool.record)
        if not known or not index.triton_usable(heads, width):
            return self._select_reference(q, weights, pool, rows, topk, scale, candidates, publish)
        fast = self.packages.index_logits
        fp8 = fast is not None and heads in FAST_INDEX_HEADS and self.trained and q.dtype == torch.bfloat16
        keys = index.gather_keys(pool, rows, fp8, q.dtype)
        visible = rows.visible
        if fp8 and fast is not None:
            codes, q_scale = index.fp8_rows(q.reshape(t * heads, width))
            codes, w = codes.view(t, heads, width), index.index_weights(weights, scale, q_scale)
            end = keys.start + visible.to(torch.int32)

            def scorer(part: slice) -> Tensor:
                return fast(codes[part], keys.rows, keys.scale, w[part], keys.start[part], end[part], keys.width)

        else:
            w = index.index_weights(weights, scale, None)
            q = q.to(keys.rows.dtype).contiguous()  # a pool's rows may be narrower than the activations

            def scorer(part: slice) -> Tensor:
                return index.triton_scores(q[part], w[part], keys, keys.start[part], visible[part])

        choose, choose_bits = self._topk()
        return index.select(scorer, keys.width, visible, topk, kept, publish, choose, choose_bits)

    def _select_reference(
        self,
        q: Tensor,
        weights: Tensor,
        pool: RecordPool,
        rows: IndexRows,
        topk: int,
        scale: float,
        candidates: Any,
        publish: tuple[int, int] | None,
    ) -> tuple[Tensor, Any]:
        """The reference; a candidate set that was never narrowed counts as none. It looks at numbers of the step."""
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"no kernel selects entries with {q.shape[1]} index heads of width {q.shape[2]}")
        if isinstance(candidates, index.Candidates):
            candidates = None
        return reference_attention.select_entries(q, weights, pool, rows, topk, scale, candidates, publish)

    def _topk(self) -> tuple[Any, Any]:
        if self._use_cuda_topk:
            from paraflash.kernels.cuda import topk

            return topk.select_topk, topk.select_bits
        from paraflash.kernels.cuda import topk_torch

        return topk_torch.select_topk, topk_torch.select_bits

    # Experts

    def route(
        self, h: Tensor, gate: Tensor, bias: Tensor, topk: int, factor: float, renormalise: bool, temperature: float
    ) -> tuple[Tensor, Tensor]:
        return moe.route(h, gate, bias, topk, factor, renormalise, temperature)

    def pack_experts(self, experts: Expert) -> Any:
        return expert_products.pack_experts(experts, self.moe_backend, self.packages.humming, self.dtype)

    def experts(
        self,
        h: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: Any,
        limit: float,
        round_input: bool,
        more: Tensor | None = None,
        rounded: bool = False,
    ) -> Tensor:
        if isinstance(experts, Expert):
            return reference_moe.experts(h, ids, weights, experts, limit, round_input, more, rounded)
        expected = max(1, round(ids.numel() * experts.count / experts.total))
        h = self._round(h, round_input and not rounded)
        return moe.run_experts(h, ids, weights, experts, limit, round_input, expected, more)

    def rounded(self, x: Tensor) -> Tensor:
        return self._round(x, True)

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        return hyper.total(parts)


def cuda_kernels(dtype: torch.dtype = torch.bfloat16, moe_backend: str = "auto", trained: bool = True) -> Kernels:
    """Kernels for the current GPU. moe_backend: of `expert_products.BACKENDS`. Raises ValueError for an unknown one."""
    packages = find_packages()
    backend = expert_products.choose_backend(moe_backend, packages.humming, dtype)
    kernels = CudaKernels(packages, dtype, backend, trained)
    log.info("kernels: %s", ", ".join(f"{k} {v}" for k, v in kernels.info.items()))
    return cast(Kernels, kernels)
