"""Collectives that are started early: the same results, the same log, nothing written or given up before the wait."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Meeting, ThreadGroup
from torch import Tensor

from paraflash.parallel import copies as copies_module
from paraflash.parallel import mesh as mesh_module
from paraflash.parallel.copies import GATHER, SCATTER, Copies
from paraflash.parallel.exchange import RowGather
from paraflash.parallel.mesh import Group, Mesh, done
from tests import moe_layer
from tests.shared_windows import windows


def test_a_group_of_one_and_one_without_a_stream_of_its_own_start_nothing() -> None:
    x = torch.ones(2, 3)
    alone = Group("pcp", 1, 0, log=[])
    assert RowGather(alone, [2], "rows").gather_start(x).wait() is x
    assert RowGather(alone, [2], "rows").reduce_scatter_start(x).wait() is x
    assert alone.all_gather_start(x, "rows").wait() is x and not alone.log


@dataclass
class Work:
    """A collective that arrives when it is waited for."""

    out: Tensor
    x: Tensor
    result: Tensor
    waited: list[Any]

    def wait(self) -> None:
        assert torch.equal(self.x, self.before), "written while it is sent"
        self.out.copy_(self.result)
        self.waited.append(self)

    def __post_init__(self) -> None:
        self.before = self.x.clone()
        self.out.fill_(float("nan") if self.out.is_floating_point() else 127)


@dataclass
class LateGroup(ThreadGroup):
    """Threads whose started collectives take the way of NCCL's."""

    waited: list[Any] = field(default_factory=list)

    def handle_of(self, op: str) -> Any:
        def collective(out: Tensor, x: Tensor, group: Any, async_op: bool) -> Work:
            assert async_op
            parts = self.meeting.exchange(self.rank, (op, ""), x)
            result = torch.cat(parts) if op == "all_gather" else torch.stack(parts).sum(0).chunk(self.size)[self.rank]
            return Work(out, x, result, self.waited)

        return collective

    def _started(self, op: str, collective: Any, out: Tensor, x: Tensor, label: str) -> Any:
        return super()._started(op, self.handle_of(op), out, x, label)


def on_ranks(world: int, late: bool, work: Any) -> tuple[list[Any], list[Group]]:
    meeting = Meeting(world)
    groups: list[Any] = [LateGroup("pcp", world, r, own_stream=late, log=[], meeting=meeting) for r in range(world)]
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: work(rank, groups[rank]), range(world))), groups


@pytest.mark.parametrize("counts", [[3, 4], [0, 5], [2, 2, 2], [0, 0, 1], [0, 0]])
@pytest.mark.parametrize("large", [128, 1 << 20], ids=["routed where the rows are", "routed by all"])
def test_an_moe_layer_gives_the_same_bits_and_the_same_log(
    counts: list[int], large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe_layer.exchange, "OWN_BYTES", large)
    monkeypatch.setattr(moe_layer, "EXPERTS", 4 * len(counts))

    def layer(rank: int, group: Group) -> Tensor:
        mesh = Mesh(rank, Group("tp", 1, 0), group, torch.device("cpu"))
        h = torch.randn(counts[rank], 32, generator=torch.Generator().manual_seed(rank))
        return moe_layer.output(moe_layer.make_layer(mesh, 32, torch.float32), h, group, counts)

    found, late = on_ranks(len(counts), True, layer)
    wanted, groups = on_ranks(len(counts), False, layer)
    assert all(torch.equal(a, b) and not a.isnan().any() for a, b in zip(found, wanted, strict=True))
    assert [g.log for g in late] == [g.log for g in groups]
    issued = 0 if not sum(counts) else 3 if large == 128 else 2
    assert all(len(g.log or []) == issued == len(g.waited) for g in late)  # type: ignore[attr-defined]
    assert all(set(g.seconds) == ({"experts"} if issued else set()) for g in late)


@pytest.mark.parametrize("counts", [[3, 4], [0, 5], [2, 2]])
@pytest.mark.parametrize("large", [128, 1 << 20], ids=["routed where the rows are", "routed by all"])
def test_a_trip_by_copy_engines_gives_the_same_bits(
    counts: list[int], large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no collective runs beside it, which one rank might put before it and another behind it."""
    monkeypatch.setattr(moe_layer.exchange, "OWN_BYTES", large)
    monkeypatch.setattr(copies_module, "LEAST_BYTES", 128)
    monkeypatch.setattr(moe_layer, "EXPERTS", 4 * len(counts))
    shared = windows(len(counts))
    taken: list[int] = []

    def layer(rank: int, group: Any) -> Tensor:
        window = shared[rank]

        def take(other: int, flag: int) -> None:
            taken.append(flag)
            assert not group.waited, "a collective"
            window.take_flag(other, flag)

        if group.own_stream:
            group.copies = Copies(window._replace(take_flag=take), None)
        mesh = Mesh(rank, Group("tp", 1, 0), group, torch.device("cpu"))
        h = torch.randn(counts[rank], 32, generator=torch.Generator().manual_seed(rank))
        return moe_layer.output(moe_layer.make_layer(mesh, 32, torch.float32), h, group, counts)

    found, late = on_ranks(len(counts), True, layer)
    wanted, _ = on_ranks(len(counts), False, layer)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert sorted(taken) == [GATHER, GATHER, SCATTER, SCATTER]
    assert late[0].log == late[1].log and len(late[0].log or []) == (4 if large == 128 else 2)


def test_parts_of_all_sizes_are_started_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_layer.exchange, "OWN_BYTES", 1024)
    parts = [torch.arange(7.0), torch.randn(7, 100), torch.randn(7, 3).bfloat16(), torch.rand(7, 90)]

    def gathered(rank: int, group: Any) -> list[Tensor]:
        started = RowGather(group, [3, 4], "rows").gather_packed_start(*[p.split([3, 4])[rank] for p in parts])
        assert len(group.log) == 3 and not group.waited
        return started.wait()

    found, _ = on_ranks(2, True, gathered)
    assert all(torch.equal(a, b) for a, b in zip(found[0], parts, strict=True))


def test_what_is_sent_lives_until_the_wait() -> None:
    """The allocator does not know that another stream reads it."""
    started = mesh_module.Started(lambda: 1, torch.ones(1), torch.ones(2))
    assert len(started._held) == 2
    assert started.then(lambda x: x + 1).wait() == 2
    assert not started._held and done(3).wait() == 3
    twice = done(4)
    twice.wait()
    with pytest.raises(RuntimeError, match="twice"):
        twice.wait()


def test_started_over_gloo_processes(tmp_path: Path) -> None:
    """The code that NCCL takes, over real processes; two, so that a sum has one order."""
    init = f"file://{tmp_path / 'meet'}"
    cases = [[5, 5], [3, 4], [0, 6], [64, 60]]
    torch.multiprocessing.spawn(gloo_rank, (init, cases), nprocs=2)


def gloo_rank(rank: int, init: str, cases: list[list[int]]) -> None:
    torch.set_num_threads(1)
    moe_layer.compare(rank, 2, "cpu", init, 64, cases, large=32 * 64 * 4)
