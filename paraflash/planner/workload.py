"""The work as numbers: a workload becomes engine steps, a step becomes rows and (query, key) pairs.

A `Step` is a list of chunks (first position, length), one for each prompt that has rows in it. Counts are of the whole
step; under PCP a rank has 1/P of them, because zigzag chunks balance rows and pairs alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from paraflash.config.model import LayerSpec, ModelConfig

Chunk = tuple[int, int]  # first position, rows


@dataclass(frozen=True)
class Workload:
    """`concurrency` prompts of `input_len` tokens that arrive together, run in steps of at most `batch_budget` rows."""

    input_len: int
    concurrency: int = 1
    batch_budget: int = 4096
    bounded_replay: bool = True

    def __post_init__(self) -> None:
        for name in ("input_len", "concurrency", "batch_budget"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; at least 1 is needed")


@dataclass(frozen=True)
class Step:
    chunks: tuple[Chunk, ...]
    finished: tuple[int, ...]  # requests whose prompt ends in this step
    replay: bool = False  # bounded replay: layers after the last KV owner run on trailing windows only
    kept: tuple[Chunk, ...] | None = None  # what they run on then; None: the trailing window of each chunk

    @property
    def rows(self) -> int:
        return sum(length for _, length in self.chunks)


def steps(workload: Workload) -> list[Step]:
    """The steps of a workload: first come, first served, each filled up to the batch budget."""
    result: list[Step] = []
    chunks: list[Chunk] = []
    finished: list[int] = []
    free = workload.batch_budget
    for request in range(workload.concurrency):
        position = 0
        while position < workload.input_len:
            length = min(free, workload.input_len - position)
            chunks.append((position, length))
            position, free = position + length, free - length
            if position == workload.input_len:
                finished.append(request)
            if not free:
                result.append(Step(tuple(chunks), tuple(finished), workload.bounded_replay))
                chunks, finished, free = [], [], workload.batch_budget
    if chunks:
        result.append(Step(tuple(chunks), tuple(finished), workload.bounded_replay))
    return result


def kept_chunks(chunks: tuple[Chunk, ...], window: int) -> tuple[Chunk, ...]:
    """The trailing window of each chunk: the rows that bounded replay keeps (model.md 5.2)."""
    return tuple((start + length - min(length, window), min(length, window)) for start, length in chunks)


def layer_chunks(model: ModelConfig, layer: LayerSpec, step: Step) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...]]:
    """(rows whose KV the layer writes, rows that it runs in full) of a step (model.md 5.2)."""
    owner = model.last_kv_owner
    if not step.replay or layer.index < owner or owner < 0:
        return step.chunks, step.chunks
    kept = kept_chunks(step.chunks, model.window) if step.kept is None else step.kept
    return (step.chunks if layer.index == owner else kept), kept


@lru_cache(maxsize=4096)
def _key_counts(start: int, length: int, ratio: int, window: int, topk: int) -> tuple[int, int]:
    seen = np.arange(start + 1, start + length + 1, dtype=np.int64)  # tokens that each query sees, itself included
    attended = np.minimum(seen, window)
    if not ratio:
        return int(attended.sum()), 0
    entries = seen // ratio
    attended += np.minimum(entries, topk)
    # With at most topk entries all are taken, and scoring is skipped (model.md 3.9).
    return int(attended.sum()), int(entries[entries > topk].sum())


def key_counts(model: ModelConfig, ratio: int, chunks: tuple[Chunk, ...]) -> tuple[int, int]:
    """((query, key) pairs of attention, (query, entry) pairs of index scoring) of a step in a layer of `ratio`."""
    counts = [_key_counts(start, length, ratio, model.window, model.index_topk) for start, length in chunks]
    return sum(c[0] for c in counts), sum(c[1] for c in counts)
