"""Which rows run in which step: budgets, order, fairness, stop conditions and refusals."""

import logging

import pytest
from fake_model import EOS, MIX, MODEL, Rig, answer, mixed_prompts, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from paraflash.engine.request import RequestRefused
from paraflash.engine.sampling_params import BadField
from paraflash.engine.scheduler import QueueFull


@pytest.mark.parametrize("budget", range(1, 41))
def test_every_budget_computes_each_position_once_in_order(budget):
    rig = Rig(max_num_batched_tokens=budget)
    prompts = {"long": prompt(130), "one": prompt(1), "short": prompt(17)}
    for name, ids in prompts.items():
        rig.add(name, ids, max_tokens=6)
    rig.run()
    for name, ids in prompts.items():
        assert rig.tokens[name] == answer(ids, 6)
        assert rig.model.positions[name] == list(range(len(ids) + 5))
    rig.assert_all_returned()


def test_a_budget_that_leaves_one_token_still_makes_a_prefill_row():
    rig = Rig(max_num_batched_tokens=65)
    rig.add("first", prompt(64))
    rig.add("second", prompt(40))
    step = rig.step()
    assert [(r.num_tokens, r.is_prefill, r.is_last_chunk) for r in step.requests] == [
        (64, True, True),
        (1, True, False),
    ]
    assert step.requests[1].sample is None


def test_a_remainder_of_one_token_is_prefill_and_samples():
    rig = Rig(max_num_batched_tokens=72)
    rig.add("r", prompt(73))
    rig.step()
    last = rig.step().requests[0]
    assert (last.num_tokens, last.is_prefill, last.is_last_chunk, last.num_computed) == (1, True, True, 72)
    assert last.sample is not None and rig.tokens["r"] == answer(prompt(73), 1)
    assert not rig.step().requests[0].is_prefill


