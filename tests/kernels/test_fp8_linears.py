"""FP8 linears in one byte, as far as no GPU is needed: when they are available, their scales, what is packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paraflash.checkpoint.quant import QuantTensor, e8m0_to_float, fp8_block_quant
from paraflash.model.weights import pack_linears

fp8_linear = pytest.importorskip("paraflash.kernels.cuda.fp8_linear", reason="needs triton")


@pytest.mark.parametrize(
    ("package", "dtype", "capability", "why"),
    [
        (object(), torch.bfloat16, (9, 0), ""),
        (object(), torch.bfloat16, (10, 0), ""),
        (object(), torch.bfloat16, (8, 9), "one-byte products need compute capability 9.0, this GPU has 8.9"),
        (object(), torch.float32, (9, 0), "one-byte products compute in bfloat16, dtype is float32"),
        (None, torch.bfloat16, (9, 0), "the package humming-kernels is not there"),
    ],
)
def test_what_one_byte_products_need(package: Any, dtype: torch.dtype, capability: tuple[int, int], why: str) -> None:
    assert fp8_linear.why_not(package, dtype, capability) == why


def weight(out: int, width: int, **more: int) -> QuantTensor:
    generator = torch.Generator().manual_seed(out)
    return QuantTensor("fp8", *fp8_block_quant(torch.randn(out, width, generator=generator)), **more)


def test_a_scale_for_32_values_of_a_row_gives_the_values_of_a_scale_for_32x32() -> None:
    stored = weight(256, 192)
    factor = e8m0_to_float(fp8_linear.row_scales(stored)).repeat_interleave(32, 1)
    assert torch.equal(stored.data.float() * factor, stored.dequantise(torch.float32))


@pytest.mark.parametrize(
    "stored", [weight(64, 64), weight(128, 32), weight(128, 64, row0=16), weight(128, 64, col0=16)]
)
def test_other_shapes_are_refused(stored: QuantTensor) -> None:
    with pytest.raises(ValueError, match="cannot stay in one byte"):
        fp8_linear.row_scales(stored)


def test_linears_are_packed_in_their_place_and_nothing_else_is() -> None:
    class Kernels:
        def pack_linear(self, weight: QuantTensor) -> Any:
            return "packed", weight

    linear, plain = weight(128, 64), torch.ones(2, 2)
    experts = QuantTensor("fp4", torch.zeros(1, 2, 16, dtype=torch.uint8), torch.zeros(1, 2, 1, dtype=torch.uint8))
    tensors: dict[str, Any] = {"a": linear, "b": plain, "c": experts}
    pack_linears(tensors, Kernels())  # type: ignore[arg-type]
    assert tensors == {"a": ("packed", linear), "b": plain, "c": experts}
