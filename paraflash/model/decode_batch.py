"""Steps that decode one row of each request: a rank's view of them straight from arrays, without a loop over requests.

All shapes follow from the number of rows, so that recorded passes fit steps of any positions. What is there for their
sake goes to a spare slot, which belongs to no request, and to the null block. `batch.py` has all other steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from paraflash.cache.window import DecodeRows, plan_decode_window
from paraflash.config.model import ModelConfig
from paraflash.kernels.sizes import power_of_2
from paraflash.model.batch import LocalBatch, device_entries, device_windows, index_rows, tensor
from paraflash.model.linkage import plan_decode_entries
from paraflash.parallel.exchange import Outbox, RowGather
from paraflash.parallel.mesh import Mesh

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class DecodeStep:
    """Arrays [n] in the order of the step, rows without a request behind the others."""

    slot: Ints
    position: Ints
    window_start: Ints
    write_start: Ints
    tables: Ints  # [n, blocks] block tables, the null block behind each


@lru_cache(maxsize=512)
def dealt(rows: int, ranks: int) -> tuple[tuple[int, ...], Ints]:
    """How many of a step's rows each rank has, and which, rank after rank; the array is not to be written to."""
    order = np.concatenate([np.arange(rank, rows, ranks) for rank in range(ranks)])
    return tuple(len(range(rank, rows, ranks)) for rank in range(ranks)), order


@lru_cache(maxsize=512)
def _runs(rows: int, ranks: int, rank: int) -> tuple[tuple[int, int, int], ...]:
    return tuple((i, i + 1, request) for i, request in enumerate(range(rank, rows, ranks)))


def block_tables(flat: NDArray[np.int32], lengths: Ints, rows: int, needed: int) -> Ints:
    """Block tables [rows, blocks] of lengths[i] blocks each from one array of all. Of each at least the first `needed`
    are there: the width grows in powers of two, so that a context of steadily growing length has few shapes."""
    width = power_of_2(max(1, needed))
    tables = np.zeros((rows, max(width, int(lengths.max(initial=0)))), np.int64)
    tables[: len(lengths)][np.arange(tables.shape[1]) < lengths[:, None]] = flat
    return tables[:, :width]


def decode_rows(step: DecodeStep, block_size: int, ranks: int, rank: int) -> DecodeRows:
    counts, order = dealt(len(step.slot), ranks)
    position = step.position[order]
    return DecodeRows(
        counts=counts,
        rank=rank,
        request=order,
        slot=step.slot[order],
        position=position,
        window_start=step.window_start[order],
        write_start=step.write_start[order],
        block=step.tables[order, position // block_size],
    )


def build_decode_batch(
    step: DecodeStep, model: ModelConfig, mesh: Mesh, block_size: int, spare_slot: int
) -> LocalBatch:
    """The rank's view of the step, on the host."""
    rank, ranks = mesh.pcp.rank, mesh.pcp.size
    rows = decode_rows(step, block_size, ranks, rank)
    own, counts = rows.own, rows.counts
    ratios = sorted({layer.ratio for layer in model.layers} - {0})
    seen_until = np.zeros((ranks, len(rows.slot)), np.int64)
    seen_until[np.repeat(np.arange(ranks), counts), rows.request] = rows.position + 1
    return LocalBatch(
        model=model,
        plan=None,
        positions=tensor(rows.position[own]),
        windows=device_windows(plan_decode_window(rows, model.window), mesh),
        entries={
            r: device_entries(plan_decode_entries(rows, r, block_size, spare_slot), r, model, mesh) for r in ratios
        },
        index_rows=index_rows(
            _runs(len(rows.slot), ranks, rank), rows.position[own], rows.request[own], step.tables, seen_until, rank,
            ratios, block_size, model.index_topk,
        ),
        all_rows=RowGather(mesh.pcp, counts, "experts"),
        outbox=Outbox() if ranks > 1 else None,
    )  # fmt: skip
