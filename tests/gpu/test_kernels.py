"""Every cuda operation at the model's widths on a GPU, on fresh random inputs, against the reference."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs a CUDA device", allow_module_level=True)

from paraflash.cache.pool import RecordPool
from paraflash.cache.records import kv_format
from paraflash.kernels.cuda import CudaKernels, direct, topk, topk_torch
from paraflash.kernels.cuda.packages import Packages, find_packages
from paraflash.kernels.reference import reference_kernels
from tests.kernels import checks
from tests.kernels.cases import Maker, Sizes, near

PACKAGES = find_packages()
SIZES = Sizes(rows=300, hidden=5120)
BARE = CudaKernels(Packages(), torch.bfloat16, "grouped_mm", trained=True)
FULL = CudaKernels(PACKAGES, torch.bfloat16, "humming" if PACKAGES.humming else "grouped_mm", trained=True)


REFERENCE = reference_kernels()


@pytest.fixture
def maker() -> Maker:
    return Maker(torch.seed() % 10_000, "cuda", torch.bfloat16)


def test_norms_and_streams_match_the_reference(maker: Maker) -> None:
    checks.check_norm_and_streams(BARE, maker, SIZES)
    checks.check_norm_and_streams(BARE, maker, Sizes(rows=1200, hidden=5120))


def test_rope_matches_the_reference(maker: Maker) -> None:
    checks.check_rope(BARE, maker, SIZES)


def test_tokens_may_lie_apart(maker: Maker) -> None:
    checks.check_tokens_that_lie_apart(BARE, maker, SIZES)


def test_cache_rows_match_the_reference(maker: Maker) -> None:
    checks.check_cache_rows(BARE, maker, SIZES)


def test_linears_match_the_reference(maker: Maker) -> None:
    checks.check_linears(BARE, maker, SIZES)


@pytest.mark.parametrize("rows", [100, 300])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("kernels", [BARE, FULL], ids=["triton", "packages"])
def test_attention_matches_the_reference(maker: Maker, kernels: CudaKernels, heads: int, rows: int) -> None:
    checks.check_attention(kernels, maker, Sizes(rows=rows, hidden=5120, heads=heads), arena=True)


@pytest.mark.parametrize("kernels", [BARE, FULL], ids=["triton", "packages"])
def test_entry_selection_matches_the_reference(maker: Maker, kernels: CudaKernels) -> None:
    checks.check_selection(
        kernels, maker, SIZES, lengths=[5000, 0, 700, 3001], counts=[130, 1, 3, 1], blocks=128, size=8
    )


@pytest.mark.parametrize("n", [600, 4096, 33_000, 140_000])
@pytest.mark.parametrize("kind", ["normal", "few values", "one value", "narrow"])
def test_topk_equals_a_stable_sort(maker: Maker, n: int, kind: str) -> None:
    rows, k = 37, 512
    scores = maker.normal(rows, n + 3, dtype=torch.float32)[:, :n]  # rows do not lie back to back
    if kind == "few values":
        scores = (scores * 2).round().relu()
    if kind == "one value":
        scores = torch.zeros_like(scores)
    if kind == "narrow":
        scores = 1 + scores * 1e-5
    lengths = maker.integers(0, n + 1, rows)
    lengths[:3] = torch.tensor([0, 1, n], device=lengths.device)
    assert torch.equal(topk.select_topk(scores, lengths, k), topk_torch.select_topk(scores, lengths, k))
    bits = topk.select_bits(scores, lengths, 2048)
    assert torch.equal(bits, topk_torch.select_bits(scores, lengths, 2048))
    wide = maker.normal(rows, 8 * n, dtype=torch.float32)
    found = topk.select_topk(wide, lengths * 8, k, bits, 8)
    assert torch.equal(found, topk_torch.select_topk(wide, lengths * 8, k, bits, 8))


def test_rounded_copies_are_rounded_outputs(maker: Maker) -> None:
    checks.check_rounded_copies(BARE, maker, SIZES)


@pytest.mark.parametrize("name", ["fp8_ds_mla", "nvfp4_ds_mla"])
@pytest.mark.parametrize("kernels", [BARE, FULL], ids=["triton", "packages"])
def test_stored_rows_match_the_reference(maker: Maker, kernels: CudaKernels, name: str) -> None:
    checks.check_stored_rows(kernels, maker, SIZES, name)


@pytest.mark.skipif(PACKAGES.paged_attention is None, reason="needs sgl-flash-mla")
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("rows", [1, 3, 16, 64])
def test_decode_rows_match_the_reference_on_the_paged_kernel(maker: Maker, heads: int, rows: int) -> None:
    calls = []

    def paged(*args: Any) -> torch.Tensor:
        assert PACKAGES.paged_attention is not None
        calls.append(rows)
        return PACKAGES.paged_attention(*args)

    kernels = CudaKernels(replace(PACKAGES, paged_attention=paged), torch.bfloat16, "grouped_mm", trained=True)
    for entries in (64, 32):
        checks.check_decode_rows(kernels, maker, Sizes(rows=rows, hidden=5120, heads=heads), entries)
    assert len(calls) == 6
    workspace = CudaKernels(replace(PACKAGES, paged_attention=None), torch.bfloat16, "grouped_mm", trained=True)
    checks.check_decode_rows(workspace, maker, Sizes(rows=rows, hidden=5120, heads=heads), 64)


@pytest.mark.skipif(PACKAGES.paged_attention is None, reason="needs sgl-flash-mla")
def test_the_paged_kernel_can_be_captured_before_and_after_its_plan_is_known(maker: Maker) -> None:
    """And gives zeros where a row has no key at all."""
    record = kv_format("fp8_ds_mla", 512, 64, 128).window
    pool, ring = RecordPool(record, 9, 64, "cuda"), RecordPool(record, 2, 128, "cuda")
    every = torch.arange(9 * 64, device="cuda")
    pool.write(every, record.encode(maker.normal(len(every), 512).float()))
    prior, step_rows = maker.integers(0, 256, 5 * 127), record.encode(maker.normal(5, 512).float())
    window_index, slots = maker.integers(0, 5 * 128, 5, 128), maker.integers(0, 9 * 64, 5, 512)
    window_index[2], slots[2] = -1, -1
    q, sink = maker.normal(5, 64, 512), maker.normal(64, dtype=torch.float32)
    run = find_packages().paged_attention  # one that has no plans yet
    kernels = CudaKernels(replace(PACKAGES, paged_attention=run), torch.bfloat16, "grouped_mm", trained=True)

    def attend() -> torch.Tensor:
        return kernels.attend(q, kernels.window_keys(ring, prior, step_rows), window_index, pool, slots, sink, 0.04)

    CudaKernels(PACKAGES, torch.bfloat16, "grouped_mm", trained=True).window_keys(ring, prior, step_rows)  # compiles
    results = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attend()
        graph.replay()
        torch.cuda.synchronize()
        results += [out.clone(), attend().clone()]
    own = REFERENCE.window_keys(ring, prior, step_rows)
    wanted = REFERENCE.attend(q.float(), own, window_index, pool, slots, sink, 0.04).bfloat16()
    for found in results:
        near(found, wanted, 4e-3)
        assert (found[2] == 0).all()


def test_every_code_is_read_exactly(maker: Maker) -> None:
    checks.check_every_code(maker)


@pytest.mark.parametrize("heads_at_once", [32, 64])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("rows", [1, 7, 16, 64])
def test_decode_rows_on_nvfp4_records_match_the_reference(
    maker: Maker, monkeypatch: pytest.MonkeyPatch, rows: int, heads: int, heads_at_once: int
) -> None:
    if heads_at_once > max(32, heads):
        pytest.skip("the same as with 32")
    monkeypatch.setattr(direct, "heads_at_once", lambda rows: heads_at_once)
    for as_stored in (True, False):  # by the kernel that reads records, then over the workspace
        monkeypatch.setattr(direct, "pays", lambda rows, heads, as_stored=as_stored: as_stored)
        for entries in (64, 32):
            checks.check_decode_rows(BARE, maker, Sizes(rows=rows, hidden=5120, heads=heads), entries, "nvfp4_ds_mla")


@pytest.mark.parametrize("rows,heads", [(1, 64), (7, 16), (16, 64), (64, 16)])
def test_the_kernel_on_nvfp4_records_can_be_captured(maker: Maker, rows: int, heads: int) -> None:
    """A replay reads what is then in the tensors; a row without any key gives zeros."""
    fmt = kv_format("nvfp4_ds_mla", 512, 64, 128)
    pool, ring = RecordPool(fmt.latent, 9, 64, "cuda"), RecordPool(fmt.window, 2, 128, "cuda")
    every = torch.arange(9 * 64, device="cuda")
    pool.write(every, fmt.latent.encode(maker.normal(len(every), 512).float()))
    prior, step_rows = maker.integers(0, 256, rows * 127), fmt.window.encode(maker.normal(rows, 512).float())
    window_index, slots = maker.integers(0, rows * 128, rows, 128), maker.integers(-1, 9 * 64, rows, 512)
    q, sink = maker.normal(rows, heads, 512), maker.normal(heads, dtype=torch.float32)

    def run() -> torch.Tensor:
        return BARE.attend(q, BARE.window_keys(ring, prior, step_rows), window_index, pool, slots, sink, 0.04)

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    q.copy_(maker.normal(rows, heads, 512))
    slots.copy_(maker.integers(-1, 9 * 64, rows, 512))
    window_index[-1], slots[-1] = -1, -1
    graph.replay()
    torch.cuda.synchronize()
    found = out.clone()
    assert torch.equal(found, run()) and (found[-1] == 0).all()
    if rows > 1:
        own = REFERENCE.window_keys(ring, prior, step_rows)
        near(found, REFERENCE.attend(q.float(), own, window_index, pool, slots, sink, 0.04).bfloat16(), 4e-3)


def test_router_matches_the_reference(maker: Maker) -> None:
    checks.check_router(BARE, maker, SIZES)


@pytest.mark.parametrize("kernels", [BARE, FULL], ids=["grouped_mm", "packages"])
def test_experts_match_the_reference(maker: Maker, kernels: CudaKernels) -> None:
    checks.check_experts(kernels, maker, Sizes(rows=200, hidden=5120, experts=24), local=8, first=8)
    checks.check_experts(kernels, maker, Sizes(rows=3, hidden=5120, experts=24), local=8, first=8)


@pytest.mark.skipif(PACKAGES.humming is None, reason="needs humming-kernels")
@pytest.mark.parametrize("rows,experts,local,first", [(200, 24, 8, 8), (3, 24, 8, 8), (1500, 48, 48, 0)])
def test_experts_with_fp8_inputs_match_the_reference(
    maker: Maker, rows: int, experts: int, local: int, first: int
) -> None:
    kernels = CudaKernels(PACKAGES, torch.bfloat16, "humming_fp8", trained=True)
    checks.check_experts(kernels, maker, Sizes(rows=rows, hidden=5120, experts=experts), local, first, fp8=True)


def test_an_inverse_rope_undoes_a_rope_and_changes_x_in_place(maker: Maker) -> None:
    x, table = maker.normal(10, 64, 512), maker.rotary(10, 64)
    before = x.clone()
    turned = BARE.rope(x, table)
    assert turned.data_ptr() == x.data_ptr()
    near(BARE.rope(turned, table, inverse=True), before, 5e-3)
