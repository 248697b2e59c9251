"""The PCP partition: which rank runs which query rows of a step. Pure numpy, the same result on every rank.

A step's *global rows* are the query rows of all its requests in order. Prefill rows of a request are cut into 2P
chunks and rank r takes chunks r and 2P-1-r (zigzag), so the part of the work that grows with position is balanced;
a decode row goes whole to one rank. Example, one prompt of 10 tokens at P=2 (4 chunks of 2,2,3,3 rows):

    global rows   0 1 | 2 3 | 4 5 6 | 7 8 9
    rank          0     1     1       0
    rank 0 local  0 1 7 8 9        rank 1 local  2 3 4 5 6

`rows[r]` lists rank r's global rows in local order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Piece = tuple[bool, int, int, int]  # prefill, request, offset of its first row in the request's rows, length


@dataclass(frozen=True)
class Segment:
    """A run of consecutive positions of one request on one rank."""

    request: int  # index into the step's requests
    rank: int
    start: int  # first absolute position
    length: int
    global_row: int  # first row in global order
    local_row: int  # first row in the rank's local order

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Plan:
    """The partition of one step over the ranks."""

    segments: tuple[tuple[Segment, ...], ...]  # per rank, in local order; never empty runs
    rows: tuple[Ints, ...]  # per rank: global rows in local order

    @cached_property
    def keeps_requests_whole(self) -> bool:
        """Whether every request has all its rows of the step on one rank, as decode rows are."""
        return len({(s.request, s.rank) for of_rank in self.segments for s in of_rank}) == len(
            {s.request for of_rank in self.segments for s in of_rank}
        )


def own_part(counts: Sequence[int], rank: int) -> slice:
    """Which rows of a rank-major gather are the rank's, of which each rank has so many."""
    before = sum(counts[:rank])
    return slice(before, before + counts[rank])


def _chunk_sizes(length: int, load: Ints) -> list[int]:
    """Sizes of the 2P zigzag chunks of one request; updates `load`, the rows each rank already has.

    The remainder goes one row at a time to the least loaded rank (ties: the higher rank), first to its later chunk.
    """
    world = len(load)
    base, extra = divmod(length, 2 * world)
    sizes = [base] * (2 * world)
    load += 2 * base
    given = np.zeros(world, dtype=np.int64)
    for _ in range(extra):
        rank = min((r for r in range(world) if given[r] < 2), key=lambda r: (load[r], -r))
        sizes[2 * world - 1 - rank if given[rank] == 0 else rank] += 1
        given[rank] += 1
        load[rank] += 1
    return sizes


def _merge_adjacent(pieces: list[Piece]) -> list[Piece]:
    """Joins chunks that follow each other, as the middle two of a prompt do on the last rank (and all at P=1)."""
    merged: list[Piece] = []
    for piece in pieces:
        prefill, request, offset, length = piece
        if merged and merged[-1][:2] == (prefill, request) and merged[-1][2] + merged[-1][3] == offset:
            merged[-1] = (prefill, request, merged[-1][2], merged[-1][3] + length)
        else:
            merged.append(piece)
    return merged


def make_plan(query_lens: Ints, computed_lens: Ints, is_prefill: NDArray[np.bool_], world: int) -> Plan:
    """Partitions a step over `world` ranks.

    query_lens, computed_lens, is_prefill: [requests]; request i has query rows at positions
    [computed_lens[i], computed_lens[i] + query_lens[i]). Raises ValueError for negative lengths or world < 1.
    """
    query_lens, computed_lens = np.asarray(query_lens, np.int64), np.asarray(computed_lens, np.int64)
    if world < 1 or (query_lens < 0).any() or (computed_lens < 0).any():
        raise ValueError(
            f"world is {world}, query_lens {query_lens}, computed_lens {computed_lens}; none may be negative"
        )
    first_row = np.concatenate([[0], np.cumsum(query_lens)])
    load = np.zeros(world, dtype=np.int64)
    pieces: list[list[Piece]] = [[] for _ in range(world)]
    for request in np.flatnonzero(~np.asarray(is_prefill, bool)).tolist():
        if query_lens[request]:
            rank = int(np.argmin(load))
            load[rank] += query_lens[request]
            pieces[rank].append((False, request, 0, int(query_lens[request])))
    for request in np.flatnonzero(is_prefill).tolist():
        offset = 0
        for chunk, size in enumerate(_chunk_sizes(int(query_lens[request]), load)):
            if size:
                pieces[min(chunk, 2 * world - 1 - chunk)].append((True, request, offset, size))
            offset += size

    segments, rows = [], []
    for rank in range(world):
        local, mine, index = 0, [], []
        for _, request, offset, length in _merge_adjacent(sorted(pieces[rank])):
            first = int(first_row[request]) + offset
            mine.append(Segment(request, rank, int(computed_lens[request]) + offset, length, first, local))
            index.append(np.arange(first, first + length, dtype=np.int64))
            local += length
        segments.append(tuple(mine))
        rows.append(np.concatenate(index) if index else np.zeros(0, np.int64))
    return Plan(tuple(segments), tuple(rows))


def pick_rows(plan: Plan, wanted: set[tuple[int, int]], rank: int) -> tuple[list[tuple[int, int]], list[int], Ints]:
    """The wanted (request, position) rows, rank-major; how many each rank has; the local rows of `rank` among them."""
    positions: dict[int, list[int]] = {}
    for request, position in sorted(wanted):
        positions.setdefault(request, []).append(position)
    keys: list[tuple[int, int]] = []
    counts, mine = [], []
    for number, segments in enumerate(plan.segments):
        before = len(keys)
        for s in segments:
            of_request = positions.get(s.request, [])
            found = of_request[bisect_left(of_request, s.start) : bisect_left(of_request, s.end)]
            keys += [(s.request, p) for p in found]
            if number == rank:
                mine += [s.local_row + p - s.start for p in found]
        counts.append(len(keys) - before)
    return keys, counts, np.array(mine, np.int64)
