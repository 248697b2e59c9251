"""Ratio-2 linkage and entry plans against a brute-force walk over tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paraflash.cache.window import Span
from paraflash.model.batch import plan_of
from paraflash.model.linkage import plan_decode_entries, plan_entries
from tests.decode_spans import decode_rows_of

BLOCK = 64
requests = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 150), st.booleans(), st.booleans()), min_size=1, max_size=5
)


def spans_of(batch) -> list[Span]:
    spans = []
    for slot, (length, start, prefill, replays) in enumerate(batch):
        length = length if prefill else 1
        write_start = (start + 20) // BLOCK * BLOCK if replays else 0
        blocks = 100 * (slot + 1) + np.arange(-(-(start + length) // BLOCK))
        spans.append(Span(slot, start, start + length, prefill, 0, write_start, blocks))
    return spans


def row_name(span: Span, position: int) -> tuple[int, int]:
    return (span.slot, position)


def open_row(span: Span) -> tuple[str, int]:
    return ("open", span.slot)


@settings(max_examples=400, deadline=None)
@given(requests, st.integers(1, 8))
def test_every_pair_closes_once_on_the_rank_of_its_odd_token_from_the_right_rows(batch, world):
    spans = spans_of(batch)
    plan = plan_of(spans, world)
    expected = {}  # slot in the pool -> (row of the even token, row of the odd token)
    for span in spans:
        for odd in range(span.start, span.end):
            if odd % 2 == 1 and odd >= span.write_start:
                entry = odd // 2
                slot = int(span.block_ids[entry // 32] * 32 + entry % 32)
                even = row_name(span, odd - 1) if odd - 1 >= span.start else open_row(span)
                expected[slot] = (even, row_name(span, odd))

    plans = [plan_entries(spans, plan.segments, rank, 2, BLOCK) for rank in range(world)]
    local = [
        [row_name(spans[s.request], p) for s in plan.segments[r] for p in range(s.start, s.end)] for r in range(world)
    ]
    boundary = [local[r][i] for r in range(world) for i in plans[r].pairs.send_rows]
    found, at = {}, 0
    for rank, p in enumerate(plans):
        assert p.counts == plans[0].counts and np.array_equal(p.slots, plans[0].slots)
        assert p.pairs.send_counts == plans[0].pairs.send_counts
        assert len(p.pairs.send_rows) == p.pairs.send_counts[rank] or world == 1
        linked = [("open", s) for s in p.pairs.open_slots] + local[rank] + boundary
        for first, second, last in zip(p.pairs.first, p.pairs.second, p.rows, strict=True):
            assert linked[second] == local[rank][last]
            slot = int(p.slots[at])
            assert slot not in found, "an entry is closed once"
            found[slot] = (linked[first], linked[second])
            at += 1
    assert found == expected


@settings(max_examples=300, deadline=None)
@given(requests, st.integers(1, 8))
def test_the_open_row_of_a_request_is_its_newest_token_on_every_rank(batch, world):
    spans = spans_of(batch)
    plan = plan_of(spans, world)
    local = [
        [row_name(spans[s.request], p) for s in plan.segments[r] for p in range(s.start, s.end)] for r in range(world)
    ]
    plans = [plan_entries(spans, plan.segments, rank, 2, BLOCK) for rank in range(world)]
    boundary = [local[r][i] for r in range(world) for i in plans[r].pairs.send_rows]
    expected = {span.slot: row_name(span, span.end - 1) for span in spans if span.end % 2 == 1}
    for rank, p in enumerate(plans):
        rows = local[rank] + boundary
        kept = {int(slot): rows[row] for slot, row in zip(p.pairs.keep_slots, p.pairs.keep_rows, strict=True)}
        assert (p.pairs.keep_rows >= 0).all()
        assert kept == expected


@settings(max_examples=200, deadline=None)
@given(requests, st.integers(1, 8))
def test_at_ratio_1_every_written_token_is_an_entry(batch, world):
    spans = spans_of(batch)
    plan = plan_of(spans, world)
    plans = [plan_entries(spans, plan.segments, rank, 1, BLOCK) for rank in range(world)]
    expected = sorted(
        int(s.block_ids[t // BLOCK] * BLOCK + t % BLOCK)
        for s in spans
        for t in range(max(s.start, s.write_start), s.end)
    )
    assert sorted(plans[0].slots.tolist()) == expected
    assert all(p.pairs is None and np.array_equal(p.slots, plans[0].slots) for p in plans)


def test_the_example_of_the_module():
    span = Span(slot=3, start=5, end=9, is_prefill=True, window_start=0, write_start=0, block_ids=np.array([7]))
    plan = plan_of([span], 2)
    pairs = [plan_entries([span], plan.segments, rank, 2, BLOCK).pairs for rank in range(2)]
    # 4 chunks of one token: rank 0 runs tokens 5 and 8, rank 1 runs 6 and 7.
    assert pairs[0].open_slots.tolist() == [3] and pairs[0].first.tolist() == [0] and pairs[0].second.tolist() == [1]
    assert pairs[1].first.tolist() == [0] and pairs[1].second.tolist() == [1]
    assert pairs[0].send_rows.tolist() == [1] and pairs[1].send_rows.tolist() == []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 150), st.booleans()), min_size=1, max_size=9),
    st.integers(1, 4),
    st.integers(1, 2),
)
def test_decode_rows_are_linked_alike_in_shapes_that_positions_do_not_change(batch, world, ratio):
    spans = spans_of([(1, start, False, replays) for start, replays in batch])
    plan = plan_of(spans, world)
    spare = len(spans)

    def linked(p, rows):
        """(slot of the pool, row of the even token, row of the odd one) and what stays, without what nobody needs."""
        names = [("open", int(s)) for s in p.pairs.open_slots] + rows
        first = sum(p.counts[:rank])
        slots = p.slots[first : first + p.counts[rank]].tolist()
        made = zip(slots, p.pairs.first, p.pairs.second, strict=True)
        kept = zip(p.pairs.keep_slots.tolist(), p.pairs.keep_rows, strict=True)
        return (
            {(slot, names[a], names[b]) for slot, a, b in made if slot >= BLOCK},
            {(slot, rows[row]) for slot, row in kept if slot != spare},
        )

    usual = [plan_entries(spans, plan.segments, r, ratio, BLOCK) for r in range(world)]
    found = [plan_decode_entries(decode_rows_of(spans, world, r), ratio, BLOCK, spare) for r in range(world)]
    local = [[spans[s.request].slot for s in of_rank] for of_rank in plan.segments]
    for rank in range(world):
        assert found[rank].counts == tuple(len(rows) for rows in local)
        if ratio == 1:
            assert [s for s in found[rank].slots if s] == list(usual[rank].slots)
            own = slice(sum(found[rank].counts[:rank]), sum(found[rank].counts[: rank + 1]))
            assert list(found[rank].entries[found[rank].slots[own] > 0]) == list(usual[rank].entries)
            continue
        sent = [
            [of[r][i] for r in range(world) for i in p[r].pairs.send_rows] for p, of in ((found, local), (usual, local))
        ]
        assert linked(found[rank], local[rank] + sent[0]) == linked(usual[rank], local[rank] + sent[1])
        open_slots = found[rank].pairs.open_slots
        assert len(open_slots) == len(local[rank]) and set(open_slots) <= {*local[rank], spare}
