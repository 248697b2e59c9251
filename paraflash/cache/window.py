"""Sliding windows: which keys the rows of a rank read, which rows cross ranks for it, and what stays for later steps.

A request's window lives in a ring of W slots (position p at slot * W + p % W), replicated over PCP ranks. In a step
the keys of a layer are three runs of rows, and every index below points into their concatenation:

    [ prior: ring rows of positions before this step | local: this rank's rows | halo: rows sent by all ranks ]

A chunk's queries reach back at most W-1 rows, so each rank sends only the last W-1 rows of each of its segments; that
gives every rank the predecessors of its chunks and the trailing window of every request. Pure numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paraflash.parallel.plan import Segment, own_part

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """A request's share of a step: rows at positions [start, end). One per request, in step order."""

    slot: int
    start: int
    end: int
    is_prefill: bool
    window_start: int  # first position whose window latent may be read
    write_start: int  # compressed entries of earlier tokens exist already
    block_ids: Ints

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class WindowPlan:
    """Indices of one rank for one step; see the module's picture for the key rows they point into."""

    prior_slots: Ints  # [n] ring slots to read
    send_rows: Ints  # [s] local rows to send
    send_counts: tuple[int, ...]  # rows that each rank sends
    table: Ints  # [n] key rows by position, -1 where there is none; the window of query t begins at row_start[t]
    row_start: Ints  # [T]
    window: int
    tail_rows: Ints  # [m] key rows, counted from the first local row, that stay in the ring
    tail_slots: Ints  # [m] ring slots they go to

    @property
    def index(self) -> Ints:
        """[T, W] key row of each query's window, -1 where there is none."""
        found: Ints = self.table[self.row_start[:, None] + np.arange(self.window)]
        return found


def tail_of(segment: Segment, window: int) -> int:
    """First position of a segment that other ranks may need."""
    return max(segment.start, segment.end - (window - 1))


def plan_window(
    spans: Sequence[Span],
    queries: Sequence[Segment],
    sources: Sequence[Sequence[Segment]],
    rank: int,
    window: int,
    send_from: Callable[[Segment], int] | None = None,
) -> WindowPlan:
    """Indices for the query segments of `rank`, whose step's keys are produced by `sources` (segments of all ranks).

    `send_from` gives the first position of a segment that is sent; by default its last W-1 rows are. `queries` are
    usually sources[rank]; they differ where rows are re-partitioned between producing keys and attending.
    """
    reach = window - 1
    first_sent = send_from or (lambda segment: tail_of(segment, window))
    local_rows = sum(s.length for s in sources[rank])

    # Key row (from the first local row) of every position of the step that this rank can see; -1 elsewhere.
    source_rows = [np.full(span.length, -1, dtype=np.int64) for span in spans]
    send_counts, send_rows, row = [], [], local_rows
    for number, segments in enumerate(sources):
        count = 0
        for segment in segments if len(sources) > 1 else ():
            first = min(max(segment.start, first_sent(segment)), segment.end)
            size = segment.end - first
            start = spans[segment.request].start
            source_rows[segment.request][first - start : segment.end - start] = np.arange(row, row + size)
            if number == rank:
                send_rows.append(segment.local_row + np.arange(first - segment.start, segment.length))
            row += size
            count += size
        send_counts.append(count)
    for segment in sources[rank]:
        start = spans[segment.request].start
        source_rows[segment.request][segment.start - start : segment.end - start] = segment.local_row + np.arange(
            segment.length
        )

    prior_first = {}  # request -> (first prior position, key row of it)
    prior_slots: list[Ints] = []
    prior_count = 0
    for segment in queries:
        span = spans[segment.request]
        first = max(span.window_start, span.start - reach, 0)
        if segment.request in prior_first or first >= span.start or segment.start - reach >= span.start:
            continue
        prior_first[segment.request] = (first, prior_count)
        prior_slots.append(span.slot * window + np.arange(first, span.start) % window)
        prior_count += span.start - first

    # Key row of every position that a query may look at, request after request: a query's window is a slice of it.
    tables, row_start, size = [], [], 0
    offset: dict[int, int] = {}
    for segment in queries:
        span = spans[segment.request]
        if segment.request not in offset:
            first, base = prior_first.get(segment.request, (span.start, 0))
            position = np.arange(span.start - reach, span.end)
            prior = np.where(position[:reach] >= first, base + position[:reach] - first, -1)
            own = source_rows[segment.request]
            table = np.concatenate([prior, np.where(own >= 0, prior_count + own, -1)])
            table[position < max(span.window_start, 0)] = -1
            offset[segment.request] = size
            tables.append(table)
            size += len(table)
        row_start.append(offset[segment.request] + np.arange(segment.start, segment.end) - span.start)

    tails = [np.arange(max(s.start, s.end - reach), s.end) for s in spans]
    tail_rows = [source_rows[i][tail - spans[i].start] for i, tail in enumerate(tails)]
    tail_slots = [spans[i].slot * window + tail % window for i, tail in enumerate(tails)]
    return WindowPlan(
        concat(prior_slots),
        concat(send_rows),
        tuple(send_counts),
        concat(tables),
        concat(row_start),
        window,
        concat(tail_rows),
        concat(tail_slots),
    )


@dataclass(frozen=True)
class DecodeRows:
    """A step that has one row of each request, row i of the step on rank i % P, as `make_plan` deals them out.

    Arrays [n] are rank-major, as rows are gathered: rank 0's rows 0, P, 2P.., then rank 1's.
    """

    counts: tuple[int, ...]  # rows of each rank
    rank: int
    request: Ints  # index into the step
    slot: Ints
    position: Ints
    window_start: Ints  # as in `Span`
    write_start: Ints
    block: Ints  # block of the row's position

    @property
    def own(self) -> slice:
        """Which of all rows are this rank's."""
        return own_part(self.counts, self.rank)

    @property
    def place(self) -> Ints:
        """Where each row lies in [ local | sent by all ranks ]."""
        row, own = np.arange(len(self.slot)), self.own
        return np.where((row >= own.start) & (row < own.stop), row - own.start, self.counts[self.rank] + row)


def plan_decode_window(rows: DecodeRows, window: int) -> WindowPlan:
    """As `plan_window` where each request has one row, but with shapes that do not depend on positions: all W-1 ring
    rows before a row are among the keys, also where the window does not reach so far."""
    reach, own, n = window - 1, rows.own, rows.counts[rows.rank]
    ring = rows.slot * window
    local = np.arange(n)
    prior = rows.position[own, None] - reach + np.arange(reach)
    table = np.empty((n, window), np.int64)
    table[:, :reach] = np.where(prior < rows.window_start[own, None], -1, np.arange(n * reach).reshape(n, reach))
    table[:, reach] = n * reach + local
    stays = len(rows.slot) if reach else 0  # a window of one token leaves nothing
    sends = len(rows.counts) > 1 and reach > 0
    return WindowPlan(
        prior_slots=(ring[own, None] + prior % window).reshape(-1),
        send_rows=local if sends else local[:0],
        send_counts=rows.counts if sends else tuple(0 for _ in rows.counts),
        table=table.reshape(-1),
        row_start=local * window,
        window=window,
        tail_rows=rows.place[:stays],
        tail_slots=(ring + rows.position % window)[:stays],
    )


def concat(parts: Sequence[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *parts])
