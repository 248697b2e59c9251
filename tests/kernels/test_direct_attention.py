"""Decode steps on nvfp4_ds_mla records, which a kernel reads as they are stored, in Triton's interpreter (fp32)."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is off (it is switched on where there is no GPU)", allow_module_level=True)

from paraflash.cache.pool import RecordPool
from paraflash.cache.records import kv_format
from paraflash.kernels.cuda import CudaKernels, direct
from paraflash.kernels.cuda.packages import Packages
from tests.kernels import checks
from tests.kernels.cases import Maker, Sizes

SIZES = Sizes(rows=3, hidden=64, head_dim=64, rope=16, heads=6, index_dim=32, chosen=40, window=24)
KERNELS = CudaKernels(Packages(), torch.float32, "grouped_mm", trained=True, use_cuda_topk=False)


@pytest.fixture
def maker() -> Maker:
    return Maker(torch.seed() % 10_000, "cpu", torch.float32)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of the kernel."""
    rows: list[int] = []

    def counted(q: Tensor, *args: Any) -> Tensor:
        rows.append(len(q))
        return attend_records(q, *args)

    attend_records = direct.attend
    monkeypatch.setattr(direct, "attend", counted)
    return rows


@pytest.mark.parametrize("programs", [1, 6, 9, 132], ids=["one program a row", "two", "three", "one a block of keys"])
def test_decode_rows_match_the_reference_however_they_are_shared_out(
    maker: Maker, taken: list[int], monkeypatch: pytest.MonkeyPatch, programs: int
) -> None:
    monkeypatch.setattr(direct, "PROGRAMS", programs)
    checks.check_decode_rows(KERNELS, maker, SIZES, 32, "nvfp4_ds_mla")
    assert taken == [3, 3, 3]


@pytest.mark.parametrize("heads,width,rope", [(20, 64, 16), (1, 32, 16), (3, 128, 64)])
def test_any_number_of_heads_and_width_will_do(
    maker: Maker, taken: list[int], heads: int, width: int, rope: int
) -> None:
    sizes = Sizes(rows=2, hidden=64, head_dim=width, rope=rope, heads=heads, index_dim=32, chosen=20, window=8)
    checks.check_decode_rows(KERNELS, maker, sizes, 32, "nvfp4_ds_mla")
    assert taken == [2, 2, 2]


def test_a_row_without_keys_is_zero(maker: Maker, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = kv_format("nvfp4_ds_mla", 64, 16, 32)
    ring, pool = RecordPool(fmt.window, 2, 8), RecordPool(fmt.latent, 2, 32)
    keys = KERNELS.window_keys(ring, torch.arange(3), fmt.window.encode(maker.normal(2, 64)))
    index, slots = torch.tensor([[0, 1], [-1, -1]]), torch.tensor([[5, -1, 7], [-1, -1, -1]])
    q, sink = maker.normal(2, 6, 64), maker.normal(6)
    sink[0] = float("-inf")
    for programs in (1, 132):
        monkeypatch.setattr(direct, "PROGRAMS", programs)
        found = KERNELS.attend(q, keys, index, pool, slots, sink, 0.125)
        assert found[0].isfinite().all() and (found[1] == 0).all()
    assert taken == [2, 2]


def test_more_rows_and_other_records_are_decoded_into_a_workspace(
    maker: Maker, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks.check_decode_rows(KERNELS, maker, SIZES, 32, "fp8_ds_mla")
    monkeypatch.setattr(direct, "pays", lambda rows, heads: False)
    checks.check_stored_rows(KERNELS, maker, SIZES, "nvfp4_ds_mla")
    assert not taken


@pytest.mark.parametrize(
    ("rows", "heads", "faster"),
    [(1, 64, True), (16, 64, True), (17, 64, False), (16, 17, True), (17, 17, False), (256, 16, True), (257, 8, False)],
)
def test_records_are_read_as_stored_where_that_is_faster(rows: int, heads: int, faster: bool) -> None:
    assert direct.pays(rows, heads) == faster


def test_a_program_takes_all_64_heads_from_16_rows_on() -> None:
    assert [direct.heads_at_once(rows) for rows in (1, 15, 16, 256)] == [32, 32, 64, 64]


def test_every_code_is_read_exactly(maker: Maker) -> None:
    checks.check_every_code(maker)
