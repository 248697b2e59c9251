"""Dense products on FP8 weights that stay in one byte on the GPU, through humming-kernels with bf16 activations.

Weight e4m3 [out, in] with a scale for 32x32 values -> the package's order with a scale for 1x32; x bf16 [T, in] ->
[T, out]. The kernel expands a weight to bf16 on its way to the tensor cores, which is exact, and sums in fp32: the
products are those of weights that were expanded at load, the order of the sum may differ. It is the same in every run.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from paraflash.checkpoint.memory import ONE_BYTE_UNITS
from paraflash.checkpoint.quant import QuantTensor
from paraflash.checkpoint.tensors import BLOCK
from paraflash.kernels.cuda import tuning

# A product runs in the kernel that was tuned for the next larger of these numbers of rows.
TUNED_ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_ANY_ROWS = 1 << 30


def why_not(humming: Any, dtype: torch.dtype, capability: tuple[int, int]) -> str:
    """Why FP8 linears cannot stay in one byte here; empty where they can."""
    if humming is None:
        return "the package humming-kernels is not there"
    if dtype != torch.bfloat16:
        return f"one-byte products compute in bfloat16, dtype is {str(dtype).removeprefix('torch.')}"
    if capability < (9, 0):
        return f"one-byte products need compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
    return ""


def row_scales(weight: QuantTensor) -> Tensor:
    """Scales of 32x32 blocks -> one for every 32 values of a row: uint8 [out, in / 32].

    Raises ValueError for a weight that the products do not take (`one_byte` of checkpoint/memory.py).
    """
    out, width = weight.shape
    if weight.kind != "fp8" or out % ONE_BYTE_UNITS[0] or width % ONE_BYTE_UNITS[1] or weight.row0 or weight.col0:
        raise ValueError(f"a {weight.kind} weight of shape {list(weight.shape)} cannot stay in one byte")
    return weight.scale.repeat_interleave(BLOCK, 0)


class Fp8Linear:
    """One weight; calling it multiplies."""

    def __init__(self, module: Any, weight: QuantTensor):
        """module: humming.layer. Compiles the kernels of a shape when it comes the first time."""
        scales = row_scales(weight)
        self.shape = weight.shape
        with torch.device(weight.data.device):
            layer = module.HummingLayer(
                shape_n=self.shape[0],
                shape_k=self.shape[1],
                weight_config={
                    "quant_method": "humming",
                    "dtype": "float8e4m3",
                    "scale_dtype": "float8e8m0",
                    "group_size": BLOCK,
                },
                torch_dtype=torch.bfloat16,
            )
        layer.weight.data.copy_(weight.data.view(torch.int32))
        layer.weight_scale.data.view(torch.uint8).copy_(scales)
        layer.transform()
        self._weight, self._scale, self._locks = layer.weight.data, layer.weight_scale.data, layer.locks
        self._kernels = _compile(layer.humming_config, weight.data.device)

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes + self._scale.nbytes + self._locks.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x bf16 [T, in] -> [T, out]."""
        from humming.ops import launch_kernel

        out = torch.empty(x.shape[0], self.shape[0], dtype=x.dtype, device=x.device)
        if x.shape[0] == 0:
            return out
        return launch_kernel(
            configs=self._kernels,
            inputs=x.contiguous(),
            weight=self._weight,
            weight_scale=self._scale,
            outputs=out,
            locks=self._locks,
        )


def _compile(config: Any, device: torch.device) -> Tensor:
    """Kernels of one shape for all numbers of rows; the launcher picks by the rows of its input."""
    from humming.kernel.humming import HummingKernel

    tuned: list[tuple[int, int, Any]] = []  # above so many rows, up to so many rows, settings
    for rows in TUNED_ROWS:
        settings = tuning.dense(config, rows, device)
        first = tuned[-1][1] if tuned else 0
        if tuned and tuned[-1][2] == settings:
            first = tuned.pop()[0]
        tuned.append((first, rows, settings))
    tuned[-1] = (tuned[-1][0], _ANY_ROWS, tuned[-1][2])
    compute = json.dumps({"gemm_type": "dense"})
    return HummingKernel.prepare_kernels(config.to_str(), compute, json.dumps(tuned), device)
