"""The Triton kernels at small sizes in Triton's interpreter, which needs no GPU, against the reference."""

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is off (it is switched on where there is no GPU)", allow_module_level=True)

from paraflash.kernels.cuda import CudaKernels
from paraflash.kernels.cuda.packages import Packages
from tests.kernels import checks
from tests.kernels.cases import Maker, Sizes

SMALL = Sizes(
    rows=5,
    hidden=96,
    head_dim=64,
    rope=16,
    heads=6,
    index_heads=4,
    index_dim=32,
    experts=12,
    topk=3,
    inner=64,
    window=8,
    chosen=16,
)


@pytest.fixture
def kernels() -> CudaKernels:
    return CudaKernels(Packages(), torch.float32, "grouped_mm", trained=True, use_cuda_topk=False)


@pytest.fixture
def maker() -> Maker:
    return Maker(torch.seed() % 10_000, "cpu", torch.float32)


def test_norms_and_streams_match_the_reference(kernels: CudaKernels, maker: Maker) -> None:
    checks.check_norm_and_streams(kernels, maker, SMALL)


def test_rope_matches_the_reference(kernels: CudaKernels, maker: Maker) -> None:
    checks.check_rope(kernels, maker, SMALL)


def test_tokens_may_lie_apart(kernels: CudaKernels, maker: Maker) -> None:
    checks.check_tokens_that_lie_apart(kernels, maker, SMALL)


def test_cache_rows_match_the_reference(kernels: CudaKernels, maker: Maker) -> None:
    checks.check_cache_rows(kernels, maker, SMALL)


def test_linears_match_the_reference(kernels: CudaKernels, maker: Maker) -> None:
    checks.check_linears(kernels, maker, SMALL)


def test_attention_matches_the_reference(kernels: CudaKernels, maker: Maker) -> None:
    checks.check_attention(kernels, maker, SMALL, arena=True)


def test_entry_selection_matches_the_reference(kernels: CudaKernels, maker: Maker) -> None:
    checks.check_selection(kernels, maker, SMALL, lengths=[150, 0, 70], counts=[3, 1, 2], blocks=6, size=8)


def test_candidates_of_the_reference_are_applied_where_all_entries_fit(kernels: CudaKernels, maker: Maker) -> None:
    """No kernel takes three index heads; the choice is then narrowed by candidates alone."""
    sizes = replace(SMALL, index_heads=3, chosen=256)
    checks.check_selection(kernels, maker, sizes, lengths=[150, 0, 70], counts=[3, 1, 2], blocks=6, size=8)


def test_rounded_copies_are_rounded_outputs(kernels: CudaKernels, maker: Maker) -> None:
    checks.check_rounded_copies(kernels, maker, SMALL)


@pytest.mark.parametrize("name", ["fp8_ds_mla", "nvfp4_ds_mla"])
def test_stored_rows_match_the_reference(kernels: CudaKernels, maker: Maker, name: str) -> None:
    checks.check_stored_rows(kernels, maker, SMALL, name)


def test_decode_rows_match_the_reference(kernels: CudaKernels, maker: Maker) -> None:
    checks.check_decode_rows(kernels, maker, SMALL, 32)


def test_router_matches_the_reference(kernels: CudaKernels, maker: Maker) -> None:
    checks.check_router(kernels, maker, SMALL)


def test_experts_match_the_reference(kernels: CudaKernels, maker: Maker) -> None:
    checks.check_experts(kernels, maker, SMALL, local=5, first=4)


def test_no_rows_give_no_rows(kernels: CudaKernels, maker: Maker) -> None:
    streams = maker.normal(0, 4, 96)
    fn = maker.normal(24, 4 * 96)
    pre, _, comb = kernels.hc_mixes(streams, fn, maker.normal(3), maker.normal(24), 20, 1e-6, 1e-20)
    assert pre.shape == (0, 4) and comb.shape == (0, 4, 4)
    assert kernels.hc_collapse(streams, pre, maker.normal(96), 1e-20).shape == (0, 96)
    ids, weights = kernels.route(maker.normal(0, 96), maker.normal(12, 96), maker.normal(12), 3, 1.5, True, 1.0)
    assert ids.shape == weights.shape == (0, 3)
