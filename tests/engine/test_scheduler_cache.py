"""Prefix hits, their rewinds, preemption and abort: what is reused is right, and all of it comes back."""

import pytest
from fake_model import MODEL, Rig, answer, prompt

EXACT = MODEL.num_layers * (MODEL.window - 1)  # rows before a hit's end that are run anew with replay off


def hit_of(rig, name, ids, **params):
    """Runs one request alone; returns (hit tokens, first position run, window_start of its first row)."""
    steps = len(rig.model.steps)
    request = rig.add(name, ids, **params)
    rig.run()
    assert rig.tokens[name] == answer(ids, 4)
    first = rig.model.steps[steps].requests[0]
    assert rig.last[name].num_cached_tokens == request.num_cached_tokens == first.kv_write_start
    return first.kv_write_start, first.num_computed, first.window_start


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("length", [65, 66, 127, 128, 129, 191, 192, 193, 255])
def test_a_resent_prompt_hits_its_full_blocks_but_one_token(length, replay):
    rig = Rig(swa_bounded_replay=replay)
    assert hit_of(rig, "cold", prompt(length)) == (0, 0, 0)
    hit = (length - 1) // 64 * 64
    start = hit - (MODEL.window if replay else EXACT)
    assert hit_of(rig, "warm", prompt(length)) == (hit, start, start)
    rig.assert_all_returned()


@pytest.mark.parametrize("replay", [True, False])
def test_window_start_and_write_start_stay_for_the_whole_life(replay):
    rig = Rig(swa_bounded_replay=replay, max_num_batched_tokens=9)
    hit_of(rig, "cold", prompt(150))
    steps = len(rig.model.steps)
    _, start, _ = hit_of(rig, "warm", prompt(150))
    rows = [r for s in rig.model.steps[steps:] for r in s.requests]
    assert {(r.kv_write_start, r.window_start) for r in rows} == {(128, start)}
    assert replay or any(r.num_computed < 128 for r in rows[1:])  # the long rewind itself spans chunks
    assert rig.model.positions["warm"] == list(range(start, 153))  # replayed tokens count in the budget
    assert all(r.num_tokens <= 9 for r in rows)


@pytest.mark.parametrize(("window", "replay"), [(64, True), (128, True), (12, False)])
def test_a_hit_no_longer_than_its_rewind_is_dropped(window, replay, monkeypatch):
    rig = Rig(swa_bounded_replay=replay)
    rewind = window if replay else MODEL.num_layers * (window - 1)
    monkeypatch.setattr(rig.scheduler, "rewind", rewind)
    hit_of(rig, "cold", prompt(200))
    whole = rewind // 64 * 64  # the longest hit that is not above the rewind
    assert hit_of(rig, "short", prompt(whole + 1)) == (0, 0, 0)
    assert hit_of(rig, "long", prompt(200))[:2] == (192, 192 - rewind)


@pytest.mark.parametrize("replay", [True, False])
def test_the_rewind_follows_the_model(replay):
    rig = Rig(swa_bounded_replay=replay)
    assert rig.scheduler.rewind == (8 if replay else 6 * 7)


def test_only_the_common_full_blocks_are_hit():
    rig = Rig()
    hit_of(rig, "cold", prompt(200))
    assert hit_of(rig, "other", prompt(150)[:100] + prompt(100, 5))[0] == 0  # prompt(150) is no prefix of prompt(200)
    assert hit_of(rig, "fork", prompt(200)[:100] + prompt(100, 5))[0] == 64
    assert hit_of(rig, "answered", prompt(200) + answer(prompt(200), 4) + prompt(60, 6))[0] == 192


def test_generated_tokens_are_hit_by_the_next_turn():
    rig = Rig()
    rig.add("one", prompt(60), max_tokens=80)
    rig.run()
    turn = prompt(60) + answer(prompt(60), 80)
    assert hit_of(rig, "two", turn + prompt(10))[0] == 128  # 139 tokens of KV were computed


def test_salts_separate_requests():
    rig = Rig()
    assert hit_of(rig, "a1", prompt(150), salt="a")[0] == 0
    assert hit_of(rig, "b1", prompt(150), salt="b")[0] == 0
    assert hit_of(rig, "none", prompt(150))[0] == 0
    assert hit_of(rig, "a2", prompt(150), salt="a")[0] == 128


def test_prompt_logprobs_skip_the_cache_but_feed_it():
    rig = Rig()
    assert hit_of(rig, "a", prompt(150), prompt_logprobs=1)[0] == 0
    assert hit_of(rig, "b", prompt(150), prompt_logprobs=1)[0] == 0
    assert rig.scheduler.stats().prefix_queries == 0
    assert hit_of(rig, "c", prompt(150))[0] == 128


def test_prefix_caching_off_never_hits():
    rig = Rig(enable_prefix_caching=False)
    assert [hit_of(rig, name, prompt(150))[0] for name in "ab"] == [0, 0]
    assert rig.scheduler.stats().prefix_queries == 0


