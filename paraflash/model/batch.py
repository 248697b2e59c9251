"""One rank's view of one step, as a value: positions, rotary tables, index plans and the exchanges that they need.

Built once per step from the step's requests and the partition plan, with tensors on the host (inputs.py takes them to
the device together); the layers only read it. With bounded replay a step has two of these: all rows, and the trailing
rows that go through the decoder layers (model.md 5.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from paraflash.cache.window import Span, WindowPlan, plan_window
from paraflash.config.model import ModelConfig
from paraflash.kernels.interface import HOST_ONLY, IndexRows, Rotary
from paraflash.kernels.sizes import power_of_2
from paraflash.model.linkage import EntryPlan, plan_entries
from paraflash.model.rope import rotary
from paraflash.parallel.exchange import Outbox, RowGather
from paraflash.parallel.mesh import Mesh
from paraflash.parallel.plan import Plan, Segment, make_plan, own_part, pick_rows


@dataclass
class Windows:
    """Device form of a WindowPlan."""

    prior_slots: Tensor
    send_rows: Tensor
    gather: RowGather
    table: Tensor
    row_start: Tensor
    window: int
    tail_rows: Tensor
    tail_slots: Tensor

    @cached_property
    def index(self) -> Tensor:
        """[T, W] key row of each query's window, -1 where there is none."""
        return self.table[self.row_start[:, None] + torch.arange(self.window, device=self.table.device)]


@dataclass
class Pairs:
    """Device form of a PairPlan."""

    open_slots: Tensor
    send_rows: Tensor
    gather: RowGather
    first: Tensor
    second: Tensor
    keep_rows: Tensor
    keep_slots: Tensor


@dataclass
class Entries:
    """Device form of an EntryPlan: where the entries of this step come from and where they are stored."""

    model: ModelConfig = field(metadata=HOST_ONLY)
    rows: Tensor
    positions: Tensor  # of each entry's first token
    gather: RowGather
    slots: Tensor
    own_slots: Tensor  # the part of `slots` that this rank fills
    pairs: Pairs | None

    @cached_property
    def rotary(self) -> Rotary:
        return rotary(self.positions, self.model.compress_rope, self.model.rope_dim)


@dataclass
class LocalBatch:
    """Rows of one rank. T may be 0; every gather is still entered by all ranks.

    Tensors that follow from others are made where they are first used, which is inside of a recorded forward pass.
    """

    model: ModelConfig = field(metadata=HOST_ONLY)
    plan: Plan | None = field(metadata=HOST_ONLY)  # None: a step of `DecodeRows`
    positions: Tensor  # [T]
    windows: Windows
    entries: dict[int, Entries]  # by ratio
    index_rows: dict[int, IndexRows]  # by ratio
    all_rows: RowGather  # every row of the step: the MoE, and the common shape of sums over TP
    outbox: Outbox | None  # for rows that no other rank reads in this step; None: a layer exchanges them at once

    @cached_property
    def window_rotary(self) -> Rotary:
        """Of layers of ratio 0."""
        return rotary(self.positions, self.model.window_rope, self.model.rope_dim)

    @cached_property
    def compress_rotary(self) -> Rotary:
        """Of layers of ratio 1 and 2."""
        return rotary(self.positions, self.model.compress_rope, self.model.rope_dim)


@dataclass
class Trailing:
    """The second half of a step with bounded replay."""

    batch: LocalBatch
    windows: Windows  # of the layer that produces keys for all rows but attends with the trailing ones
    send_rows: Tensor  # local rows (of all rows) that are kept
    gather: RowGather
    take: Tensor  # rows of the gathered ones that this rank goes on with


def plan_of(spans: Sequence[Span], world: int) -> Plan:
    return make_plan(
        np.array([s.length for s in spans], np.int64),
        np.array([s.start for s in spans], np.int64),
        np.array([s.is_prefill for s in spans], bool),
        world,
    )


def positions_of(segments: Sequence[Segment]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(s.start, s.end) for s in segments)])


def build_batch(
    spans: Sequence[Span],
    plan: Plan,
    model: ModelConfig,
    mesh: Mesh,
    block_size: int,
    owns_kv: bool = True,
) -> LocalBatch:
    """The rank's view of rows `spans` partitioned by `plan`, on the host; without `owns_kv` for layers that make no
    entries."""
    rank, sources = mesh.pcp.rank, plan.segments
    position = positions_of(sources[rank])
    ratios = sorted({layer.ratio for layer in model.layers} - {0})
    owned = ratios if owns_kv else []
    window = plan_window(spans, sources[rank], sources, rank, model.window)
    entries = {r: plan_entries(spans, sources, rank, r, block_size) for r in owned}
    return LocalBatch(
        model=model,
        plan=plan,
        positions=tensor(position),
        windows=device_windows(window, mesh),
        entries={r: device_entries(plan, r, model, mesh) for r, plan in entries.items()},
        index_rows=_index_rows(spans, sources, rank, position, ratios, block_size, model.index_topk),
        all_rows=RowGather(mesh.pcp, [len(r) for r in plan.rows], "experts"),
        outbox=Outbox() if mesh.pcp.size > 1 and plan.keeps_requests_whole else None,
    )


