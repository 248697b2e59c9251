"""Prefix hits in the engine: exact where they can be, as model.md 5.1 defines where not, on any number of ranks.

Every logits row that the engine computed is compared with the slow oracle, which takes a hit's entries from whoever
wrote those blocks; and warm requests are compared with the same request on a cold cache.
"""

from __future__ import annotations

import pytest
from recorder import NARROW, TIGHT, Recorder, mixed_workload, prompt, recorded

from paraflash.engine.llm import LLM
from paraflash.engine.sampling_params import SamplingParams

EXACT = 10 * 15  # rows before a hit's end that are run anew with replay off: layers times (window - 1)


def life(rec: Recorder, name: str):
    """(hit, first position run, {position: logits}, tokens) of a request that was never preempted."""
    parts = [r for step in rec.steps for r in step.requests if r.request_id == name]
    rows = {p: row for step in rec.rows for (n, p), row in step.items() if n == name}
    return parts[0].kv_write_start, parts[0].num_computed, rows


def run(rec: Recorder, name: str, ids: list[int], **params) -> list[int]:
    """Runs one request to its end; its tokens."""
    rec.add(name, ids, **params)
    tokens: list[int] = []
    while rec.core.has_unfinished():
        for delta in rec.core.step():
            tokens += delta.token_ids
            rec.cached[delta.request_id] = delta.num_cached_tokens
    return tokens


def worst_difference(cold: dict, warm: dict, first: int) -> float:
    """Over the warm rows from position `first` on, all of which the cold run must have too."""
    positions = [p for p in warm if p >= first]
    assert positions and set(positions) <= cold.keys()
    return max((cold[p] - warm[p]).abs().max().item() for p in positions)


@pytest.mark.parametrize("pcp", [1, 2])
def test_with_replay_off_hits_change_no_token_and_no_logit(pcp):
    """Hits of three and four blocks, then one to five new tokens and chunks that end at odd and even positions."""
    common = prompt(320)
    with recorded(pcp=pcp, swa_bounded_replay=False, max_num_batched_tokens=61) as rec:
        rec.cached = {}
        for length in (192, 193, 194, 197, 256, 257, 260):
            rec.restart(enable_prefix_caching=False)
            cold_tokens = run(rec, "cold", common[:length], max_tokens=5)
            _, _, cold = life(rec, "cold")
            rec.restart(enable_prefix_caching=True)
            run(rec, "first", common[:length], max_tokens=1)
            assert run(rec, "warm", common[:length], max_tokens=5) == cold_tokens
            hit, start, warm = life(rec, "warm")
            usable = (length - 1) // 64 * 64
            assert hit == rec.cached["warm"] == (usable if usable > EXACT else 0)
            assert start == (hit - EXACT if hit else 0)
            assert worst_difference(cold, warm, hit) < 1e-4, f"{length} tokens"


def test_a_rewind_of_one_window_is_not_exact():
    """So the test above has something to find: windows depend on windows below them."""
    common = prompt(320)
    differences = []
    with recorded(swa_bounded_replay=False, max_num_batched_tokens=400) as rec:
        rec.cached = {}
        run(rec, "cold", common, max_tokens=1)
        _, _, cold = life(rec, "cold")
        for rewind in (EXACT, 16):
            rec.core.scheduler.rewind = rewind
            run(rec, f"warm{rewind}", common, max_tokens=1)
            hit, start, warm = life(rec, f"warm{rewind}")
            assert (hit, start) == (256, 256 - rewind)
            differences.append(worst_difference(cold, warm, hit))
        assert rec.worst(drops=False) < 1e-4
    assert differences[0] < 1e-4 < 1e-2 < differences[1]


@pytest.mark.parametrize("pcp", [1, 4])
def test_with_replay_on_a_hit_gives_what_the_definition_gives(pcp):
    """Hits from two blocks on; odd and even numbers of new tokens; one to several chunks after the hit."""
    common = prompt(320)
    with recorded(pcp=pcp, max_num_batched_tokens=200) as rec:
        rec.cached = {}
        run(rec, "first", common[:300], max_tokens=1)
        rec.core.scheduler.budget = 61
        for length in (64, 65, 129, 130, 192, 201, 256, 320):
            run(rec, f"n{length}", common[:length], max_tokens=3)
            hit, start, _ = life(rec, f"n{length}")
            assert hit == rec.cached[f"n{length}"] == min((length - 1) // 64 * 64, 256)
            assert start == max(0, hit - 16)
        assert rec.worst(drops=True) < 1e-4


def test_later_turns_hit_earlier_turns_and_their_answers():
    with recorded(max_num_batched_tokens=50) as rec:
        rec.cached = {}
        history = prompt(100)
        hits = []
        for turn in range(4):
            answer = run(rec, f"turn{turn}", history, max_tokens=21)
            hits.append(rec.cached[f"turn{turn}"])
            assert len(answer) == 21
            history = history + answer + prompt(30, turn)
        assert hits == [0, 64, 128, 192]  # turn 1 has 100 + 20 tokens with KV behind it, of which one block is full
        assert rec.worst(drops=True) < 1e-4
        stats = rec.core.stats()
        assert (stats["prefix_queries"], stats["prefix_hits"]) == (100 + 151 + 202 + 253, sum(hits))


def test_a_salt_keeps_requests_apart_and_hits_itself():
    with recorded(max_num_batched_tokens=200) as rec:
        rec.cached = {}
        ids = prompt(150)
        tokens = [run(rec, name, ids, salt=name[0]) for name in ("a1", "b1", "a2", "b2")]
        assert [rec.cached[name] for name in ("a1", "b1", "a2", "b2")] == [0, 0, 128, 128]
        assert tokens[0] == tokens[1] and tokens[2] == tokens[3]
        assert rec.worst(drops=True) < 1e-4


@pytest.mark.parametrize(("tp", "pcp"), [(1, 2), (1, 4)])
def test_all_ranks_hit_the_same_blocks_in_a_mixed_workload_with_exact_windows(tp, pcp):
    """The engine compares a hash of all ranks' caches after each step; every row equals the exact definition."""
    with recorded(tp, pcp, check_caches=True, swa_bounded_replay=False, **TIGHT) as rec:
        mixed_workload(rec)
        stats = rec.core.stats()
    assert rec.worst(drops=False) < 1e-4
    assert stats["preemptions"] > 0 and stats["prefix_hits"] > 500


def test_cached_tokens_reach_the_output_of_generate():
    options = dict(dtype="float32", num_gpu_blocks_override=8, max_num_batched_tokens=64, swa_bounded_replay=True)
    with LLM(NARROW, device="cpu", **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=2)
        outputs = [llm.generate({"prompt_token_ids": prompt(n)}, params, use_tqdm=False)[0] for n in (150, 150, 150)]
        salted = llm.generate({"prompt_token_ids": prompt(150), "cache_salt": "s"}, params, use_tqdm=False)[0]
        stats = llm.core.stats()
    assert [o.num_cached_tokens for o in (*outputs, salted)] == [0, 128, 128, 0]
    assert (stats["prefix_queries"], stats["prefix_hits"]) == (600, 256)
