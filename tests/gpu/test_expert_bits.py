"""The routed experts give the same bits every time, as they are and replayed: greedy decoding may rely on that."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs a CUDA device", allow_module_level=True)

from paraflash.checkpoint.quant import QuantTensor
from paraflash.kernels.cuda import CudaKernels
from paraflash.kernels.cuda.packages import find_packages
from paraflash.kernels.interface import Expert

PACKAGES = find_packages()
if PACKAGES.humming is None:
    pytest.skip(f"needs humming-kernels: {PACKAGES.notes['humming-kernels']}", allow_module_level=True)

EXPERTS, HIDDEN, INNER, TOPK = 48, 5120, 2304, 6


def weight(out: int, width: int) -> QuantTensor:
    codes = torch.randint(0, 256, (EXPERTS, out, width // 2), device="cuda", dtype=torch.uint8)
    scale = torch.randint(117, 121, (EXPERTS, out, width // 32), device="cuda", dtype=torch.uint8)
    return QuantTensor("fp4", codes, scale)


@pytest.mark.parametrize("backend", ["humming", "humming_fp8"])
def test_experts_have_the_same_bits_every_time(backend: str) -> None:
    kernels = CudaKernels(PACKAGES, torch.bfloat16, backend, trained=True)
    own = Expert(weight(INNER, HIDDEN), weight(HIDDEN, INNER), weight(INNER, HIDDEN), 0, EXPERTS)
    packed = kernels.pack_experts(own)
    for rows in (1, 16, 64, 256, 1024):  # the products are tuned for 64 to 6,144 rows then
        h = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(rows, EXPERTS, device="cuda").argsort(1)[:, :TOPK]
        weights = torch.rand(rows, TOPK, device="cuda")
        first = kernels.experts(h, ids, weights, packed, 10.0, True).clone()
        for _ in range(10):
            assert torch.equal(kernels.experts(h, ids, weights, packed, 10.0, True), first), rows
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kernels.experts(h, ids, weights, packed, 10.0, True)
        for _ in range(3):
            graph.replay()
            assert torch.equal(out, first), rows
