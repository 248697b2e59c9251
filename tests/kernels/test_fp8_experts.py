"""Experts whose products take FP8 inputs: rows that the model's own rounding gave pass as they are."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is off (it is switched on where there is no GPU)", allow_module_level=True)

from paraflash import formats
from paraflash.kernels.cuda import moe
from paraflash.kernels.cuda.expert_products import PackedExperts
from paraflash.kernels.reference import reference_kernels
from tests.kernels.cases import Maker, Sizes, error, experts, values_of

REFERENCE = reference_kernels()
SIZES = Sizes(rows=7, hidden=96, experts=12, topk=3, inner=64)


class Fp8Product:
    """Products of codes, scale and weights [E, out, in] one expert after the other."""

    def __init__(self, weight: Tensor):
        self.weight = weight

    def __call__(self, x: Tensor, scale: Tensor | None, offsets: Tensor, rows: int) -> Tensor:
        assert scale is not None and scale.shape == (len(x), 1) and scale.dtype == torch.float32
        assert x.dtype == torch.float8_e4m3fn
        out = torch.full((len(x), self.weight.shape[1]), float("nan"))
        for e in range(len(self.weight)):
            part = slice(int(offsets[e]), int(offsets[e + 1]))
            assert (torch.frexp(scale[part])[0] == 0.5).all()  # powers of two
            out[part] = (x[part].float() * scale[part]) @ self.weight[e].T
        return out


def run(h: Tensor, ids: Tensor, weights: Tensor, maker: Maker, rounded: bool) -> tuple[Tensor, Tensor]:
    """Found and wanted for local experts 4 to 8."""
    own = values_of(experts(maker, SIZES, 5, 4), torch.float32)
    up = Fp8Product(torch.cat([own.w1, own.w3], 1))
    packed = PackedExperts(up, Fp8Product(own.w2), 4, SIZES.experts, 5, SIZES.inner, fp8_inputs=True)
    wanted = REFERENCE.experts(h, ids, weights, own, 10.0, rounded, h)
    h_in = formats.round_activation(h) if rounded else h
    return moe.run_experts(h_in, ids, weights, packed, 10.0, rounded, 8, h), wanted


@pytest.mark.parametrize("rounded,low,high", [(True, 0.0, 1e-4), (False, 1e-2, 0.15)])
def test_only_inputs_that_were_not_rounded_lose_by_fp8(rounded: bool, low: float, high: float) -> None:
    maker = Maker(torch.seed() % 10_000, "cpu", torch.float32)
    h = maker.normal(SIZES.rows, SIZES.hidden)
    h[0], h[1] = 0, h[1] * 1e-6  # a row of zeros, a small one
    ids = torch.stack([torch.randperm(SIZES.experts, generator=maker.generator)[: SIZES.topk] for _ in h])
    weights = maker.normal(SIZES.rows, SIZES.topk).abs()
    found, wanted = run(h, ids, weights, maker, rounded)
    assert (found[0] == 0).all()
    assert low <= error(found - h, wanted - h) < high
