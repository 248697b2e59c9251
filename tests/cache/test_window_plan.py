"""The window plan against a brute-force look at positions: every query reads exactly its window, wherever it lies."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paraflash.cache.window import Span, plan_decode_window, plan_window
from paraflash.model.batch import plan_of, trailing_spans
from tests.decode_spans import decode_rows_of

requests = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 60), st.booleans(), st.integers(0, 40)), min_size=1, max_size=5
)


def spans_of(batch) -> list[Span]:
    return [
        Span(slot, start, start + (length if prefill else 1), prefill, min(bound, start), 0, np.zeros(4, np.int64))
        for slot, (length, start, prefill, bound) in enumerate(batch)
    ]


@settings(max_examples=400, deadline=None)
@given(requests, st.integers(1, 8), st.integers(2, 9))
def test_each_query_reads_its_window_and_each_ring_keeps_the_trailing_rows(batch, world, window):
    spans = spans_of(batch)
    plan = plan_of(spans, world)
    plans = [plan_window(spans, plan.segments[r], plan.segments, r, window) for r in range(world)]
    local = [
        [(spans[s.request].slot, p) for s in plan.segments[r] for p in range(s.start, s.end)] for r in range(world)
    ]
    halo = [local[r][i] for r in range(world) for i in plans[r].send_rows]
    ring = {}  # what an earlier step must have left: slot -> (request slot, position)
    for span in spans:
        for p in range(max(0, span.start - window + 1), span.start):
            ring[span.slot * window + p % window] = (span.slot, p)
    for rank, p in enumerate(plans):
        assert p.send_counts == plans[0].send_counts and (world == 1 or len(p.send_rows) == p.send_counts[rank])
        step_rows = local[rank] + (halo if world > 1 else [])
        keys = [ring[s] for s in p.prior_slots] + step_rows
        row = 0
        for s in plan.segments[rank]:
            span = spans[s.request]
            for t in range(s.start, s.end):
                want = {(span.slot, q) for q in range(max(span.window_start, t - window + 1, 0), t + 1)}
                got = [keys[i] for i in p.index[row] if i >= 0]
                assert len(got) == len(want) and set(got) == want
                row += 1
        assert row == len(p.index)
        kept = {int(slot): step_rows[i] for slot, i in zip(p.tail_slots, p.tail_rows, strict=True)}
        expected = {
            s.slot * window + q % window: (s.slot, q)
            for s in spans
            for q in range(max(s.start, s.end - window + 1), s.end)
        }
        assert (p.tail_rows >= 0).all() and kept == expected


@settings(max_examples=300, deadline=None)
@given(requests, st.integers(1, 8), st.integers(2, 9), st.randoms(use_true_random=False))
def test_trailing_queries_find_their_window_among_keys_of_another_partition(batch, world, window, random):
    spans = spans_of(batch)
    plan = plan_of(spans, world)
    kept = [s.length if not s.is_prefill else random.choice([0, min(s.length, window), s.length]) for s in spans]
    tail = trailing_spans(spans, kept, window)
    tail_plan = plan_of(tail, world)
    first = [s.start for s in tail]
    plans = [
        plan_window(spans, tail_plan.segments[r], plan.segments, r, window, lambda s: first[s.request] - window + 1)
        for r in range(world)
    ]
    local = [
        [(spans[s.request].slot, p) for s in plan.segments[r] for p in range(s.start, s.end)] for r in range(world)
    ]
    halo = [local[r][i] for r in range(world) for i in plans[r].send_rows]
    for rank, p in enumerate(plans):
        step_rows = local[rank] + (halo if world > 1 else [])
        prior = []
        for slot in p.prior_slots:
            span = spans[slot // window]
            prior.append(next((span.slot, q) for q in range(span.start - 1, -1, -1) if q % window == slot % window))
        keys = prior + step_rows
        row = 0
        for s in tail_plan.segments[rank]:
            span = spans[s.request]
            for t in range(s.start, s.end):
                want = {(span.slot, q) for q in range(max(span.window_start, t - window + 1, 0), t + 1)}
                assert {keys[i] for i in p.index[row] if i >= 0} == want
                row += 1
        assert (p.tail_rows >= 0).all()


def test_a_long_prefill_sends_only_the_ends_of_its_chunks():
    spans = [Span(0, 0, 2048, True, 0, 0, np.zeros(32, np.int64))]
    plan = plan_of(spans, 4)
    sent = plan_window(spans, plan.segments[0], plan.segments, 0, 128).send_counts
    assert sum(sent) == 7 * 127, "8 chunks, of which the middle two are neighbours on one rank"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), min_size=1, max_size=9), st.integers(1, 4))
def test_decode_rows_have_the_same_windows_in_shapes_that_positions_do_not_change(batch, world):
    for window in (1, 2, 8):
        spans = [
            Span(slot, start, start + 1, False, min(bound, start), 0, np.zeros(4, np.int64))
            for slot, (start, bound) in enumerate(batch)
        ]
        plan = plan_of(spans, world)
        for rank in range(world):
            usual = plan_window(spans, plan.segments[rank], plan.segments, rank, window)
            found = plan_decode_window(decode_rows_of(spans, world, rank), window)
            local = len(plan.rows[rank])
            assert len(found.prior_slots) == local * (window - 1)

            def keys(p, own=local):
                names = [("ring", int(s)) for s in p.prior_slots] + [("step", i) for i in range(own)]
                return [[names[i] for i in row if i >= 0] for row in p.index]

            assert keys(found) == keys(usual)
            assert found.send_counts == usual.send_counts and list(found.send_rows) == list(usual.send_rows)
            kept = [set(zip(p.tail_slots.tolist(), p.tail_rows.tolist(), strict=True)) for p in (found, usual)]
            assert kept[0] == kept[1]