def test_queries_and_hits_are_counted_in_tokens():
    rig = Rig()
    for name in "abc":
        hit_of(rig, name, prompt(150))
    stats = rig.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (450, 256)


def test_a_block_is_shared_only_after_the_step_that_filled_it():
    rig = Rig(max_num_batched_tokens=300)
    rig.add("a", prompt(150))
    rig.add("b", prompt(150))
    assert [r.kv_write_start for r in rig.step().requests] == [0, 0]
    rig.add("c", prompt(150))
    assert [r.kv_write_start for r in rig.step().requests if r.is_prefill] == [128]
    rig.run()
    assert rig.tokens["a"] == rig.tokens["b"] == rig.tokens["c"]
    rig.assert_all_returned()


def test_a_shared_block_is_held_by_both_and_written_by_none():
    rig = Rig(max_num_batched_tokens=200)
    rig.add("a", prompt(130), max_tokens=30)
    rig.step()
    rig.add("b", prompt(130), max_tokens=30)
    rig.step()
    pool, a, b = rig.scheduler.pool, rig.scheduler.get("a"), rig.scheduler.get("b")
    assert a.block_ids[:2] == b.block_ids[:2] and a.block_ids[2] != b.block_ids[2]
    assert [pool.references(x) for x in a.block_ids] == [2, 2, 1]
    rig.run()


def test_cached_blocks_give_way_when_the_pool_is_needed():
    rig = Rig(num_blocks=5)
    for i in range(6):
        assert hit_of(rig, f"r{i}", prompt(200, i))[0] == 0
    assert hit_of(rig, "again", prompt(200, 5))[0] == 192
    rig.assert_all_returned()


def test_a_full_pool_preempts_the_latest_arrival_which_resumes_with_its_tokens_kept():
    rig = Rig(num_blocks=5, enable_prefix_caching=False)  # 4 blocks for three requests of up to 2
    for i in range(3):
        rig.add(f"r{i}", prompt(50, i), max_tokens=50)
    preempted = None
    while rig.scheduler.has_unfinished():
        before = {n: r for n in ("r0", "r1", "r2") if (r := rig.scheduler.get(n))}
        rig.step()
        hit = [r for r in before.values() if r.num_preemptions and r.block_ids == [] and not r.finished]
        if hit and not preempted:
            preempted = hit[0]
            assert preempted.request_id == "r2"
            assert (preempted.num_computed, preempted.slot) == (0, -1)
            assert rig.scheduler.waiting[0] is preempted and preempted.num_output_tokens > 0
    assert preempted and rig.scheduler.stats().preemptions == rig.last["r2"].num_preemptions == 1
    assert all(rig.tokens[f"r{i}"] == answer(prompt(50, i), 50) for i in range(3))
    rig.assert_all_returned()


def test_resumed_outputs_are_prefill_up_to_the_last_token():
    rig = Rig(num_blocks=5, enable_prefix_caching=False, max_num_batched_tokens=20)
    for i in range(3):
        rig.add(f"r{i}", prompt(50, i), max_tokens=50)
    rig.run()
    rows = [r for s in rig.model.steps for r in s.requests if r.request_id == "r2"]
    restart = max(i for i, r in enumerate(rows) if r.num_computed == 0)
    known = next(r.num_computed + r.num_tokens for r in rows[restart:] if r.sample)
    assert restart > 0 and known > 50
    for r in rows[restart:]:
        assert r.is_prefill == (r.num_computed < known - 1)
        assert r.is_last_chunk == (r.sample is not None)


def test_a_resumed_request_hits_its_own_blocks():
    rig = Rig(num_blocks=6, max_num_batched_tokens=200)
    rig.add("old", prompt(60, 1), max_tokens=70)
    rig.add("young", prompt(130, 2), max_tokens=100)
    rig.run()
    assert rig.last["young"].num_preemptions == 1
    assert {r.kv_write_start for s in rig.model.steps for r in s.requests if r.request_id == "young"} == {0, 128}
    assert rig.tokens["old"] == answer(prompt(60, 1), 70) and rig.tokens["young"] == answer(prompt(130, 2), 100)
    assert rig.last["young"].num_cached_tokens == 0  # what it recomputed for itself is no hit of the prompt
    assert rig.scheduler.stats().prefix_hits == 0
    rig.assert_all_returned()


def test_an_older_prompt_without_room_waits_for_a_younger_decode_of_the_same_step():
    rig = Rig(num_blocks=5, long_prefill_token_threshold=10, enable_prefix_caching=False)
    rig.add("old", prompt(190, 1))
    rig.add("young", prompt(58, 2), max_tokens=30)  # its second block is one that the old prompt needs last
    waited = 0
    while rig.scheduler.get("young"):
        parts = rig.step().requests
        waited += [(r.request_id, r.is_prefill) for r in parts] == [("young", False)]
    assert waited > 5 and rig.scheduler.stats().preemptions == 0
    rig.run()
    assert rig.tokens["old"] == answer(prompt(190, 1), 4) and rig.tokens["young"] == answer(prompt(58, 2), 30)
    rig.assert_all_returned()


