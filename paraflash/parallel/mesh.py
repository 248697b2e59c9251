"""Process groups of one rank: TP (same rows, split weights) and PCP (same weights, split rows).

rank = pcp_rank * TP + tp_rank; experts are spread over all ranks (EP = PCP x TP) and need no group of their own, since
their exchange is a gather over PCP and a sum over PCP and TP. Every collective is logged by (group, op, shape), so
that a test can show that all ranks issue the same ones; a group of one rank issues none and copies nothing.

Over NCCL a collective may be *started*: it runs on the group's own stream while the rank's stream goes on, until its
`wait`. Between the two only started collectives of the same group may be issued, so that the streams alone put all
collectives of a group in one order. Elsewhere a started collective is done at once. A large gather whose rows return as
sums goes by the GPUs' copy engines where they reach each other (`copies.py`).

Gloo reduces in a ring of 2 (n - 1) hops, each of them a wake-up of another process, and has no reduce-scatter but a
full all-reduce. Small sums over gloo are therefore an exchange in one hop and a local sum in rank order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paraflash.parallel.copies import Copies, aligned, checked, map_peers, shared_memory

# Newer torch renames these two; the older names still work there but warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# A backstop: the executor notices a stuck step earlier. Loading may keep a rank away from its peers for minutes.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)

COPIED_ROWS = 64  # of a rank beyond its even share of a step

log = logging.getLogger("paraflash.mesh")

T = TypeVar("T")
U = TypeVar("U")

GATHER_SUM_BYTES = 1 << 18  # a larger all-reduce over gloo goes round the ring, which sends fewer bytes


@dataclass
class Collective:
    """One entry of the log; nbytes is what this rank contributes."""

    group: str
    op: str
    label: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class Started(Generic[T]):
    """A collective under way. It holds what is read and written: until `wait` the allocator must not give that memory
    to the rank's stream again."""

    def __init__(self, wait: Callable[[], T], *held: Tensor):
        self._wait: Callable[[], T] | None = wait
        self._held = held

    def wait(self) -> T:
        """The result, for work that the current stream is given from now on. Raises RuntimeError the second time."""
        wait, self._wait = self._wait, None
        if wait is None:
            raise RuntimeError("a collective was waited for twice")
        result, self._held = wait(), ()
        return result

    def then(self, work: Callable[[T], U]) -> Started[U]:
        """work(result), done when it is waited for."""
        return Started(lambda: work(self.wait()))


def done(result: T) -> Started[T]:
    """In the place of a collective that nothing has to be waited for."""
    return Started(lambda: result)


