"""Round trips through memory that all ranks write, with threads for ranks: what arrives, and that nothing is written
over before it is used, whoever is late."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from paraflash.parallel import copies as copies_module
from paraflash.parallel.copies import Copies, Window, checked
from paraflash.parallel.exchange import RowGather, Trip
from paraflash.parallel.mesh import Group
from tests.shared_windows import NBYTES, windows


def on_ranks(size: int, work: Callable[[int, Copies], Any]) -> list[Any]:
    made = [Copies(window, None) for window in windows(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(rank, made[rank]), range(size)))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_trips_of_ranks_that_are_late_at_random(size: int) -> None:
    """Each trip's values follow from the one before, so one row overwritten too early shows at the end."""

    def trips(rank: int, copies: Copies) -> Tensor:
        lag = random.Random(rank)
        x = torch.arange(12.0).view(4, 3) + 100 * rank
        for trip in range(30):
            gathered = copies.gather([x])
            time.sleep(lag.random() * 0.003)
            (seen,) = gathered()
            time.sleep(lag.random() * 0.003)
            share = seen * (rank + 1) + trip  # what this rank adds to the rows of all
            back = copies.scatter(share)
            time.sleep(lag.random() * 0.003)
            x = (sum(back()) / 8).round()
        return x

    found = on_ranks(size, trips)
    x = torch.stack([torch.arange(12.0).view(4, 3) + 100 * rank for rank in range(size)])
    for trip in range(30):
        x = (sum(x * (rank + 1) + trip for rank in range(size)) / 8).round()  # type: ignore[union-attr]
    assert torch.equal(torch.stack(found), x)


def test_shapes_and_dtypes_may_differ_from_trip_to_trip() -> None:
    cases = [((5, 7), torch.float32), ((64, 16), torch.bfloat16), ((1, 3), torch.float32), ((2, 2, 2), torch.bfloat16)]

    def trips(rank: int, copies: Copies) -> list[tuple[Tensor, Tensor]]:
        found = []
        for shape, dtype in cases:
            x = torch.full(shape, float(rank + 1)).to(dtype)
            more = torch.arange(shape[0]) + 10 * rank
            everyone, numbers = (part.clone() for part in copies.gather([x, more])())
            assert torch.equal(numbers, torch.cat([torch.arange(shape[0]), torch.arange(shape[0]) + 10]))
            found.append((everyone, sum(copies.scatter(everyone)())))
        return found

    for rank, of_rank in enumerate(on_ranks(2, trips)):
        for (everyone, summed), (shape, dtype) in zip(of_rank, cases, strict=True):
            n = shape[0]
            assert everyone.dtype == summed.dtype == dtype
            assert (everyone[:n] == 1).all() and (everyone[n:] == 2).all() and len(everyone) == 2 * n
            assert summed.shape == shape and (summed == 2 * (rank + 1)).all()


def test_shares_come_in_the_order_of_ranks() -> None:
    """So that all of them, in every run, round alike."""
    rows = [torch.full((8, 5), 10.0 * rank) + torch.arange(8.0)[:, None] for rank in range(4)]

    def trip(rank: int, copies: Copies) -> list[Tensor]:
        copies.gather([rows[rank][:2]])()
        return copies.scatter(rows[rank])()

    for rank, shares in enumerate(on_ranks(4, trip)):
        assert [share[0, 0].item() for share in shares] == [10 * r + 2 * rank for r in range(4)]


def test_memory_is_checked_before_it_is_used() -> None:
    def trip(rank: int, copies: Copies) -> bool:
        return checked(copies) is copies

    assert on_ranks(3, trip) == [True] * 3
    made = [Copies(window, None) for window in windows(2)]
    buffers = made[0].window.buffers
    made[1].window = made[1].window._replace(buffers=[buffers[0].clone(), buffers[1]])  # what it writes does not arrive

    def failing(rank: int) -> str:
        try:
            checked(made[rank])
        except RuntimeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(failing, range(2)))
    assert "reads differently" in said[0]


def test_only_shares_that_fit_and_pay_are_held() -> None:
    copies = Copies(Window(0, 2, 2 * copies_module.LEAST_BYTES, [], lambda *_: None, lambda *_: None), None)
    least = copies_module.LEAST_BYTES
    assert [copies.holds(n) for n in (0, least - 1, least, 2 * least, 2 * least + 1)] == [
        False,
        False,
        True,
        True,
        False,
    ]


class Counted:
    """Copies that count; `Group` must ask them for both halves of a trip or for none."""

    def __init__(self, copies: Copies):
        self._copies, self.halves = copies, list[str]()

    def holds(self, nbytes: int) -> bool:
        return self._copies.holds(nbytes)

    def gather(self, xs: Any) -> Any:
        self.halves.append("gather")
        return self._copies.gather(xs)

    def scatter(self, x: Tensor) -> Any:
        self.halves.append("scatter")
        return self._copies.scatter(x)


@pytest.mark.parametrize("counts", [[4, 4], [3, 5], [0, 6], [8, 7], [1, 0], [5, 5, 4]])
def test_a_trip_takes_both_ways_by_copies(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Unequal shares and empty ranks included; the log is that of the collectives."""
    monkeypatch.setattr(copies_module, "LEAST_BYTES", 1)
    size, made = len(counts), windows(len(counts))
    parts = [torch.randn(n, 6, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(counts)]

    def trip(rank: int) -> tuple[Tensor, Tensor, Group]:
        group = Group("pcp", size, rank, copies=Counted(Copies(made[rank], None)), log=[])  # type: ignore[arg-type]
        there = Trip(RowGather(group, counts, "experts"), [parts[rank], torch.arange(counts[rank])])
        everyone, numbers = (x.clone() for x in there.out.wait())
        assert torch.equal(numbers, torch.cat([torch.arange(n) for n in counts]))
        return everyone, sum(there.back_start(everyone * 2.0**rank).wait()), group

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(trip, range(size)))
    for rank, (everyone, summed, group) in enumerate(found):
        assert torch.equal(everyone, torch.cat(parts))
        assert torch.allclose(summed, parts[rank] * sum(2.0**r for r in range(size)))
        assert group.copies.halves == ["gather", "scatter"]  # type: ignore[union-attr]
        assert [(entry.op, entry.shape) for entry in group.log or []] == [
            ("all_gather", (max(counts), 6)),
            ("all_gather", (max(counts),)),
            ("reduce_scatter", (size * max(counts), 6)),
        ]


def test_a_share_that_is_too_large_or_small_goes_by_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "LEAST_BYTES", 300)
    sent: list[str] = []

    class Sent(Group):
        def all_gather(self, x: Tensor, label: str) -> Tensor:
            sent.append(label)
            return torch.cat([x, x])

        def reduce_scatter(self, x: Tensor, label: str) -> Tensor:
            sent.append(label)
            return 2 * x.chunk(2)[0]

    group = Sent("pcp", 2, 0, copies=Copies(windows(2)[0], None))
    for n in (3, NBYTES // 24 + 1):
        there = Trip(RowGather(group, [n, n], str(n)), [torch.ones(n, 6)])
        assert (there.back_start(there.out.wait()[0]).wait()[0] == 2).all()
    assert sent == ["3"] * 2 + [str(NBYTES // 24 + 1)] * 2
    RowGather(group, [20, 20], "one way").gather_start(torch.ones(20, 6)).wait()  # fits, but does not return
    assert sent[-1] == "one way"
