"""One rank's view of one step, as a value: positions, rotary tables, index plans and the exchanges that they need.

Built once per step from the step's requests and the partition plan; the layers only read it. With bounded replay a
step has two of these: all rows, and the trailing rows that go through the decoder layers (model.md 5.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paraflash.cache.window import Span, WindowPlan, plan_window
from paraflash.config.model import ModelConfig
from paraflash.kernels.interface import IndexRows, Rotary
from paraflash.model.linkage import EntryPlan, plan_entries
from paraflash.model.rope import rotary
from paraflash.parallel.exchange import Outbox, RowGather
from paraflash.parallel.mesh import Mesh
from paraflash.parallel.plan import Plan, Segment, make_plan, pick_rows


@dataclass
class Windows:
    """Device form of a WindowPlan."""

    prior_slots: Tensor
    send_rows: Tensor
    gather: RowGather
    index: Tensor
    tail_rows: Tensor
    tail_slots: Tensor


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

    rows: Tensor
    rotary: Rotary
    gather: RowGather
    slots: Tensor
    own_slots: Tensor  # the part of `slots` that this rank fills
    pairs: Pairs | None


@dataclass
class LocalBatch:
    """Rows of one rank. T may be 0; every gather is still entered by all ranks."""

    plan: Plan
    rows: int
    window_rotary: Rotary  # layers of ratio 0
    compress_rotary: Rotary  # layers of ratio 1 and 2
    windows: Windows
    entries: dict[int, Entries]  # by ratio
    index_rows: dict[int, IndexRows]  # by ratio
    all_rows: RowGather  # every row of the step: the MoE, and the common shape of sums over TP
    outbox: Outbox | None  # for rows that no other rank reads in this step; None: a layer exchanges them at once


@dataclass
class Trailing:
    """The second half of a step with bounded replay."""

    batch: LocalBatch
    windows: Windows  # of the layer that produces keys for all rows but attends with the trailing ones
    send_rows: Tensor  # local rows (of all rows) that are kept
    gather: RowGather
    take: Tensor  # rows of the gathered ones that this rank goes on with


def to_device(x: np.ndarray, device: torch.device) -> Tensor:
    host = torch.from_numpy(np.ascontiguousarray(x))
    if device.type == "cuda":
        host = host.pin_memory()  # a copy from other memory waits for all that the GPU still has to do
    return host.to(device, non_blocking=True)


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
    spans: Sequence[Span], plan: Plan, model: ModelConfig, mesh: Mesh, block_size: int, owns_kv: bool = True
) -> LocalBatch:
    """The rank's view of rows `spans` partitioned by `plan`; without `owns_kv` for layers that make no entries."""
    device, rank = mesh.device, mesh.pcp.rank
    position = positions_of(plan.segments[rank])
    window = plan_window(spans, plan.segments[rank], plan.segments, rank, model.window)
    ratios = sorted({layer.ratio for layer in model.layers} - {0})
    on_device = to_device(position, device)
    return LocalBatch(
        plan=plan,
        rows=len(position),
        window_rotary=rotary(on_device, model.window_rope, model.rope_dim),
        compress_rotary=rotary(on_device, model.compress_rope, model.rope_dim),
        windows=_windows(window, mesh),
        entries={
            r: _entries(plan_entries(spans, plan.segments, rank, r, block_size), r, model, mesh)
            for r in (ratios if owns_kv else ())
        },
        index_rows=_index_rows(spans, plan.segments[rank], position, ratios, block_size, device),
        all_rows=RowGather(mesh.pcp, [len(r) for r in plan.rows], "experts", device),
        outbox=Outbox() if mesh.pcp.size > 1 and plan.keeps_requests_whole else None,
    )


def _windows(plan: WindowPlan, mesh: Mesh) -> Windows:
    d = mesh.device
    return Windows(
        prior_slots=to_device(plan.prior_slots, d),
        send_rows=to_device(plan.send_rows, d),
        gather=RowGather(mesh.pcp, plan.send_counts, "window", d),
        index=to_device(plan.table, d)[to_device(plan.row_start, d)[:, None] + torch.arange(plan.window, device=d)],
        tail_rows=to_device(plan.tail_rows, d),
        tail_slots=to_device(plan.tail_slots, d),
    )


def _entries(plan: EntryPlan, ratio: int, model: ModelConfig, mesh: Mesh) -> Entries:
    d = mesh.device
    pairs = None
    if plan.pairs is not None:
        p = plan.pairs
        pairs = Pairs(
            open_slots=to_device(p.open_slots, d),
            send_rows=to_device(p.send_rows, d),
            gather=RowGather(mesh.pcp, p.send_counts, "boundary", d),
            first=to_device(p.first, d),
            second=to_device(p.second, d),
            keep_rows=to_device(p.keep_rows, d),
            keep_slots=to_device(p.keep_slots, d),
        )
    return Entries(
        rows=to_device(plan.rows, d),
        rotary=rotary(to_device(plan.entries * ratio, d), model.compress_rope, model.rope_dim),
        gather=RowGather(mesh.pcp, plan.counts, "entries", d),
        slots=to_device(plan.slots, d),
        own_slots=to_device(plan.slots[sum(plan.counts[: mesh.pcp.rank]) :][: len(plan.rows)], d),
        pairs=pairs,
    )


def _index_rows(
    spans: Sequence[Span],
    segments: Sequence[Segment],
    position: np.ndarray,
    ratios: Sequence[int],
    block_size: int,
    device: torch.device,
) -> dict[int, IndexRows]:
    """By ratio; what does not depend on it is shared."""
    runs: list[tuple[int, int, int]] = []
    for s in segments:
        first, end = s.local_row, s.local_row + s.length
        if runs and runs[-1][2] == s.request and runs[-1][1] == first:
            runs[-1] = (runs[-1][0], end, s.request)
        else:
            runs.append((first, end, s.request))
    tables = np.zeros((len(spans), max([1, *(len(s.block_ids) for s in spans)])), np.int64)
    for i, span in enumerate(spans):
        tables[i, : len(span.block_ids)] = span.block_ids
    request = np.repeat([s.request for s in segments], [s.length for s in segments]) if segments else np.zeros(0)
    row_request, block_tables = to_device(request.astype(np.int64), device), to_device(tables, device)
    visible = {ratio: (position + 1) // ratio for ratio in ratios}
    return {
        ratio: IndexRows(
            segments=runs,
            visible=to_device(visible[ratio], device),
            visible_host=visible[ratio],
            row_request=row_request,
            block_tables=block_tables,
            entries=block_size // ratio,
        )
        for ratio in ratios
    }


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
    device, rank, world = mesh.device, mesh.pcp.rank, mesh.pcp.size
    tail_spans = trailing_spans(spans, kept, model.window)
    plan = plan_of(tail_spans, world)
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
        windows=_windows(window, mesh),
        send_rows=to_device(send, device),
        gather=RowGather(mesh.pcp, counts, "trailing", device),
        take=to_device(np.array(take, np.int64), device),
    )


def rope_of(batch: LocalBatch, ratio: int) -> Rotary:
    return batch.compress_rotary if ratio else batch.window_rotary
