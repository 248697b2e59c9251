"""FP8 linears in one byte, as far as no GPU is needed: when they are available, their scales, what is packed."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paraflash.checkpoint.quant import QuantTensor, e8m0_to_float, fp8_block_quant
from paraflash.model.weights import pack_linears

fp8_linear = pytest.importorskip("paraflash.kernels.cuda.fp8_linear", reason="needs triton")
tuning = pytest.importorskip("paraflash.kernels.cuda.tuning", reason="needs triton")


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


@pytest.mark.parametrize(
    ("wide", "narrow", "rows", "out", "chosen"),
    [
        ((8, 256, 64), (8, 128, 256), 8, 5120, "narrow"),  # 20 tiles or 40 on 132 processors
        ((8, 256, 64), (8, 128, 256), 8, 32768, "wide"),  # one round of 128 tiles, or two of 256 in all
        ((8, 128, 128), (8, 128, 256), 8, 5120, "narrow"),  # equally wide: the first
        ((176, 256, 64), (176, 128, 64), 4096, 512, "narrow"),  # 48 tiles or 96
        ((176, 256, 64), (176, 128, 64), 4096, 5120, "wide"),  # 4 rounds or 8 of half the work
        ((176, 256, 64), (176, 128, 64), 8192, 2304, "narrow"),  # 423 tiles in 4 rounds, 846 in 7 of half the work
        ((176, 256, 64), (176, 128, 64), 8192, 5120, "wide"),  # 8 rounds or 15 of half the work: less than a tenth
    ],
)
def test_tiles_are_narrow_where_that_keeps_more_processors_busy(
    wide: tuple[int, ...], narrow: tuple[int, ...], rows: int, out: int, chosen: str
) -> None:
    choices = {"narrow": {"block_shape": narrow}, "wide": {"block_shape": wide}}
    assert tuning.least_work(list(choices.values()), rows, out, 132) is choices[chosen]


@dataclasses.dataclass(frozen=True)
class Layer:
    shape_n: int
    shape_k: int


def test_every_output_is_summed_by_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the package would do by itself; and what it keeps for later calls stays as it is."""
    asked, kept = [], {"block_shape": (64, 128, 128), "use_stream_k": True, "num_stages": 4}

    def get_heuristics_config(layer: Layer, rows: int, gemm_type: str, device: torch.device) -> dict[str, Any]:
        asked.append((layer.shape_n, layer.shape_k, rows, gemm_type))
        return kept

    monkeypatch.setitem(sys.modules, "humming", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "humming.tune", SimpleNamespace(get_heuristics_config=get_heuristics_config))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(multi_processor_count=132))
    for settings in (tuning.dense, tuning.grouped):
        assert settings(Layer(5120, 8192), 64, torch.device("cuda", 0)) == kept | {"use_stream_k": False}
    assert asked == [(128, 8192, 64, "dense"), (5120, 8192, 64, "dense"), (5120, 8192, 64, "grouped_contiguous")]
    assert kept["use_stream_k"]
