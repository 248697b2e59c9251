"""Forward passes that are recorded once and replayed, so that the host issues one launch instead of thousands.

A pass is a function of the step's packed inputs and Engram bytes; everything else that it looks at is its signature.
The first pass of a signature runs as it is (kernels are compiled and tuned), the second is captured, later ones copy
their inputs to where the captured pass reads them and replay it. All work of a step is on one stream, so passes of
different signatures may share input buffers and scratch memory.

NCCL demands that all ranks of a collective capture it together, and that they launch graphs of one capture together. So
which of the three a pass is must be the same on all ranks: their signatures differ, but from step to step they change
on all ranks or on none (`Inputs.step`). A capture that fails on one rank is given up on all. Capturing runs nothing, so
a pass that is captured is replayed at once.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from paraflash.model.inputs import Inputs, Packed, to_device
from paraflash.parallel.mesh import Collective, Mesh

log = logging.getLogger("paraflash.graphs")

MOST_GRAPHS = 48  # a graph of a large model takes tens of MB; the least recently used one goes
MOST_SEEN = 256  # signatures remembered after their first pass

Staged = Callable[[], Tensor]  # waits for the step's Engram bytes, uint8 on the host
Forward = Callable[[Inputs, Tensor], Tensor]  # the bytes on the device
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


@dataclass
class Recorded:
    replay: Callable[[], Tensor]  # gives the pass's result, which the next pass may overwrite
    index: Tensor  # where it reads the packed inputs
    engram: Tensor  # and the Engram bytes
    collectives: list[Collective]


class StepGraphs:
    """capture(f) records a call of f without running it; what it returns runs the call again, on the same tensors."""

    def __init__(self, mesh: Mesh, capture: Capture, most: int = MOST_GRAPHS):
        self._mesh, self._most = mesh, most
        self._capture: Capture | None = capture
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._graphs: OrderedDict[Hashable, Recorded] = OrderedDict()
        self._buffers: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()
        self.captures = self.replays = 0
        mesh.before_close.append(self._graphs.clear)  # NCCL closes no group that is part of a graph

    def run(self, packed: Packed, staged: Staged, forward: Forward) -> Tensor:
        """forward(inputs, Engram bytes) on the mesh's device; the result is valid until the next call."""
        recorded = self._graphs.get(packed.signature)
        if recorded is None and self._repeats(packed.signature):
            recorded = self._record(packed, staged(), forward)
        if recorded is None:
            return forward(packed.sent_to(self._mesh.device), to_device(staged(), self._mesh.device))
        self._graphs.move_to_end(packed.signature)
        recorded.index.copy_(packed.host, non_blocking=True)
        recorded.engram.copy_(staged(), non_blocking=True)
        self.replays += 1
        self._mesh.log_again(recorded.collectives)
        return recorded.replay()

    def counts(self) -> dict[str, int]:
        return {"captures": self.captures, "replays": self.replays, "held": len(self._graphs)}

    def _repeats(self, signature: Hashable) -> bool:
        """Whether a pass of this signature has been seen; the next one will say yes."""
        if self._capture is None:
            return False
        known = signature in self._seen
        self._seen[signature] = None
        self._seen.move_to_end(signature)
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        return known

    def _record(self, packed: Packed, staged: Tensor, forward: Forward) -> Recorded | None:
        """None where capturing fails: the pass, and all that have no graph yet, run as they are from then on."""
        assert self._capture is not None
        index = self._buffer("index", packed.host)
        engram = self._buffer("engram", staged)
        if len(self._graphs) >= self._most:
            forgotten, _ = self._graphs.popitem(last=False)
            self._seen.pop(forgotten, None)  # or shapes in rotation would be captured each time they come
        replay, problem = None, "on another rank"
        with self._mesh.separate_log() as collectives:
            try:
                replay = self._capture(lambda: forward(packed.on(index), engram))
            except Exception as error:  # an engine that serves goes on without
                problem = f"{type(error).__name__}: {error}"
        with self._mesh.separate_log():
            everywhere = self._mesh.agree_min(int(replay is not None))
        if replay is None or not everywhere:
            log.warning("CUDA graphs are off: a step cannot be captured (%s)", problem)
            self._capture = None
            return None
        self.captures += 1
        found = self._graphs[packed.signature] = Recorded(replay, index, engram, collectives)
        return found

    def _buffer(self, name: Hashable, like: Tensor) -> Tensor:
        """A tensor of this shape that graphs read; those of equal shape share it."""
        key = (name, like.shape, like.dtype)
        found = self._buffers.get(key)
        if found is None:
            found = self._buffers[key] = torch.empty(like.shape, dtype=like.dtype, device=self._mesh.device)
        return found


def cuda_capture(device: torch.device) -> Capture:
    """Capture by CUDA graphs that share one memory pool."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)

    def capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # during a capture the allocator cannot give back what it holds
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # Other threads (Engram rows, NCCL's watchdog) make calls meanwhile that a capture must not forbid them.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = run()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return capture