def test_prompt_logprobs_are_reported_once_across_a_preemption():
    rig = Rig(num_blocks=5, max_num_batched_tokens=16)
    rig.add("old", prompt(100, 1), max_tokens=90)
    rig.add("young", prompt(60, 2), max_tokens=60, prompt_logprobs=0)
    rig.run()
    assert rig.last["young"].num_preemptions >= 1
    reports = [d.prompt_logprobs for d in rig.deltas["young"] if d.prompt_logprobs is not None]
    assert [[t.token_id for t in report] for report in reports] == [prompt(60, 2)[1:]]
    assert rig.tokens["young"] == answer(prompt(60, 2), 60)


@pytest.mark.parametrize("steps_before", range(8))
@pytest.mark.parametrize("in_flight", [False, True])
def test_abort_at_any_moment_shows_no_token_and_returns_every_block(steps_before, in_flight):
    rig = Rig(max_num_batched_tokens=64, max_num_seqs=2)
    rig.add("other", prompt(10), max_tokens=30)
    rig.step()
    free = rig.free
    rig.add("r", prompt(300), max_tokens=30)  # prompt: five steps; then it decodes
    rig.add("queued", prompt(20), max_tokens=3)  # waits for a seat
    for _ in range(steps_before):
        rig.step()
    step = rig.scheduler.schedule() if in_flight else None
    seen = len(rig.tokens["r"])
    delta = rig.scheduler.abort("r")
    assert (delta.finish_reason, delta.token_ids) == ("abort", [])
    assert rig.free == free and rig.scheduler.get("r") is None and rig.scheduler.abort("r") is None
    if step:
        assert all(d.request_id != "r" for d in rig.finish_step(step))
    rig.run()
    assert len(rig.tokens["r"]) == seen
    assert rig.tokens["other"] == answer(prompt(10), 30) and rig.tokens["queued"] == answer(prompt(20), 3)
    rig.assert_all_returned()


def test_blocks_of_a_step_that_was_aborted_in_flight_are_not_cached():
    rig = Rig(max_num_batched_tokens=200)
    rig.add("r", prompt(150))
    step = rig.scheduler.schedule()
    rig.scheduler.abort("r")
    rig.finish_step(step)
    assert hit_of(rig, "again", prompt(150))[0] == 0


def test_an_id_used_again_while_its_aborted_step_is_in_flight_gets_only_its_own_tokens():
    rig = Rig()
    rig.add("r", prompt(5, 1))
    step = rig.scheduler.schedule()
    rig.scheduler.abort("r")
    rig.add("r", prompt(6, 2))
    assert rig.finish_step(step) == []
    rig.run()
    assert rig.tokens["r"] == answer(prompt(6, 2), 4)
    rig.assert_all_returned()


def test_abort_of_a_preempted_request_returns_to_the_start():
    rig = Rig(num_blocks=5, enable_prefix_caching=False)
    for i in range(3):
        rig.add(f"r{i}", prompt(50, i), max_tokens=50)
    request = rig.scheduler.get("r2")
    while not request.num_preemptions:
        rig.step()
    assert rig.scheduler.abort("r2").finish_reason == "abort"
    rig.run()
    assert rig.tokens["r0"] == answer(prompt(50, 0), 50)
    rig.assert_all_returned()


def test_a_prompt_starts_only_when_all_of_it_will_find_room():
    rig = Rig(num_blocks=6, max_num_batched_tokens=32, long_prefill_token_threshold=16)
    rig.add("a", prompt(250, 1))
    rig.add("b", prompt(180, 2))
    rig.run()
    assert rig.scheduler.stats().preemptions == 0
    assert (rig.tokens["a"], rig.tokens["b"]) == (answer(prompt(250, 1), 4), answer(prompt(180, 2), 4))


def test_a_free_block_that_is_hit_does_not_count_as_room():
    rig = Rig(num_blocks=5)
    hit_of(rig, "cold", prompt(200))
    rig.add("other", prompt(10), max_tokens=5)
    rig.step()
    rig.add("warm", prompt(200))  # three of the three free blocks are its prefix, none is left for the rest
    while rig.scheduler.get("other"):
        assert [r.request_id for r in rig.step().requests] == ["other"]
    rig.run()
    assert rig.tokens["warm"] == answer(prompt(200), 4) and rig.last["warm"].num_cached_tokens == 192


@pytest.mark.parametrize("concurrency", [1, 4, 9])
def test_concurrency_above_the_seats_finishes(concurrency):
    rig = Rig(max_num_seqs=3, num_blocks=20, max_num_batched_tokens=48)
    for i in range(concurrency):
        rig.add(f"r{i}", prompt(64, i), max_tokens=16)
    rig.run(limit=400)
    assert all(rig.tokens[f"r{i}"] == answer(prompt(64, i), 16) for i in range(concurrency))
