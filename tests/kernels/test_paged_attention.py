"""Decode steps on fp8_ds_mla records: what the paged kernel is handed, read byte by byte as FlashMLA documents it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is off (it is switched on where there is no GPU)", allow_module_level=True)

from paraflash.cache.pool import RecordPool
from paraflash.cache.records import kv_format
from paraflash.kernels.cuda import CudaKernels, attend
from paraflash.kernels.cuda.packages import Packages, _paged_attention
from tests.kernels import checks
from tests.kernels.cases import Maker, Sizes

SIZES = Sizes(rows=3, hidden=64, heads=6, chosen=40, window=16)


def record_at(pages: Tensor, slot: int) -> Tensor:
    """One record [512]: in its page at 576 * i the data, after the data of all records 8 scale bytes each."""
    entries = pages.shape[1]
    page, i = divmod(slot, entries)
    memory = pages.as_strided((pages.stride(0),), (1,), page * pages.stride(0))
    data = memory[576 * i : 576 * (i + 1)]
    scales = memory[576 * entries + 8 * i : 576 * entries + 8 * i + 7].int() - 127
    nope = data[:448].view(torch.float8_e4m3fn).float().view(7, 64) * torch.exp2(scales.float())[:, None]
    return torch.cat([nope.flatten(), data[448:].view(torch.bfloat16).float()])


class PagedKernel:
    """Stands for the package's kernel: checks what it demands, then attends."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []  # queries, whether there were more pages

    def __call__(
        self, q: Tensor, pages: Tensor, index: Tensor, more: Tensor | None, more_index: Tensor | None, *rest: Any
    ) -> Tensor:
        scale, sink = rest
        self.calls.append((len(q), more is not None))
        assert q.shape[1:] == (64, 512) and q.dtype == torch.bfloat16 and q.is_contiguous() and sink.shape == (64,)
        out = torch.zeros_like(q)
        for held in (pages, more):
            assert held is None or (held.shape[2:] == (1, 584) and held.stride(1) == 584 and held.stride(0) % 576 == 0)
        for listed in (index, more_index):
            assert listed is None or (listed.dtype == torch.int32 and listed.shape[1] % 64 == 0)
        for row in range(len(q)):
            keys = [record_at(pages, int(i)) for i in index[row] if i >= 0]
            if more is not None and more_index is not None:
                keys += [record_at(more, int(i)) for i in more_index[row] if i >= 0]
            k = torch.stack(keys)
            logits = torch.cat([q[row].float() @ k.T * scale, sink[:, None]], 1)
            out[row] = (logits.softmax(1)[:, :-1] @ k).bfloat16()
        return out


@pytest.fixture
def maker() -> Maker:
    return Maker(torch.seed() % 10_000, "cpu", torch.bfloat16)


def kernels(paged: Any) -> CudaKernels:
    return CudaKernels(Packages(paged_attention=paged), torch.bfloat16, "grouped_mm", trained=True, use_cuda_topk=False)


@pytest.mark.parametrize("entries", [64, 32])
def test_the_paged_kernel_gets_the_records_of_ring_step_and_pool(maker: Maker, entries: int) -> None:
    paged = PagedKernel()
    checks.check_decode_rows(kernels(paged), maker, SIZES, entries)
    assert paged.calls == [(3, True), (3, True), (3, False)]


def test_only_few_rows_of_its_own_record_go_to_the_paged_kernel(maker: Maker) -> None:
    """The interpreter cannot multiply bf16 blocks, so that the choice itself is looked at."""
    attention = attend.Attention(Packages(paged_attention=PagedKernel()))

    def taken(name: str, rows: int = 4, heads: int = 64, width: int = 512, dtype: torch.dtype = torch.bfloat16) -> bool:
        record = kv_format(name, width, width // 8, 128).window
        ring = RecordPool(record, 2, 8)
        keys = attend.window_keys(ring, torch.arange(3), record.encode(maker.normal(2, width).float()))
        q = torch.empty(rows, heads, width, dtype=dtype)
        return attention._paged(q, keys, record) and attention._paged(q, keys, None)

    assert taken("fp8_ds_mla") and taken("fp8_ds_mla", rows=attend.PAGED_ROWS) and taken("fp8_ds_mla", heads=8)
    assert not taken("fp8_ds_mla", rows=attend.PAGED_ROWS + 1)
    assert not taken("fp8_ds_mla", heads=128)
    assert not taken("fp8_ds_mla", width=256)
    assert not taken("fp8_ds_mla", dtype=torch.float32)
    assert not taken("nvfp4_ds_mla") and not taken("bfloat16")
    attention = attend.Attention(Packages())
    assert not taken("fp8_ds_mla")


@pytest.mark.parametrize(
    ("rows", "heads", "taken"),
    [
        (1, 8, True),
        (4096, 8, True),
        (257, 16, True),
        (4096, 64, True),
        (1, 65, False),
        (4096, 128, False),
    ],
)
def test_flash_takes_any_rows_of_up_to_64_heads(rows: int, heads: int, taken: bool) -> None:
    run = object()
    attention = attend.Attention(Packages(sparse_attention=run))  # type: ignore[arg-type]
    q = torch.empty(rows, heads, 512, dtype=torch.bfloat16, device="meta")
    assert attention._flash(q) is (run if taken else None)
    assert attention._flash(q.float()) is None and attention._flash(q[..., :256]) is None


def test_the_plan_of_a_shape_is_made_once() -> None:
    """The package makes a plan where it gets none; one for other shapes would split the work wrongly."""
    made: list[Tensor] = []

    def attend_paged(q: Tensor, pages: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
        plan = args[3]
        if plan.tile_scheduler_metadata is None:
            plan.tile_scheduler_metadata, plan.num_splits = torch.tensor(len(made)), torch.tensor(q.shape[0])
            made.append(plan.tile_scheduler_metadata)
        assert int(plan.num_splits) == q.shape[0] and q.shape[1] == options["indices"].shape[1] == 1
        return q, None

    def get_mla_metadata() -> tuple[Any, None]:
        return SimpleNamespace(tile_scheduler_metadata=None, num_splits=None), None

    run = _paged_attention(SimpleNamespace(flash_mla_with_kvcache=attend_paged, get_mla_metadata=get_mla_metadata))
    pages = torch.zeros(1, 1, 1, 584, dtype=torch.uint8)

    def call(rows: int, listed: int, more: int | None) -> None:
        q, index = torch.zeros(rows, 64, 512), torch.zeros(rows, listed, dtype=torch.int32)
        more_index = None if more is None else torch.zeros(rows, more, dtype=torch.int32)
        found = run(q, pages, index, None if more is None else pages, more_index, 1.0, torch.zeros(64))
        assert found.shape == q.shape

    for _ in range(2):
        for shape in ((1, 128, 512), (2, 128, 512), (2, 128, None), (2, 64, 512)):
            call(*shape)
    assert len(made) == 4