def tensor(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def device_windows(plan: WindowPlan, mesh: Mesh) -> Windows:
    return Windows(
        prior_slots=tensor(plan.prior_slots),
        send_rows=tensor(plan.send_rows),
        gather=RowGather(mesh.pcp, plan.send_counts, "window"),
        table=tensor(plan.table),
        row_start=tensor(plan.row_start),
        window=plan.window,
        tail_rows=tensor(plan.tail_rows),
        tail_slots=tensor(plan.tail_slots),
    )


def device_entries(plan: EntryPlan, ratio: int, model: ModelConfig, mesh: Mesh) -> Entries:
    pairs = None
    if plan.pairs is not None:
        p = plan.pairs
        pairs = Pairs(
            open_slots=tensor(p.open_slots),
            send_rows=tensor(p.send_rows),
            gather=RowGather(mesh.pcp, p.send_counts, "boundary"),
            first=tensor(p.first),
            second=tensor(p.second),
            keep_rows=tensor(p.keep_rows),
            keep_slots=tensor(p.keep_slots),
        )
    return Entries(
        model=model,
        rows=tensor(plan.rows),
        positions=tensor(plan.entries * ratio),
        gather=RowGather(mesh.pcp, plan.counts, "entries"),
        slots=tensor(plan.slots),
        own_slots=tensor(plan.slots[own_part(plan.counts, mesh.pcp.rank)]),
        pairs=pairs,
    )


def _index_rows(
    spans: Sequence[Span],
    sources: Sequence[Sequence[Segment]],
    rank: int,
    position: np.ndarray,
    ratios: Sequence[int],
    block_size: int,
    topk: int,
) -> dict[int, IndexRows]:
    """By ratio; what does not depend on it is shared. The bounds are those of all ranks' rows, equal on every rank."""
    segments = sources[rank]
    runs: list[tuple[int, int, int]] = []
    for s in segments:
        first, end = s.local_row, s.local_row + s.length
        if runs and runs[-1][2] == s.request and runs[-1][1] == first:
            runs[-1] = (runs[-1][0], end, s.request)
        else:
            runs.append((first, end, s.request))
    # Sizes grow in powers of two, so that a context of steadily growing length has few shapes.
    blocks = power_of_2(max([1, *(-(-s.end // block_size) for s in spans)]))
    tables = np.zeros((len(spans), blocks), np.int64)
    for i, span in enumerate(spans):
        used = span.block_ids[:blocks]
        tables[i, : len(used)] = used
    seen_until = np.zeros((len(sources), len(spans)), np.int64)  # positions of a request that a rank's rows may see
    for s in (s for of_rank in sources for s in of_rank):
        seen_until[s.rank, s.request] = max(seen_until[s.rank, s.request], s.end)
    request = np.repeat([s.request for s in segments], [s.length for s in segments]) if segments else np.zeros(0)
    return index_rows(
        tuple(runs), position, request.astype(np.int64), tables, seen_until, rank, ratios, block_size, topk
    )


def index_rows(
    runs: tuple[tuple[int, int, int], ...],
    position: np.ndarray,
    request: np.ndarray,
    tables: np.ndarray,
    seen_until: np.ndarray,
    rank: int,
    ratios: Sequence[int],
    block_size: int,
    topk: int,
) -> dict[int, IndexRows]:
    """By ratio. runs, position [T] and request [T] of this rank's rows; block tables [requests, blocks]; seen_until
    [ranks, requests]: positions of a request that a rank's rows may see."""
    row_request, block_tables, blocks = tensor(request), tensor(tables), tables.shape[1]

    def of_ratio(ratio: int) -> IndexRows:
        visible, every, entries = (position + 1) // ratio, seen_until // ratio, block_size // ratio
        counts = every[rank]
        width = topk if every.max(initial=0) <= topk else blocks * entries
        return IndexRows(
            segments=runs,
            visible=tensor(visible),
            visible_host=visible,
            row_request=row_request,
            block_tables=block_tables,
            entries=entries,
            counts=tensor(counts),
            starts=tensor(np.cumsum(counts) - counts),
            width=width,
            total=power_of_2(max(width, int(every.sum(1).max()))),
        )

    return {ratio: of_ratio(ratio) for ratio in ratios}


def trailing_spans(spans: Sequence[Span], kept: Sequence[int], window: int) -> list[Span]:
    """Spans of the rows that go through the decoder layers: the last kept[i] rows of each request.

    Where rows were dropped the decoder's windows start with the trailing window (model.md 5.2).
    """
    return [
        s if k == s.length else replace(s, start=s.end - k, window_start=max(s.window_start, s.end - window))
        for s, k in zip(spans, kept, strict=True)
    ]


def build_trailing(
    spans: Sequence[Span], kept: Sequence[int], batch: LocalBatch, model: ModelConfig, mesh: Mesh, block_size: int
) -> Trailing:
    """The trailing rows re-partitioned over the ranks, so that no rank idles and none holds them all."""
    rank, world = mesh.pcp.rank, mesh.pcp.size
    tail_spans = trailing_spans(spans, kept, model.window)
    plan = plan_of(tail_spans, world)
    assert batch.plan is not None
    first_kept = [s.start for s in tail_spans]
    reach = model.window - 1
    # The producing layer's own windows reach behind the first trailing row and keep the batch's own bound.
    window = plan_window(
        spans, plan.segments[rank], batch.plan.segments, rank, model.window, lambda s: first_kept[s.request] - reach
    )

    kept_rows = {(i, p) for i, s in enumerate(tail_spans) for p in range(s.start, s.end)}
    keys, counts, send = pick_rows(batch.plan, kept_rows, rank)
    place = {key: row for row, key in enumerate(keys)}
    take = [place[s.request, p] for s in plan.segments[rank] for p in range(s.start, s.end)]
    return Trailing(
        batch=build_batch(tail_spans, plan, model, mesh, block_size, owns_kv=False),
        windows=device_windows(window, mesh),
        send_rows=tensor(send),
        gather=RowGather(mesh.pcp, counts, "trailing"),
        take=tensor(np.array(take, np.int64)),
    )


def rope_of(batch: LocalBatch, ratio: int) -> Rotary:
    return batch.compress_rotary if ratio else batch.window_rotary
