"""Properties of the PCP partition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paraflash.parallel.plan import make_plan

requests = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 200), st.booleans()), min_size=0, max_size=9)


def plan_of(batch: list[tuple[int, int, bool]], world: int):
    lens, computed, prefill = (np.array(x) for x in zip(*batch, strict=True)) if batch else (np.zeros(0, int),) * 3
    return make_plan(lens, computed, prefill.astype(bool), world)


@settings(max_examples=300, deadline=None)
@given(requests, st.integers(1, 8))
def test_every_row_lies_on_exactly_one_rank(batch, world):
    plan = plan_of(batch, world)
    total = sum(n for n, _, _ in batch)
    assert sorted(np.concatenate(plan.rows).tolist()) == list(range(total))


@settings(max_examples=300, deadline=None)
@given(requests, st.integers(1, 8))
def test_segments_describe_the_rows_decode_first_then_by_request_and_position(batch, world):
    plan = plan_of(batch, world)
    first = np.concatenate([[0], np.cumsum([n for n, _, _ in batch])])
    for rank in range(world):
        local = 0
        order = []
        for s in plan.segments[rank]:
            assert s.length > 0 and s.rank == rank and s.local_row == local
            assert s.global_row == first[s.request] + s.start - batch[s.request][1]
            assert plan.rows[rank][local : local + s.length].tolist() == list(
                range(s.global_row, s.global_row + s.length)
            )
            order.append((batch[s.request][2], s.request, s.start))
            local += s.length
        assert local == len(plan.rows[rank])
        assert order == sorted(order)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(1, 8))
def test_prefill_rows_are_spread_evenly(lens, world):
    plan = plan_of([(n, 0, True) for n in lens], world)
    counts = [len(rows) for rows in plan.rows]
    assert max(counts) - min(counts) <= 1


@given(st.integers(0, 30), st.integers(1, 8))
def test_decode_rows_are_spread_evenly_and_never_split(count, world):
    plan = plan_of([(1, 7, False)] * count, world)
    counts = [len(rows) for rows in plan.rows]
    assert max(counts) - min(counts) <= 1


def test_zigzag_gives_each_rank_an_early_and_a_late_chunk():
    plan = plan_of([(16, 0, True)], 2)
    assert plan.rows[0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert plan.rows[1].tolist() == list(range(4, 12))
    assert len(plan.segments[1]) == 1, "neighbouring chunks of one rank are one segment"


def test_the_remainder_is_spread():
    assert [len(r) for r in plan_of([(10, 0, True)], 4).rows] == [2, 2, 3, 3]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_prompts_around_the_number_of_ranks(world):
    for n in (1, 2, world - 1, world, world + 1, 2 * world - 1, 2 * world + 1):
        counts = [len(r) for r in plan_of([(n, 3, True)], world).rows]
        assert sum(counts) == n and max(counts) - min(counts) <= 1


def test_a_one_token_prefill_chunk_is_split_like_prefill_and_keeps_the_order_of_requests():
    plan = plan_of([(1, 71, True), (40, 0, True), (1, 5, False)], 8)
    for segments in plan.segments:
        assert [s.request for s in segments if s.request != 2] == sorted(s.request for s in segments if s.request != 2)
    assert sum(s.request == 0 for segments in plan.segments for s in segments) == 1


def test_negative_lengths_are_refused():
    with pytest.raises(ValueError, match="negative"):
        make_plan(np.array([-1]), np.array([0]), np.array([True]), 2)


def test_requests_are_whole_where_no_prompt_is_cut():
    decode = [(1, 7, False), (1, 90, False), (1, 3, False)]
    assert plan_of(decode, 2).keeps_requests_whole
    assert plan_of([*decode, (1, 20, True)], 2).keeps_requests_whole
    assert not plan_of([*decode, (5, 20, True)], 2).keeps_requests_whole
    assert plan_of([(9, 0, True)], 1).keeps_requests_whole
