"""Several tensors of the same rows cross ranks together, and large ones on their own, with equal results."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from in_process import Meeting, ThreadGroup

from paraflash.parallel import exchange
from paraflash.parallel.exchange import RowGather
from paraflash.parallel.mesh import Collective


def gathered(counts: list[int], parts: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[Collective]]:
    """What rank 0 gets of parts [sum(counts), ..] that lie on the ranks, and the collectives it took."""
    meeting = Meeting(len(counts))
    groups = [ThreadGroup("pcp", len(counts), r, log=[], meeting=meeting) for r in range(len(counts))]
    pieces = [part.split(counts) for part in parts]

    def run(rank: int) -> list[torch.Tensor]:
        return RowGather(groups[rank], counts, "rows").gather_packed(*[p[rank] for p in pieces])

    with ThreadPoolExecutor(len(counts)) as pool:
        found = list(pool.map(run, range(len(counts))))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    return found[0], groups[0].log or []


def test_parts_of_any_size_arrive_in_order(monkeypatch) -> None:
    monkeypatch.setattr(exchange, "OWN_BYTES", 1024)
    parts = [torch.arange(7, dtype=torch.int64), torch.randn(7, 100), torch.randn(7, 3).bfloat16(), torch.rand(7, 90)]
    for counts in ([3, 4], [7, 0], [2, 2, 3]):
        found, log = gathered(counts, parts)
        assert all(torch.equal(a, b) for a, b in zip(found, parts, strict=True))
        assert len(log) == 3, "the small ones in one collective, each large one in its own"


def test_one_small_part_is_not_packed() -> None:
    part = torch.randn(5, 4)
    found, log = gathered([2, 3], [part])
    assert torch.equal(found[0], part)
    assert [(entry.shape, entry.dtype) for entry in log] == [((3, 4), "torch.float32")]


def test_no_rows_no_collective() -> None:
    found, log = gathered([0, 0], [torch.randn(0, 4), torch.randn(0, 2)])
    assert [len(x) for x in found] == [0, 0] and not log
