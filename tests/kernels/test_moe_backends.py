"""Names of `--moe-backend` map to what runs, and what cannot run is refused with what to use instead."""

from __future__ import annotations

import pytest
import torch

products = pytest.importorskip("paraflash.kernels.cuda.expert_products", reason="needs triton")
HUMMING = object()  # the package is there


@pytest.mark.parametrize(
    "name,chosen",
    [
        ("auto", "humming"),
        ("humming", "humming"),
        ("humming_fp8", "humming_fp8"),
        ("marlin", "humming"),
        ("triton", "grouped_mm"),
    ],
)
def test_names_map_to_what_runs(name: str, chosen: str) -> None:
    assert products.choose_backend(name, HUMMING, torch.bfloat16) == chosen


def test_auto_runs_without_the_package_and_in_float32() -> None:
    assert products.choose_backend("auto", None, torch.bfloat16) == "grouped_mm"
    assert products.choose_backend("auto", HUMMING, torch.float32) == "grouped_mm"


@pytest.mark.parametrize("name", ["humming", "humming_fp8", "marlin"])
def test_what_cannot_run_names_the_way_out(name: str) -> None:
    with pytest.raises(ValueError, match="needs the package humming-kernels; use triton or auto"):
        products.choose_backend(name, None, torch.bfloat16)
    with pytest.raises(ValueError, match=r"bfloat16.*use triton or auto"):
        products.choose_backend(name, HUMMING, torch.float32)


def test_products_are_tuned_for_the_nearest_number_of_rows() -> None:
    assert [products.tuned_for(n) for n in (1, 96, 3072, 4000, 12288, 10**6)] == [64, 64, 3072, 3072, 12288, 24576]
