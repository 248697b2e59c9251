"""The two products of the routed experts: which kernels run them (`--moe-backend`) and the weights as these take them.

x [N, in], rows ordered by expert with offsets [E + 1] -> [N, out]. On packed FP4 weights (humming) or on bf16 ones
(torch grouped matmul). FP8 inputs are e4m3 with one fp32 scale a row; the products then run on FP8 tensor cores.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paraflash.checkpoint.quant import QuantTensor
from paraflash.kernels.cuda import tuning
from paraflash.kernels.interface import Expert

log = logging.getLogger("paraflash.kernels")

# Rows for which FP4 products are tuned, half an octave or an octave apart: a kernel tuned for 8,192 rows takes 20 %
# longer for 12,288 of 48 experts than one tuned for these, and one for 2,048 takes a third longer for 3,072.
TUNED_ROWS = (64, 256, 768, 1536, 3072, 6144, 12288, 24576)

BACKENDS = {  # --moe-backend, vLLM's names included -> what runs
    "auto": "auto",
    "humming": "humming",
    "humming_fp8": "humming_fp8",  # inputs in e4m3 with a scale a row
    "marlin": "humming",
    "triton": "grouped_mm",
    "grouped_mm": "grouped_mm",
}


class GroupedMatmul:
    """Expert products on bf16 weights through torch's grouped matmul."""

    def __init__(self, weight: Tensor):
        self.weight = weight  # [E, out, in]

    def __call__(self, x: Tensor, scale: Tensor | None, offsets: Tensor, rows: int) -> Tensor:
        return torch._grouped_mm(x, self.weight.transpose(1, 2), offs=offsets[1:].to(torch.int32))


def tuned_for(rows: int) -> int:
    """The nearest of TUNED_ROWS by ratio."""
    return min(TUNED_ROWS, key=lambda size: max(rows, 1) / size + size / max(rows, 1))


class HummingFp4:
    """Expert products on packed FP4 weights through humming-kernels, with inputs in bf16 or in FP8.

    For FP8 products the package expands FP4 values to e4m3 and puts each group's scale into their exponents, relative
    to one scale an expert (the second one). That is exact where the group scales of an expert lie at most 2^11 apart;
    smaller groups lose bits.
    """

    def __init__(self, module: Any, weight: QuantTensor, fp8_inputs: bool = False):
        """weight [E, out, in] of kind fp4."""
        experts, out, width = weight.shape
        with torch.device(weight.data.device):
            self.layer = module.HummingLayer(
                shape_n=out,
                shape_k=width,
                weight_config={"quant_method": "mxfp4"},
                input_config={"dtype": "float8e4m3"} if fp8_inputs else None,
                num_experts=experts,
                torch_dtype=torch.bfloat16,
            )
        self.layer.weight.data.copy_(weight.data)
        self.layer.weight_scale.data.copy_(weight.scale)
        self.layer.transform()
        self._configs: dict[int, Any] = {}

    def __call__(self, x: Tensor, scale: Tensor | None, offsets: Tensor, rows: int) -> Tensor:
        """x bf16, or e4m3 with scale [N, 1] fp32; about `rows` of its rows are within the offsets."""
        from humming.ops import launch_kernel

        size = tuned_for(rows)
        if size not in self._configs:
            self._configs[size] = self._compile(size)
        layer = self.layer
        return launch_kernel(
            configs=self._configs[size],
            inputs=x,
            input_scale=scale,
            weight=layer.weight,
            weight_scale=layer.weight_scale,
            weight_scale_2=getattr(layer, "weight_scale_2", None),
            outputs=torch.empty(x.shape[0], layer.shape_n, dtype=torch.bfloat16, device=x.device),
            expert_layout=offsets,
            locks=layer.locks,
        )

    def _compile(self, rows: int) -> Tensor:
        """The kernel for about this many rows: a few sizes stand for all, since each costs a compilation."""
        from humming.kernel.humming import HummingKernel

        config, device = self.layer.humming_config, self.layer.weight.device
        settings = json.dumps(tuning.grouped(config, rows, device))
        compute = json.dumps({"gemm_type": "grouped_contiguous"})
        return HummingKernel.prepare_kernels(config.to_str(), compute, settings, device)


@dataclass
class PackedExperts:
    """What `experts` takes: both products of the local experts."""

    up: Any  # [E, 2 * I, D]: gate over up
    down: Any  # [E, D, I]
    first: int
    total: int  # routed experts of the model
    count: int
    inner: int
    fp8_inputs: bool = False  # what the products take


def choose_backend(name: str, humming: Any, dtype: torch.dtype) -> str:
    """Backend for `--moe-backend name`. Raises ValueError for an unknown or unavailable one."""
    if name not in BACKENDS:
        raise ValueError(f"moe_backend is {name!r}; {', '.join(BACKENDS)} is needed")
    chosen = BACKENDS[name]
    if chosen == "auto":
        return "humming" if humming is not None and dtype == torch.bfloat16 else "grouped_mm"
    if chosen.startswith("humming") and dtype != torch.bfloat16:
        raise ValueError(f"moe_backend {name} computes in bfloat16, dtype is {dtype}; use triton or auto")
    if chosen.startswith("humming") and humming is None:
        raise ValueError(f"moe_backend {name} needs the package humming-kernels; use triton or auto")
    if chosen != name:
        log.info("moe_backend %s runs as %s", name, chosen)
    return chosen


def pack_experts(experts: Expert, backend: str, humming: Any, dtype: torch.dtype) -> PackedExperts | Expert:
    """Experts as `run_experts` takes them. Widths that no grouped product takes, and fp32, stay an Expert."""
    count, inner, width = experts.w1.shape
    if backend.startswith("humming") and isinstance(experts.w1, QuantTensor) and not (inner % 128 or width % 128):
        up = QuantTensor(
            "fp4",
            torch.cat([experts.w1.data, experts.w3.data], 1),
            torch.cat([experts.w1.scale, experts.w3.scale], 1),
        )
        fp8 = backend == "humming_fp8"
        products = HummingFp4(humming, up, fp8), HummingFp4(humming, experts.w2, fp8)
        return PackedExperts(*products, experts.first, experts.total, count, inner, fp8)
    w1, w2, w3 = (
        w.dequantise(dtype) if isinstance(w, QuantTensor) else w for w in (experts.w1, experts.w2, experts.w3)
    )
    if (w1.is_cuda and dtype != torch.bfloat16) or inner % 32 or width % 32:
        return Expert(w1, w2, w3, experts.first, experts.total)
    gate_up = GroupedMatmul(torch.cat([w1, w3], 1))
    return PackedExperts(gate_up, GroupedMatmul(w2), experts.first, experts.total, count, inner)
