"""Bounded replay: which rows are dropped, that nobody misses them, and that results are what model.md 5 defines."""

from __future__ import annotations

import json

import pytest
from fake_model import MODEL, Rig, answer
from fake_model import prompt as fake_prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from recorder import NARROW, TIGHT, mixed_workload, prompt, recorded
from safetensors.torch import load_file

from paraflash.config.engine import EngineConfig
from paraflash.config.model import load_config, parse_config
from paraflash.engine.replay import certain_rows, drops_rows, kept_rows, rewind_rows

RELEASED = NARROW.parents[1] / "released_config.json"
WINDOW = MODEL.window  # of the fake model: 8


# -- the rule ------------------------------------------------------------------------------------------------------


LAST_OWNS = {"compress_ratios": [0, 0, 2, 2, 2, 2, 2, 2, 2, 1], "kv_source_layer_ids": [2, 4, 9]}
NO_OWNER = {"compress_ratios": [0] * 10, "kv_source_layer_ids": [], "index_source_layer_ids": []}


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({}, True),
        ({**LAST_OWNS, "index_source_layer_ids": [2, 4, 9], "candidate_source_layer_id": 9}, False),
        ({**NO_OWNER, "candidate_source_layer_id": -1}, False),
        ({"engram_layer_ids": [1, 5]}, True),
        ({"engram_layer_ids": [1, 6]}, False),
        ({"engram_layer_ids": [1, 8]}, False),
    ],
)
def test_rows_are_dropped_only_where_the_decoder_leaves_nothing_but_windows(change, allowed):
    model = load_config(NARROW, {"text_config": change})
    assert drops_rows(EngineConfig("m", swa_bounded_replay=True), model) is allowed
    assert not drops_rows(EngineConfig("m", swa_bounded_replay=False), model)


def test_the_released_model_drops_rows_and_goes_back_one_window():
    model = parse_config(json.loads(RELEASED.read_text()))
    on = EngineConfig("m", swa_bounded_replay=True)
    assert drops_rows(on, model) and model.last_kv_owner == 20
    assert rewind_rows(on, model) == 128
    assert rewind_rows(EngineConfig("m", swa_bounded_replay=False), model) == 40 * 127


@pytest.mark.parametrize(
    ("budget", "seats", "threshold", "rows"), [(64, 8, 0, 57), (64, 8, 20, 20), (64, 60, 20, 5), (4, 8, 0, -3)]
)
def test_certain_rows_leave_one_for_every_other_seat(budget, seats, threshold, rows):
    config = EngineConfig(
        "m", max_num_batched_tokens=budget, max_num_seqs=seats, long_prefill_token_threshold=threshold
    )
    assert certain_rows(config) == rows


@pytest.mark.parametrize(
    ("rows", "rest", "certain", "kept"),
    [
        (6, 9, 99, 0),  # the three chunks of the module's picture
        (6, 3, 99, 4),
        (3, 0, 99, 3),
        (6, 5, 99, 0),
        (6, 4, 99, 4),  # the next chunk would be a window at most: it reads back
        (6, 9, 5, 0),
        (6, 9, 4, 4),  # the next chunk cannot be made longer than a window
        (2, 9, 99, 0),
        (4, 0, 99, 4),
        (5, 0, 99, 4),
    ],
)
def test_a_chunk_keeps_its_window_unless_the_next_one_starts_its_own(rows, rest, certain, kept):
    assert kept_rows(rows, rest, 4, certain) == kept


# -- the scheduler, over a model that checks what it finds ---------------------------------------------------------


def rows_of(rig: Rig, name: str) -> list[tuple[int, int]]:
    """(rows, kept rows) of each chunk of a request."""
    return [(r.num_tokens, r.kept_rows) for s in rig.model.steps for r in s.requests if r.request_id == name]


def test_only_the_last_chunk_keeps_rows_where_it_is_longer_than_a_window():
    rig = Rig(max_num_batched_tokens=20)
    rig.add("r", fake_prompt(49), max_tokens=2)
    rig.run()
    assert rows_of(rig, "r") == [(20, 0), (20, 0), (9, WINDOW), (1, -1)]