def test_running_requests_get_a_token_every_step_while_a_long_prompt_prefills():
    rig = Rig(max_num_batched_tokens=16)
    for name in "abc":
        rig.add(name, prompt(3), max_tokens=80)
    while not all(rig.tokens[name] for name in "abc"):
        rig.step()
    rig.add("long", prompt(600))
    rig.step()
    chunks = 0
    while not rig.tokens["long"]:
        before = {name: len(rig.tokens[name]) for name in "abc"}
        step = rig.step()
        assert all(len(rig.tokens[name]) == count + 1 for name, count in before.items())
        assert [r.request_id for r in step.requests] == ["a", "b", "c", "long"]
        chunks += 1
    assert chunks == -(-(600 - 13) // 13)


def test_threshold_lets_short_prompts_run_beside_a_long_one():
    rig = Rig(max_num_batched_tokens=32, long_prefill_token_threshold=20)
    rig.add("long", prompt(500))
    rig.add("short", prompt(12))
    assert [(r.request_id, r.num_tokens) for r in rig.step().requests] == [("long", 20), ("short", 12)]
    assert rig.tokens["short"]


def test_without_a_threshold_prompts_run_in_order_of_arrival():
    rig = Rig(max_num_batched_tokens=32)
    rig.add("long", prompt(70))
    rig.add("short", prompt(12))
    assert [[r.request_id for r in rig.step().requests] for _ in range(3)] == [["long"], ["long"], ["long", "short"]]


def test_partial_prefills_are_capped_and_whole_prompts_pass():
    rig = Rig(max_num_batched_tokens=64, long_prefill_token_threshold=20, max_num_partial_prefills=1)
    rig.add("long1", prompt(100, 1))
    rig.add("long2", prompt(100, 2))
    rig.add("short", prompt(15))
    started = []
    while rig.scheduler.has_unfinished():
        step = rig.step()
        started += [r.request_id for r in step.requests if r.num_computed == 0]
        assert sum(r.is_prefill and not r.is_last_chunk for r in step.requests) <= 1
    assert started == ["long1", "short", "long2"]


def test_more_requests_than_seats_queue_and_finish_in_order():
    rig = Rig(max_num_seqs=2)
    done = []
    for i in range(7):
        rig.add(f"r{i}", prompt(5, i))
    while rig.scheduler.has_unfinished():
        step = rig.step()
        assert len(step.requests) <= 2 and {r.slot for r in step.requests} <= {0, 1}
        done += [name for name, d in rig.last.items() if d.finish_reason and name not in done]
    assert done == [f"r{i}" for i in range(7)]
    assert all(rig.tokens[f"r{i}"] == answer(prompt(5, i), 4) for i in range(7))
    rig.assert_all_returned()


def test_stop_conditions_and_their_reasons():
    rig = Rig()
    rig.model.script = {
        "eos": [50, EOS],
        "ignored": [EOS, EOS, EOS, EOS],
        "id": [50, 77],
        "early": [77, EOS, 77, 60],
        "length": [50, 51, 52, 53],
    }
    rig.add("eos", prompt(5))
    rig.add("ignored", prompt(5), ignore_eos=True)
    rig.add("id", prompt(5), stop_token_ids=[77])
    rig.add("early", prompt(5), stop_token_ids=[77], min_tokens=3)
    rig.add("length", prompt(5))
    rig.run()
    ends = {name: (d.finish_reason, d.stop_reason, rig.tokens[name]) for name, d in rig.last.items()}
    assert ends == {
        "eos": ("stop", None, [50, EOS]),
        "ignored": ("length", None, [EOS] * 4),
        "id": ("stop", 77, [50, 77]),
        "early": ("stop", 77, [77, EOS, 77]),
        "length": ("length", None, [50, 51, 52, 53]),
    }
    rig.assert_all_returned()


def test_min_tokens_bans_the_stop_tokens_until_it_is_reached():
    rig = Rig()
    rig.add("r", prompt(5), min_tokens=2, stop_token_ids=[77])
    banned = [rig.step().requests[0].sample.banned_ids for _ in range(4)]
    assert [b.tolist() if b is not None else None for b in banned] == [[EOS, 77], [EOS, 77], None, None]


@pytest.mark.parametrize("max_tokens", [None, 500])
def test_generation_ends_at_the_context_length(max_tokens):
    rig = Rig(max_model_len=40)
    rig.add("r", prompt(30), max_tokens=max_tokens)
    rig.run()
    assert (len(rig.tokens["r"]), rig.last["r"].finish_reason) == (10, "length")


def test_without_max_tokens_a_request_is_as_long_as_the_pool_allows():
    rig = Rig(num_blocks=3)
    rig.add("r", prompt(100), max_tokens=None)
    rig.run()
    assert rig.tokens["r"] == answer(prompt(100), 29)
    rig.assert_all_returned()


@pytest.mark.parametrize(
    ("length", "max_tokens", "field", "text"),
    [
        (0, 4, "prompt_token_ids", "empty"),
        (129, 1, "input_tokens", "129 input tokens, but the whole KV cache holds 128 .2 blocks of 64."),
        (129, None, "input_tokens", "129 input tokens"),
        (128, 2, "max_tokens", "129 tokens of KV, but .* holds 128 .*max_tokens of at most 1"),
        (10, 200, "max_tokens", "need 209 tokens of KV.* at most 119"),
        (300, 4, "input_tokens", "maximum context length is 300 tokens. However, your prompt contains 300"),
    ],
)
def test_request_that_can_never_run_is_refused_at_once_and_others_go_on(length, max_tokens, field, text):
    rig = Rig(num_blocks=3, max_model_len=300)
    rig.add("before", prompt(20))
    with pytest.raises(RequestRefused, match=text) as caught:
        rig.add("big", prompt(length), max_tokens=max_tokens)
    assert caught.value.field == field
    rig.add("after", prompt(21))
    rig.run()
    assert rig.tokens == {"before": answer(prompt(20), 4), "after": answer(prompt(21), 4)}
    rig.assert_all_returned()


def test_request_that_just_fits_the_pool_runs():
    rig = Rig(num_blocks=3)
    rig.add("r", prompt(120), max_tokens=9)
    rig.run()
    assert rig.tokens["r"] == answer(prompt(120), 9)


@pytest.mark.parametrize("token", [-1, MODEL.vocab_size])
def test_token_ids_outside_the_vocabulary_are_refused(token):
    with pytest.raises(RequestRefused, match=f"token id {token}; ids from 0 to 999"):
        Rig().add("r", [5, token, 6])


def test_sampling_fields_are_checked_against_the_engine():
    with pytest.raises(BadField, match="stop_token_ids is 1000"):
        Rig().add("r", [5], stop_token_ids=[1000])
    with pytest.raises(BadField, match="logprobs is 4; an integer from 0 to 3"):
        Rig(max_logprobs=3).add("r", [5], logprobs=4)


def test_an_id_in_use_is_refused():
    rig = Rig()
    rig.add("r", prompt(5))
    with pytest.raises(RequestRefused, match="'r' is in use"):
        rig.add("r", prompt(6))
    rig.run()
    rig.add("r", prompt(6))


def test_a_full_queue_turns_requests_away_until_there_is_room():
    rig = Rig(max_queue=2, max_num_seqs=1)
    rig.add("a", prompt(5))
    rig.step()
    rig.add("b", prompt(5))
    rig.add("c", prompt(5))
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        rig.add("d", prompt(5))
    rig.run()
    rig.add("d", prompt(5))


def test_a_grammar_that_is_being_compiled_holds_up_no_other_request():
    done = []
    rig = Rig()
    slow = rig.add("slow", prompt(5))
    slow.compiled = lambda: bool(done)
    rig.add("a", prompt(6))
    for _ in range(2):
        assert [part.request_id for part in rig.step().requests] == ["a"]
    done.append(True)
    assert {part.request_id for part in rig.step().requests} == {"a", "slow"}


def test_a_grammar_is_waited_for_when_nothing_else_is_to_be_done():
    rig = Rig()
    rig.add("slow", prompt(5)).compiled = lambda: False
    assert [part.request_id for part in rig.step().requests] == ["slow"]


def test_requests_that_the_next_step_has_places_for_do_not_fill_the_queue():
    rig = Rig(max_queue=1, max_num_seqs=3)
    for name in "abcd":
        rig.add(name, prompt(5))  # three places and one in the queue
    with pytest.raises(QueueFull, match="4 requests are waiting"):
        rig.add("e", prompt(5))
    rig.step()
    with pytest.raises(QueueFull, match="1 requests are waiting"):
        rig.add("e", prompt(5))
    rig.run()
    rig.add("e", prompt(5))


def test_seeds_follow_from_the_engines_seed_and_the_order_of_arrival():
    def seeds(engine_seed):
        rig = Rig(seed=engine_seed)
        return [rig.add(f"r{i}", [5], seed=s).seed for i, s in enumerate([None, None, 7, None])]

    assert seeds(0) == seeds(0)
    assert len(set(seeds(0)) | set(seeds(1))) == 7  # only the seed 7 is common
    assert seeds(0)[2] == 7


def test_prompt_logprobs_come_once_with_the_first_token_whatever_the_chunks():
    rig = Rig(max_num_batched_tokens=7)
    rig.add("r", prompt(20), prompt_logprobs=0, logprobs=0)
    rig.run()
    first, *rest = rig.deltas["r"]
    assert [t.token_id for t in first.prompt_logprobs] == prompt(20)[1:]
    assert all(d.prompt_logprobs is None for d in rest)
    assert [d.logprobs[0].token_id for d in rig.deltas["r"]] == rig.tokens["r"]


def test_progress_of_a_long_prefill_is_logged_per_chunk(caplog):
    rig = Rig(max_num_batched_tokens=64)
    rig.add("x", prompt(150))
    rig.add("y", prompt(3))
    with caplog.at_level(logging.INFO, "paraflash.scheduler"):
        rig.run()
    progress = [r.getMessage() for r in caplog.records]
    assert progress == [f"request x: prefill {n}/150 tokens" for n in (64, 128, 150)]


def test_stats_count_tokens_and_show_the_pool():
    rig = Rig(num_blocks=11)
    rig.add("a", prompt(100))
    rig.add("b", prompt(20))
    rig.step()
    stats = rig.scheduler.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (1, 1, pytest.approx(0.1))
    rig.run()
    stats = rig.scheduler.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0)
    assert (stats.prompt_tokens, stats.generation_tokens, stats.preemptions) == (120, 8, 0)