@dataclass
class Group:
    """Ranks that talk to each other. `handle` is None for a group of one."""

    name: str
    size: int
    rank: int
    handle: Any = None
    gloo: bool = False
    own_stream: bool = False  # started collectives run beside the rank's stream
    copies: Copies | None = None  # what large round trips go by instead
    log: list[Collective] | None = None  # None: do not log
    seconds: dict[str, float] = field(default_factory=dict)  # host time by label since the last reset

    def _spent(self, label: str, start: float) -> None:
        self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - start

    def _note(self, op: str, label: str, x: Tensor, start: float) -> None:
        self._spent(label, start)
        if self.log is not None:
            self.log.append(
                Collective(self.name, op, label, tuple(x.shape), str(x.dtype), x.numel() * x.element_size())
            )

    def all_gather(self, x: Tensor, label: str) -> Tensor:
        """x [n, ..] -> [size * n, ..], rank-major."""
        if self.size == 1:
            return x
        start = time.perf_counter()
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        _all_gather(out, x.contiguous(), group=self.handle)
        self._note("all_gather", label, x, start)
        return out

    def all_reduce(self, x: Tensor, label: str) -> Tensor:
        """Sum over the group, possibly in place."""
        if self.size == 1:
            return x
        start = time.perf_counter()
        x = x.contiguous()
        if self.gloo and self.size > 2 and x.nbytes <= GATHER_SUM_BYTES:
            parts = x.new_empty((self.size, *x.shape))
            _all_gather(parts.flatten(0, 1), x, group=self.handle)
            x = parts.sum(0)
        else:
            dist.all_reduce(x, group=self.handle)
        self._note("all_reduce", label, x, start)
        return x

    def reduce_scatter(self, x: Tensor, label: str) -> Tensor:
        """x [size * n, ..] rank-major -> this rank's [n, ..], summed over the group."""
        if self.size == 1:
            return x
        start = time.perf_counter()
        x = x.contiguous()
        if self.gloo:
            parts = torch.empty_like(x)
            dist.all_to_all_single(parts, x, group=self.handle)
            out = parts.unflatten(0, (self.size, -1)).sum(0)
        else:
            out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
            _reduce_scatter(out, x, group=self.handle)
        self._note("reduce_scatter", label, x, start)
        return out

    def all_gather_start(self, x: Tensor, label: str) -> Started[Tensor]:
        """`all_gather`, waited for later. x must not be written before."""
        if not self.own_stream:
            return done(self.all_gather(x, label))
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        return self._started("all_gather", _all_gather, out, x.contiguous(), label)

    def reduce_scatter_start(self, x: Tensor, label: str) -> Started[Tensor]:
        """`reduce_scatter`, waited for later. x must not be written before."""
        if not self.own_stream:
            return done(self.reduce_scatter(x, label))
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        return self._started("reduce_scatter", _reduce_scatter, out, x.contiguous(), label)

    def out_start(self, xs: Sequence[Tensor], label: str) -> Started[list[Tensor]] | None:
        """The first half of a round trip by copy engines: `all_gather` of each x [n, ..], waited for later; None where
        they do not hold it. What comes is a view that the next trip writes over, and xs must not be written before.
        The next call is `back_start` of a tensor with as many rows."""
        assert self.copies is not None
        if not self.copies.holds(sum(aligned(x.nbytes) for x in xs)):
            return None
        start = time.perf_counter()
        xs = [x.contiguous() for x in xs]
        wait = self.copies.gather(xs)
        for x in xs:
            self._note("all_gather", label, x, start)
        return Started(self._clocked(wait, label), *xs)

    def back_start(self, x: Tensor, label: str) -> Started[list[Tensor]]:
        """The second half: this rank's rows of x [size * n, ..] from each rank, to be summed in their order."""
        assert self.copies is not None
        start = time.perf_counter()
        x = x.contiguous()
        wait = self.copies.scatter(x)
        self._note("reduce_scatter", label, x, start)
        return Started(self._clocked(wait, label), x)

    def _started(self, op: str, collective: Any, out: Tensor, x: Tensor, label: str) -> Started[Tensor]:
        start = time.perf_counter()
        work = collective(out, x, group=self.handle, async_op=True)
        self._note(op, label, x, start)

        def wait() -> Tensor:
            work.wait()  # of the stream, not of the host
            return out

        return Started(self._clocked(wait, label), x, out)

    def _clocked(self, wait: Callable[[], T], label: str) -> Callable[[], T]:
        def clocked() -> T:
            start = time.perf_counter()
            result = wait()
            self._spent(label, start)
            return result

        return clocked


@dataclass
class Mesh:
    """Where this rank stands."""

    rank: int
    tp: Group
    pcp: Group
    device: torch.device
    before_close: list[Callable[[], None]] = field(default_factory=list)

    @property
    def world(self) -> int:
        return self.tp.size * self.pcp.size

    def start_log(self) -> None:
        self.tp.log = self.pcp.log = []

    def take_log(self) -> list[Collective]:
        """The collectives since the last call, in issue order over both groups."""
        log, self.tp.log = self.tp.log or [], []
        self.pcp.log = self.tp.log
        return log

    @contextmanager
    def separate_log(self) -> Iterator[list[Collective]]:
        """Collectives inside go to the yielded log and to no other, whether or not they are logged."""
        log, found = self.tp.log, list[Collective]()
        self.tp.log = self.pcp.log = found
        try:
            yield found
        finally:
            self.tp.log = self.pcp.log = log

    def log_again(self, collectives: list[Collective]) -> None:
        """Adds collectives that are issued once more without a call, if there is a log."""
        if self.tp.log is not None:
            self.tp.log += collectives

    def take_seconds(self) -> dict[str, float]:
        """Host seconds by 'group.label' since the last call."""
        result = {f"{g.name}.{label}": s for g in (self.tp, self.pcp) for label, s in g.seconds.items()}
        self.tp.seconds, self.pcp.seconds = {}, {}
        return result

    def agree_min(self, value: int) -> int:
        """The least of all ranks' values."""
        x = torch.tensor([value], device=self.device)
        for group in (self.tp, self.pcp):
            x = group.all_gather_start(x, "agree").wait().min()[None]
        return int(x)

    def close(self) -> None:
        for work in self.before_close:
            work()
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def local_device(kind: str, rank: int) -> torch.device:
    """The device of a rank: its own GPU, or the CPU. Ranks share GPUs where there are fewer (tests)."""
    return torch.device("cuda", rank % torch.cuda.device_count()) if kind == "cuda" else torch.device("cpu")