def test_the_chunk_before_a_short_remainder_keeps_its_window():
    rig = Rig(max_num_batched_tokens=20)
    rig.add("r", fake_prompt(48), max_tokens=1)
    rig.run()
    assert rows_of(rig, "r") == [(20, 0), (20, WINDOW), (8, -1)]


@pytest.mark.parametrize(
    "limits",
    [
        {"long_prefill_token_threshold": WINDOW},
        {"max_num_batched_tokens": 15, "max_num_seqs": 8},  # seven decodes leave eight rows
        {"max_num_batched_tokens": WINDOW, "max_num_seqs": 1},
    ],
)
def test_no_chunk_is_skipped_where_a_longer_next_one_is_not_certain(limits):
    rig = Rig(**{"max_num_batched_tokens": 20, **limits})
    rig.add("r", fake_prompt(100), max_tokens=1)
    rig.run()
    assert all(kept in (-1, WINDOW) for _, kept in rows_of(rig, "r"))


def test_all_rows_are_kept_without_replay_and_for_prompt_logprobs():
    for settings_, params in (({"swa_bounded_replay": False}, {}), ({}, {"prompt_logprobs": 1})):
        rig = Rig(max_num_batched_tokens=20, **settings_)
        rig.add("r", fake_prompt(60), max_tokens=2, **params)
        rig.run()
        assert {kept for _, kept in rows_of(rig, "r")} == {-1}


def test_a_prompt_with_a_skipped_chunk_waits_for_more_than_a_window_of_rows():
    rig = Rig(max_num_batched_tokens=30, long_prefill_token_threshold=12)
    for name, length in {"a": 30, "b": 30, "c": 40, "d": 20}.items():
        rig.add(name, fake_prompt(length), max_tokens=1)
    rig.run()
    steps = [{r.request_id: (r.num_tokens, r.kept_rows) for r in s.requests} for s in rig.model.steps]
    assert steps == [
        {"a": (12, 0), "b": (12, 0), "c": (6, 0)},
        {"a": (12, 8), "b": (12, 8), "d": (6, 0)},  # six rows are left: too few for c, enough to start d
        {"a": (6, -1), "b": (6, -1), "c": (12, 0)},  # and too few for d
        {"c": (12, 0), "d": (12, 8)},
        {"c": (10, 8), "d": (2, -1)},
    ]


def test_a_prompt_with_a_skipped_chunk_waits_for_blocks_and_takes_none_in_vain():
    rig = Rig(num_blocks=4, max_num_batched_tokens=63, max_num_seqs=2, enable_prefix_caching=False)
    rig.add("young", fake_prompt(60, 1), max_tokens=30)  # decodes into its second block
    rig.step()
    old = rig.add("old", fake_prompt(128, 2), max_tokens=1)
    rig.step()
    old.arrival, rig.scheduler.get("young").arrival = 0, 1
    rig.scheduler.running.sort(key=lambda r: r.arrival)
    while rig.scheduler.get("young"):
        held = len(old.block_ids)
        parts = {r.request_id: r.num_tokens for r in rig.step().requests}
        assert "young" in parts and ("old" in parts or len(old.block_ids) == held)
    rig.run()
    assert rig.tokens["old"] == answer(fake_prompt(128, 2), 1)
    rig.assert_all_returned()


def test_a_request_preempted_after_a_skipped_chunk_starts_without_that_debt():
    rig = Rig(max_num_batched_tokens=20)
    request = rig.add("r", fake_prompt(60), max_tokens=1)
    rig.step()
    assert request.least_rows == WINDOW + 1
    rig.scheduler._preempt(request)
    assert request.least_rows == 0
    rig.run()
    assert rows_of(rig, "r") == [(20, 0), (20, 0), (20, 0), (20, WINDOW)]
    assert rig.tokens["r"] == answer(fake_prompt(60), 1)