def test_steps_and_results_must_alternate():
    rig = Rig()
    rig.add("r", prompt(5))
    step = rig.scheduler.schedule()
    with pytest.raises(RuntimeError, match="in flight"):
        rig.scheduler.schedule()
    rig.finish_step(step)
    with pytest.raises(ValueError, match="not the step in flight"):
        rig.scheduler.update(step, rig.model.execute(step))


def test_nothing_to_do_is_no_step():
    assert Rig().scheduler.schedule() is None


@given(**MIX, partial=st.sampled_from([0, 1, 2]))
@settings(max_examples=120, deadline=None)
def test_any_mix_finishes_with_the_right_tokens(
    lengths, budget, seats, num_blocks, threshold, partial, same, replay, aborts
):
    rig = Rig(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=seats,
        long_prefill_token_threshold=threshold,
        max_num_partial_prefills=partial,
        swa_bounded_replay=replay,
    )
    prompts = mixed_prompts(lengths, same)
    for name, ids in prompts.items():
        rig.add(name, ids, max_tokens=70)
    aborted = set()
    for number in range(10000):
        if not rig.scheduler.has_unfinished():
            break
        step = rig.scheduler.schedule()
        name = f"r{aborts.get(number)}"
        if rig.scheduler.get(name):
            rig.scheduler.abort(name)
            aborted.add(name)
        assert name not in {d.request_id for d in rig.finish_step(step)} or name not in aborted
    assert not rig.scheduler.has_unfinished()
    rig.assert_answers({name: answer(ids, 70) for name, ids in prompts.items()}, aborted)
