"""Faults put into an engine on purpose, for the ablation: each breaks one thing that splitting a prompt can break.

`install(name)` replaces functions of the engine in this process. A worker does it at its start when its runner factory
is `training.faults:broken_NAME`; reference kernels only. Nothing of the engine knows of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paraflash.cache import window
from paraflash.engine import runner
from paraflash.model import batch, engram_hash, indexer
from paraflash.parallel.exchange import RowGather

Set = Callable[[Any, str, Any], None]  # setattr, or a test's monkeypatch.setattr
HALO = 64


def _unlink(put: Set, only_borders: bool) -> None:
    """The odd token of a ratio-2 group stands in for the even one: in every group, or only where the even token is a
    row of another rank or of an earlier step."""
    plan = batch.plan_entries

    def broken(spans: Any, sources: Any, rank: int, ratio: int, block_size: int) -> Any:
        entries = plan(spans, sources, rank, ratio, block_size)
        if entries.pairs is None:
            return entries
        pairs = entries.pairs
        local = sum(s.length for s in sources[rank])
        first_local = len(pairs.open_slots)
        linked = (pairs.first >= first_local) & (pairs.first < first_local + local) & only_borders
        return replace(entries, pairs=replace(pairs, first=np.where(linked, pairs.first, pairs.second)))

    put(batch, "plan_entries", broken)


def pairs_unlinked(put: Set) -> None:
    _unlink(put, only_borders=False)


def pairs_at_borders(put: Set) -> None:
    _unlink(put, only_borders=True)


def short_halo(put: Set) -> None:
    """A rank sends the last HALO rows of a segment; windows and rings go without the others."""
    plan = batch.plan_window

    def broken(*args: Any, **options: Any) -> Any:
        found = plan(*args, **options)
        arrived = found.tail_rows >= 0
        return replace(found, tail_rows=found.tail_rows[arrived], tail_slots=found.tail_slots[arrived])

    put(window, "tail_of", lambda segment, size: max(segment.start, segment.end - HALO))
    put(batch, "plan_window", broken)


def engram_reset(put: Set) -> None:
    """n-grams begin anew with every segment of a rank: at each border of a chunk, and at each decoded token."""

    def broken(self: Any, requests: Any, local: Any) -> Any:
        model = self.model_config
        windows = np.concatenate(
            [
                engram_hash.make_windows(
                    r.token_ids.astype(np.int64), r.lookback.astype(np.int64), model.engram_max_ngram
                )
                for r in requests
            ]
        )
        for segments in batch.plan_of(runner.spans_of(requests), self.mesh.pcp.size).segments:
            for s in segments:
                for i in range(min(s.length, model.engram_max_ngram - 1)):
                    windows[s.global_row + i, i + 1 :] = engram_hash.NO_TOKEN
        return engram_hash.hash_windows(model, self.token_map, windows[local])

    put(runner.ModelRunner, "_engram_ids", broken)


def candidates_shifted(put: Set) -> None:
    """Later index layers choose inside the blocks that follow the kept ones."""
    select = indexer.Indexer.select

    def broken(self: Any, h: Any, qr: Any, rotary: Any, rows: Any, pool: Any, chosen: Any) -> None:
        select(self, h, qr, rotary, rows, pool, chosen)
        if self.layer.publishes_candidates:
            size = self.model.candidate_block_size
            pad = torch.nn.functional.pad
            chosen.candidates = [pad(mask, (size, 0))[..., : mask.shape[-1]] for mask in chosen.candidates]

    put(indexer.Indexer, "select", broken)


class _WithPads(RowGather):
    """Takes as many gathered rows as there are from the front, pads in between included, but returns them as if there
    had been no pads: rows behind a pad get what the experts made of it or of the rows before."""

    def without_pads(self, x: Tensor) -> Tensor:
        return x[: self.total] if self.label == "experts" else super().without_pads(x)


def pads_routed(put: Set) -> None:
    """The padding rows of ranks with fewer rows are routed, and shift the rows behind them."""
    put(batch, "RowGather", _WithPads)


FAULTS: dict[str, Callable[[Set], None]] = {
    f.__name__: f for f in (pairs_unlinked, pairs_at_borders, short_halo, engram_reset, candidates_shifted, pads_routed)
}


def install(name: str, put: Set = setattr) -> None:
    """Breaks the engine of this process. Raises KeyError for an unknown name."""
    FAULTS[name](put)


def __getattr__(name: str) -> Any:
    """`broken_NAME`: a runner factory that installs the fault in its worker first."""
    fault = name.removeprefix("broken_")
    if fault == name or fault not in FAULTS:
        raise AttributeError(f"training.faults has no {name}")

    def build(*args: Any) -> runner.ModelRunner:
        install(fault)
        return runner.ModelRunner(*args)

    return build