@given(
    lengths=st.lists(st.integers(1, 160), min_size=1, max_size=7),
    budget=st.integers(1, 40),
    seats=st.integers(1, 5),
    num_blocks=st.integers(6, 14),
    threshold=st.sampled_from([0, 0, 9, 13]),
    same=st.booleans(),
    reported=st.sets(st.integers(0, 6), max_size=2),
    aborts=st.dictionaries(st.integers(0, 30), st.integers(0, 6), max_size=2),
)
@settings(max_examples=80, deadline=None)
def test_any_mix_ends_and_never_reads_a_decoder_window_that_was_left_out(
    lengths, budget, seats, num_blocks, threshold, same, reported, aborts
):
    rig = Rig(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=seats,
        long_prefill_token_threshold=threshold,
    )
    whole = fake_prompt(160)
    for i, length in enumerate(lengths):
        ids = whole[:length] if same else fake_prompt(length, i)
        rig.add(f"r{i}", ids, max_tokens=60, prompt_logprobs=0 if i in reported else None)
    lacking: dict[str, int] = {}  # request -> end of its last chunk, if that left out the decoder
    for number in range(6000):
        if not rig.scheduler.has_unfinished():
            break
        rig.scheduler.abort(f"r{aborts.get(number)}")
        if not rig.scheduler.has_unfinished():
            break
        for r in rig.step().requests:  # the fake model checks every window that is read
            if lacking.pop(r.request_id, None) == r.num_computed:
                assert r.num_tokens > WINDOW
            if r.kept_rows == 0:
                lacking[r.request_id] = r.num_computed + r.num_tokens
    assert not rig.scheduler.has_unfinished()
    rig.assert_all_returned()


# -- the engine against the definition -----------------------------------------------------------------------------


@pytest.mark.parametrize("pcp", [1, 2, 4])
def test_every_chunk_budget_gives_what_the_definition_gives(pcp):
    golden = load_file(NARROW / "expected_plain.safetensors")
    ids, logits = golden["prompt.6.input_ids"].tolist(), golden["prompt.6.logits"]
    assert len(ids) == 130
    with recorded(pcp=pcp, enable_prefix_caching=False, max_num_seqs=1) as rec:
        for budget in (*range(1, 41), 90, 130):  # the last two with pieces of more than a window on each rank
            rec.restart(max_num_batched_tokens=budget)
            # Up to a window no row can be dropped, and the definition is the full computation.
            drops = budget > 16
            length = 130 if drops else 24
            rec.add("r", ids[:length], max_tokens=1)
            rec.finish()
            rows = {position: row for step in rec.rows for (_, position), row in step.items()}
            if drops:
                assert rec.worst(drops=True) < 1e-4, f"budget {budget}"
                assert len(rows) < 60
                assert (rows[129] - logits[129]).abs().max() > 1e-2, "an approximation, and it is seen"
            else:
                assert sorted(rows) == list(range(length))
                worst = max((rows[p] - logits[p]).abs().max().item() for p in range(length))
                assert worst < 1e-4, f"budget {budget}"


@pytest.mark.parametrize("budget", [21, 40])
def test_leaving_a_chunk_out_changes_nothing_later(budget):
    rows = []
    with recorded(enable_prefix_caching=False) as rec:
        for skips in (True, False):
            rec.restart(max_num_batched_tokens=budget)
            rec.core.scheduler.certain_rows *= skips
            rec.add("r", prompt(130), max_tokens=20)
            rec.finish()
            assert any(r.kept_rows == 0 for step in rec.steps for r in step.requests) is skips
            rows.append({key: row for step in rec.rows for key, row in step.items()})
    left_out, all_kept = rows
    assert len(left_out) < len(all_kept) and left_out.keys() <= all_kept.keys()
    assert max((left_out[key] - all_kept[key]).abs().max().item() for key in left_out) < 2e-5


@pytest.mark.parametrize(("tp", "pcp"), [(1, 1), (2, 2), (1, 4)])
def test_a_mixed_workload_gives_what_the_definition_gives_and_keeps_all_caches_equal(tp, pcp):
    with recorded(tp, pcp, check_caches=True, **TIGHT) as rec:
        mixed_workload(rec)
        stats = rec.core.stats()
    assert rec.worst(drops=True) < 1e-4
    kept = [{r.kept_rows for r in step.requests if r.is_prefill} for step in rec.steps]
    assert {-1, 0} in kept and {-1, 16} in kept and {0, 16} in kept, "steps where one prompt drops rows, another not"
    assert stats["preemptions"] > 0 and stats["prefix_hits"] > 500
