"""Which rank closes which compressed entry, and where the two tokens of a ratio-2 group come from.

Entry e of a request stands for tokens r*e .. r*e+r-1 and is made by the rank that runs its last token. At ratio 2 the
first token of a pair is one of three: a local row, the last row of another rank's segment (sent as a *boundary* row),
or the *open row* kept from an earlier step. As in the window plan the indices point into one run of rows:

    [ open: rows kept from earlier steps | local: this rank's rows | boundary: rows sent by all ranks ]

Example, tokens 5..8 of one request after 5 computed ones, P=2, chunks 5 6 | 7 8: token 5 is odd and pairs with open
row 4; token 7 is the first row of rank 1 and pairs with boundary row 6; token 8 is even and becomes the open row.
Pure numpy, model.md 3.7 and docs/pcp.md "Ratio-2 pairs".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paraflash.cache.window import DecodeRows, Span, concat
from paraflash.parallel.plan import Segment

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PairPlan:
    """Ratio-2 linkage of one rank for one step."""

    open_slots: Ints  # [n] slots whose open row is read
    send_rows: Ints  # [s] local rows sent as boundary rows
    send_counts: tuple[int, ...]  # per rank
    first: Ints  # [G] row of the even token of each local entry
    second: Ints  # [G] row of the odd token
    keep_rows: Ints  # [m] rows that become open rows, counted from the first local row
    keep_slots: Ints  # [m] their slots


@dataclass(frozen=True)
class EntryPlan:
    """Entries that this step closes, for one compress ratio."""

    counts: tuple[int, ...]  # entries per rank
    rows: Ints  # [G] local row of the last token of each local entry
    entries: Ints  # [G] entry number of each local entry
    slots: Ints  # [sum(counts)] pool slots of all ranks' entries, rank-major
    pairs: PairPlan | None  # ratio 2 only


def closed_entries(segment: Segment, span: Span, ratio: int) -> Ints:
    """Entries whose last token lies in the segment and that are to be written."""
    # Entry e closes at token r*e + r - 1 >= start  <=>  e >= start // r, for r = 1 and 2 alike.
    return np.arange(max(segment.start, span.write_start) // ratio, segment.end // ratio, dtype=np.int64)


def entry_slots(span: Span, entries: Ints, per_block: int) -> Ints:
    """Pool slots of a request's entries."""
    return span.block_ids[entries // per_block] * per_block + entries % per_block


def plan_entries(
    spans: Sequence[Span], sources: Sequence[Sequence[Segment]], rank: int, ratio: int, block_size: int
) -> EntryPlan:
    """Entries closed by this step and, at ratio 2, their linkage on `rank`."""
    per_block = block_size // ratio
    counts, slots = [], []
    for segments in sources:
        closed = [(spans[s.request], closed_entries(s, spans[s.request], ratio)) for s in segments]
        counts.append(sum(len(e) for _, e in closed))
        slots += [entry_slots(span, e, per_block) for span, e in closed]
    mine = [(s, closed_entries(s, spans[s.request], ratio)) for s in sources[rank]]
    last = [s.local_row + ratio * e + ratio - 1 - s.start for s, e in mine]
    return EntryPlan(
        counts=tuple(counts),
        rows=concat(last),
        entries=concat([e for _, e in mine]),
        slots=concat(slots),
        pairs=_plan_pairs(spans, sources, rank) if ratio == 2 else None,
    )


def _plan_pairs(spans: Sequence[Span], sources: Sequence[Sequence[Segment]], rank: int) -> PairPlan:
    local_rows = sum(s.length for s in sources[rank])
    # Boundary rows: the last row of a segment where it is the first token of a pair. With one rank only local rows
    # are linked; the open row at a request's end is then a local row too.
    counts: list[int] = []
    boundary: dict[tuple[int, int], int] = {}  # (request, position) -> row counted from the first local row
    row = local_rows
    for segments in sources if len(sources) > 1 else ():
        sent = [s for s in segments if s.end % 2 == 1]
        counts.append(len(sent))
        for s in sent:
            boundary[s.request, s.end - 1] = row
            row += 1
    send = [s.local_row + s.length - 1 for s in sources[rank] if len(sources) > 1 and s.end % 2 == 1]

    first, second = [], []
    open_slots: list[int] = []
    for s in sources[rank]:
        span = spans[s.request]
        entries = closed_entries(s, span, 2)
        odd = s.local_row + 2 * entries + 1 - s.start
        even = odd - 1
        if len(entries) and 2 * entries[0] < s.start:  # the pair's first token is not in this segment
            position = int(2 * entries[0])
            if position < span.start:
                even[0] = -1 - len(open_slots)  # marked; open rows come before the local ones
                open_slots.append(span.slot)
            else:
                even[0] = boundary[s.request, position]
        first.append(even)
        second.append(odd)

    keep_rows, keep_slots = [], []
    own = {(s.request, s.end - 1): s.local_row + s.length - 1 for s in sources[rank]}
    for request, span in enumerate(spans):
        if span.end % 2 == 1 and span.length:
            key = (request, span.end - 1)
            keep_rows.append(own.get(key, boundary.get(key, -1)))
            keep_slots.append(span.slot)
    n = len(open_slots)
    even_rows = concat(first)
    return PairPlan(
        open_slots=np.array(open_slots, np.int64),
        send_rows=np.array(send, np.int64),
        send_counts=tuple(counts) or (0,),
        first=np.where(even_rows < 0, -1 - even_rows, even_rows + n),
        second=concat(second) + n,
        keep_rows=np.array(keep_rows, np.int64),
        keep_slots=np.array(keep_slots, np.int64),
    )


def plan_decode_entries(rows: DecodeRows, ratio: int, block_size: int, spare_slot: int) -> EntryPlan:
    """As `plan_entries` where each request has one row, but with shapes that do not depend on positions.

    Every row makes an entry; one that is not to be written goes to block 0. At ratio 2 every row also reads an open row
    and leaves one. An odd position needs the first: what it leaves goes to `spare_slot`. An even one needs the second:
    its entry, of its own row twice, goes to block 0.
    """
    own, n, position, slot = rows.own, rows.counts[rows.rank], rows.position, rows.slot
    local = np.arange(n)
    entry, per_block = position // ratio, block_size // ratio
    slots = np.where(position >= rows.write_start, rows.block * per_block + entry % per_block, 0)
    if ratio == 1:
        return EntryPlan(rows.counts, local, entry[own], slots, None)
    odd, sends = position % 2 == 1, len(rows.counts) > 1
    pairs = PairPlan(
        open_slots=np.where(odd, slot, spare_slot)[own],
        send_rows=local if sends else local[:0],
        send_counts=rows.counts if sends else (0,),
        first=np.where(odd[own], local, n + local),
        second=n + local,
        keep_rows=rows.place,
        keep_slots=np.where(odd, spare_slot, slot),
    )
    return EntryPlan(rows.counts, local, entry[own], np.where(odd, slots, 0), pairs)
