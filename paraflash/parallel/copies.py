"""The experts' exchange between GPUs of one machine by their copy engines: rows out to all ranks, sums back.

NCCL's kernels hold processors that the products beside them would use; a copy engine holds none. Each rank writes its
rows into memory of the others that it has mapped (torch's symmetric memory), then raises a flag there; flags are set
and taken on the GPU, so an exchange can be part of a CUDA graph.

A *trip* is a gather and then a scatter of sums, and trips follow each other. Then no rank writes what another one
still reads, without asking for leave: it gathers again after the scatter of all others has come, which they sent when
they had used the gathered rows; and it scatters again after the next gather of all others has come, which they sent
when they had used the sums. Exchanges that are no part of a trip go by the group's collectives.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

LEAST_BYTES = 1 << 20  # smaller shares of a rank go by the group's collectives, which need fewer launches
GATHER, SCATTER = 0, 1  # parts of the shared memory, and flags


def aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


class Window(NamedTuple):
    """Memory that all ranks of a group can write, `nbytes` from each of them in each of two parts."""

    rank: int
    size: int
    nbytes: int
    buffers: list[Tensor]  # by rank: uint8 [2 * size * nbytes] of that rank, on this one's device
    raise_flag: Callable[[int, int], None]  # (rank, flag): at that rank, after what the stream was given before
    take_flag: Callable[[int, int], None]  # (rank, flag): the stream goes on once that rank has raised it here

    def part(self, rank: int, which: int, like: Tensor, rows: int, before: int = 0) -> Tensor:
        """`rows` rows as those of `like`, of the part `which` of that rank's memory, behind `before` bytes of it."""
        first = which * self.size * self.nbytes + before
        count = rows * like[0].nbytes
        return self.buffers[rank][first : first + count].view(like.dtype).view(rows, *like.shape[1:])


class Copies:
    """Exchanges through a window. `stream`: where copies run beside the caller's stream; None (CPU): within it.

    No collective is to be under way when a trip is waited for: a flag is taken by a kernel that spins, and a graph may
    put it before such a collective on one rank and behind it on another one.
    """

    def __init__(self, window: Window, stream: torch.cuda.Stream | None):
        self.window, self._stream = window, stream
        self._others = [(window.rank + step) % window.size for step in range(1, window.size)]

    def holds(self, nbytes: int) -> bool:
        """Whether shares of so many bytes are exchanged here; the same on all ranks for padded shares."""
        return LEAST_BYTES <= nbytes <= self.window.nbytes

    def gather(self, xs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Starts to send each x [n, ..] to all ranks. The result waits for [size * n, ..] of each, rank-major, good
        until the next gather; xs must stay as they are until then."""
        window, n = self.window, len(xs[0])
        own = slice(window.rank * n, (window.rank + 1) * n)

        def of(rank: int) -> list[Tensor]:
            found, before = [], 0
            for x in xs:
                found.append(window.part(rank, GATHER, x, window.size * n, before))
                before += aligned(found[-1].nbytes)
            return found

        gathered = of(window.rank)
        with self._beside():
            for other in self._others:
                for theirs, x in zip(of(other), xs, strict=True):
                    theirs[own].copy_(x)
                window.raise_flag(other, GATHER)
            for mine, x in zip(gathered, xs, strict=True):
                mine[own].copy_(x)

        def wait() -> list[Tensor]:
            self._arrived(GATHER)
            return gathered

        return wait

    def scatter(self, x: Tensor) -> Callable[[], list[Tensor]]:
        """Starts to send each rank its rows of x [size * n, ..]. The result waits for this rank's rows [n, ..] of each
        rank, in their order, good until the next scatter; x must stay as it is until they are used."""
        window = self.window
        parts = list(x.chunk(window.size))
        n = len(parts[0])
        with self._beside():
            for other in self._others:
                window.part(other, SCATTER, x, len(x))[window.rank * n : (window.rank + 1) * n].copy_(parts[other])
                window.raise_flag(other, SCATTER)

        def wait() -> list[Tensor]:
            self._arrived(SCATTER)
            found = list(window.part(window.rank, SCATTER, x, len(x)).chunk(window.size))
            found[window.rank] = parts[window.rank]
            return found

        return wait

    def _beside(self) -> Any:
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _arrived(self, flag: int) -> None:
        if self._stream is not None:  # what was sent may be written again
            torch.cuda.current_stream().wait_stream(self._stream)
        for other in self._others:
            self.window.take_flag(other, flag)


def shared_memory(devices: list[torch.device], rank: int, nbytes: int) -> Tensor:
    """Bytes for `map_peers`, on the device of `rank`. devices: of the group's ranks; nbytes: most bytes of a share.

    Raises RuntimeError where that device does not reach all others, or has no room.
    """
    device = devices[rank]
    missing = [
        str(other) for other in devices if other != device and not torch.cuda.can_device_access_peer(device, other)
    ]
    if missing:
        raise RuntimeError(f"{device} does not reach {', '.join(missing)}")
    # Multicast objects would be made with the memory where they can be; nothing here uses them.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric

    backend = symmetric.get_backend(device)
    if backend != "CUDA":
        raise RuntimeError(f"torch's symmetric memory uses {backend} here")
    return symmetric.empty(2 * len(devices) * aligned(nbytes), dtype=torch.uint8, device=device)


def map_peers(own: Tensor, handle: Any, rank: int, size: int, timeout_ms: int) -> Copies:
    """Copies between the ranks of the process group `handle`, whose `shared_memory` is `own`; on all of them together.

    A flag that is not raised within timeout_ms ends the process by a CUDA error. Raises RuntimeError.
    """
    import torch.distributed._symmetric_memory as symmetric

    shared = symmetric.rendezvous(own, handle.group_name)
    if shared is None:
        raise RuntimeError("torch does not know the memory as shared")
    buffers = [own if r == rank else shared.get_buffer(r, own.shape, own.dtype) for r in range(size)]
    window = Window(
        rank,
        size,
        own.nbytes // (2 * size),
        buffers,
        lambda other, flag: shared.put_signal(other, flag, timeout_ms),
        lambda other, flag: shared.wait_signal(other, flag, timeout_ms),
    )
    # A flag is raised by a small kernel: among the blocks of a product it comes first.
    return Copies(window, torch.cuda.Stream(own.device, priority=-1))


def checked(copies: Copies) -> Copies:
    """The same, after a trip of known numbers that fills the memory. Raises RuntimeError where they do not arrive."""
    rank, size, nbytes, buffers, _, _ = copies.window
    numbers = torch.arange(1, size + 1, dtype=torch.float32, device=buffers[rank].device)
    gathered = copies.gather([numbers[rank].expand(nbytes // 4).contiguous()])()[0].view(size, -1)
    right = (gathered == numbers[:, None]).all()
    returned = copies.scatter((numbers[rank] * numbers)[:, None].expand(size, nbytes // 4).flatten())()
    if not bool(right & (torch.stack(returned) == (numbers[rank] * numbers)[:, None]).all()):
        raise RuntimeError("what one GPU writes there another reads differently")
    return copies