def init_mesh(rank: int, tp: int, pcp: int, device: str, init_method: str | None = None) -> Mesh:
    """Joins the process groups of rank `rank` of tp * pcp ranks; device is cpu or cuda, `init_method` as
    torch.distributed takes it.

    CPU ranks talk over gloo, CUDA ranks over NCCL (over gloo where ranks share a GPU, which NCCL refuses). A world of
    one initialises nothing.
    """
    world = tp * pcp
    tp_rank, pcp_rank = rank % tp, rank // tp
    place = local_device(device, rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if world == 1:
        return Mesh(rank, Group("tp", 1, 0), Group("pcp", 1, 0), place)
    if init_method is None:
        raise ValueError(f"init_method is missing for a world of {world} ranks")
    gloo = place.type == "cpu" or torch.cuda.device_count() < world
    dist.init_process_group(
        "gloo" if gloo else "nccl",
        init_method=init_method,
        rank=rank,
        world_size=world,
        timeout=COLLECTIVE_TIMEOUT,
    )
    # Every rank creates every group, in the same order, as torch.distributed demands.
    tp_handles = [_new_group([p * tp + t for t in range(tp)], gloo) for p in range(pcp)]
    pcp_handles = [_new_group([p * tp + t for p in range(pcp)], gloo) for t in range(tp)]
    return Mesh(
        rank,
        Group("tp", tp, tp_rank, tp_handles[pcp_rank], gloo, own_stream=tp > 1 and not gloo),
        Group("pcp", pcp, pcp_rank, pcp_handles[tp_rank], gloo, own_stream=pcp > 1 and not gloo),
        place,
    )


def _new_group(ranks: list[int], gloo: bool) -> Any:
    if gloo:
        return dist.new_group(ranks, timeout=COLLECTIVE_TIMEOUT)
    # Of an exchange and a product that could both start, the exchange gets its few processors first: behind a product
    # that fills the GPU it would begin when there is nothing left to hide it.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = COLLECTIVE_TIMEOUT  # or torch warns that the argument overrides it
    return dist.new_group(ranks, timeout=COLLECTIVE_TIMEOUT, pg_options=options)


def use_copies(mesh: Mesh, tokens: int, row_bytes: int) -> None:
    """From now on large round trips of the PCP group go by copy engines instead of NCCL, if its GPUs can map the memory
    of each other. tokens: of the largest step; row_bytes: that are sent of a row. To be called on all ranks."""
    group = mesh.pcp
    peers = [local_device("cuda", r * mesh.tp.size + mesh.tp.rank) for r in range(group.size)]
    nbytes = (-(-tokens // group.size) + COPIED_ROWS) * row_bytes
    limit = int(COLLECTIVE_TIMEOUT.total_seconds() * 1000)
    stages: tuple[Callable[[Any], Any], ...] = (
        lambda _: shared_memory(peers, group.rank, nbytes),
        lambda own: map_peers(own, group.handle, group.rank, group.size, limit),
        checked,
    )
    made = None
    for stage in stages:  # each needs all ranks, so one that fails is the last on all
        problem = "on another rank"
        try:
            made = stage(made)
        except RuntimeError as error:
            made, problem = None, str(error)
        if not mesh.agree_min(int(made is not None)):
            log.warning("the experts' exchange goes by NCCL: GPUs cannot write each other's memory (%s)", problem)
            return
    group.copies = made

    def drop() -> None:
        group.copies = None

    mesh.before_close.append(drop)
