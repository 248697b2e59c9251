"""Faults that serving engines of this kind have had, one test each: empty ranks, pads, stale memory, borders of chunks.

The golden checkpoint `narrow` (window 16, ratios 0, 2 and 1, Engram on layers 1 and 4) runs on ranks that are threads.
Its tokens and logits on one rank are pinned elsewhere, so most tests here compare with those or with the yardstick.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from in_process import GREEDY, Answer, generate, local_engine
from logits_runner import LogitsRunner
from random_models import Yardstick, random_text_config, write_model

from paraflash.engine import runner
from paraflash.engine.engine import EngineCore
from paraflash.engine.sampling_params import SamplingParams
from paraflash.kernels.reference import attention

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
NARROW = GOLDEN / "narrow"
LAYERS, TOP_K = 10, 3


def prompt(length: int, seed: int = 0) -> list[int]:
    """Up to 200 ids at which the model makes no decision that is too close to call; other lengths begin differently."""
    clear = [32, 37, 38, 39, 41, 43, 44, 49, 53, 54, 55, 57]
    r = random.Random(clear[(length + seed) % len(clear)])
    return [r.randrange(3, 384) for _ in range(length)]


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **GREEDY, **more)


@pytest.fixture(scope="module")
def yardstick() -> Yardstick:
    return Yardstick(NARROW)


def assert_right(yardstick: Yardstick, ids: list[int], answer: Answer) -> None:
    """Prompt logits and generated tokens are those of a forward pass without caches."""
    want = yardstick.forward(ids + answer.tokens)
    sure = yardstick.sure_rows()
    assert sure > len(ids) / 2
    for at, row in enumerate(answer.rows[:sure]):
        assert np.abs(row - want[at].numpy()).max() < 1e-4, f"position {at} of {len(ids)}"
    for at, token in zip(range(len(ids) - 1, sure), answer.tokens, strict=False):
        assert want[at].max() - want[at, token] < 2e-4, f"token after position {at} of {len(ids)}"


# -- ranks without rows, and pads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pcp", [2, 4, 8])
def test_ranks_without_a_row_enter_every_collective(yardstick, pcp):
    """A prompt of 73 under a budget of 72 leaves a step with one row, on one rank of many."""
    with local_engine(NARROW, 1, pcp, max_num_batched_tokens=72) as core:
        answer = generate(core, {"r": (prompt(73), greedy(2, prompt_logprobs=1))})["r"]
        assert [sum(r.num_tokens for r in step.requests) for step in core.executor.steps] == [72, 1, 1]
    assert_right(yardstick, prompt(73), answer)


@pytest.mark.parametrize("pcp", [2, 8])
def test_a_request_that_some_ranks_have_no_row_of_keeps_the_others_candidates(yardstick, pcp):
    """One token of one request beside a long prompt in one step: candidate sets are kept by request, not by place."""
    short, long = prompt(1), prompt(90)
    with local_engine(NARROW, 1, pcp, max_num_batched_tokens=200) as core:
        params = greedy(3, prompt_logprobs=1)
        answers = generate(core, {"short": (short, params), "long": (long, params), "shorter": (prompt(2), params)})
        assert [r.num_tokens for r in core.executor.steps[0].requests] == [1, 90, 2]
    for name, ids in (("short", short), ("long", long), ("shorter", prompt(2))):
        assert_right(yardstick, ids, answers[name])


@pytest.mark.parametrize(("tp", "pcp"), [(1, 1), (2, 2), (1, 8)])
def test_a_tiny_prompt_writes_its_own_entries_and_nothing_else(tp, pcp):
    """Plans are made of the live rows, whatever the padded length: all other records keep their poison."""
    with local_engine(NARROW, tp, pcp) as core:
        generate(core, {"r": (prompt(3), greedy(1))})
        [request] = core.executor.steps[0].requests
        for runner in core.executor.runners:
            cache = runner.cache
            for owner in runner.model_config.kv_owners:
                per_block = 64 // owner.ratio
                mine = [int(request.block_ids[0]) * per_block + e for e in range(3 // owner.ratio)]
                for pool in (cache.latents[owner.index], cache.index_keys[owner.index]):
                    assert written(pool) == mine
            ring = [request.slot * 16 + p for p in range(3)]
            assert all(written(pool) == ring for pool in cache.rings)
            for rows in cache.open_rows.values():
                assert rows.isfinite().all(1).nonzero()[:, 0].tolist() == [request.slot]


def written(pool: Any) -> list[int]:
    """Slots of a poisoned pool that no longer hold NaN."""
    rows = pool.read(torch.arange(len(pool.storage) * pool.entries))
    return rows.isfinite().all(1).nonzero()[:, 0].tolist()


@pytest.mark.parametrize(("tp", "pcp"), [(1, 1), (1, 2), (2, 2), (1, 8)])
def test_pad_rows_are_not_routed(tp, pcp):
    """Over all ranks every live row reaches exactly its top-k experts, in every layer, and no other row does."""
    counted: Counter[int] = Counter()
    with local_engine(NARROW, tp, pcp, max_num_batched_tokens=19) as core:
        for runner in core.executor.runners:
            watch_experts(runner, counted)
        generate(core, {f"r{n}": (prompt(n), greedy(3)) for n in (1, 2, 5, 33)})
        rows = sum(r.num_tokens for step in core.executor.steps for r in step.requests)
    assert sum(counted.values()) == rows * TOP_K * LAYERS
    assert -1 not in counted and max(counted) < 8


def watch_experts(runner: Any, counted: Counter[int]) -> None:
    run = runner.kernels.experts

    def counting(h: Any, ids: torch.Tensor, weights: torch.Tensor, experts: Any, *rest: Any) -> Any:
        assert len(h) == len(ids) and (weights != 0).all()
        local = ids[(ids >= experts.first) & (ids < experts.first + experts.w1.shape[0])]
        counted.update(local.tolist())
        return run(h, ids, weights, experts, *rest)

    runner.kernels.experts = counting


def test_every_exchange_uses_the_group_of_its_dimension():
    """Three context parallel by two tensor parallel ranks: what splits rows goes over one, what splits weights over
    the other."""
    seen: dict[str, set[tuple[str, str]]] = {"tp": set(), "pcp": set()}
    with local_engine(NARROW, 2, 3, max_num_batched_tokens=40) as core:
        core.executor.call_all("start_collective_log")
        generate(core, {f"r{n}": (prompt(n), greedy(3)) for n in (1, 37, 70)})
        for entry in core.executor.call_all("collective_log")[5]:
            seen[entry.group].add((entry.op, entry.label))
    sums = {("all_reduce", label) for label in ("embed", "attention", "experts")}
    assert seen["tp"] == sums | {("all_gather", "logits")}
    assert {op for op, _ in seen["pcp"]} == {"all_gather", "reduce_scatter"}
    assert {label for op, label in seen["pcp"] if op == "reduce_scatter"} == {"experts"}
    assert {("all_gather", label) for label in ("window", "boundary", "entries", "experts", "sampled")} <= seen["pcp"]


# -- memory that nobody wrote ----------------------------------------------------------------------------------------


@contextmanager
def poisoned_workspaces() -> Iterator[None]:
    """torch.empty gives NaN (or the largest integer) instead of whatever was there."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all() and torch.zeros(2).new_empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("pcp", [1, 4])
def test_no_result_depends_on_memory_that_nobody_wrote(yardstick, pcp):
    """Many decode rows with long prefixes beside chunks, with caches and workspaces full of NaN."""
    lengths = [61, 62, 63, 64, 65, 66, 130, 1]
    params = greedy(6, prompt_logprobs=1)
    with poisoned_workspaces(), local_engine(NARROW, 1, pcp, max_num_seqs=8, max_num_batched_tokens=70) as core:
        answers = generate(core, {f"r{n}": (prompt(n), params) for n in lengths})
        core.executor.call_all("poison")  # all requests have ended: nothing of them may be read again
        answers["after"] = generate(core, {"after": (prompt(65), params)})["after"]
    for n in lengths:
        assert_right(yardstick, prompt(n), answers[f"r{n}"])
    assert answers["after"].tokens == answers["r65"].tokens


def test_limits_of_workspaces_change_nothing(yardstick):
    """Selection, attention and prompt log-probabilities work through rows in pieces where there are many."""
    ids = prompt(77)
    params = greedy(3, prompt_logprobs=2)
    with (
        mock.patch.object(attention, "QUERY_CHUNK_ELEMENTS", 700),
        mock.patch.object(attention, "CACHED_ELEMENTS", 700),
        mock.patch.object(runner, "LOGIT_ROWS", 7),
        mock.patch.object(LogitsRunner, "_prompt_logprobs", runner.ModelRunner._prompt_logprobs),
        local_engine(NARROW, 2, 2, max_num_batched_tokens=60) as core,
    ):
        answers = generate(core, {"r": (ids, params), "s": (prompt(30), greedy(9)), "t": (prompt(29), greedy(9))})
    want = yardstick.forward(ids).log_softmax(-1)
    for at, entry in enumerate(answers["r"].rows):
        assert entry.token_id == ids[at + 1] and at < yardstick.sure_rows()
        assert entry.logprob == pytest.approx(want[at, ids[at + 1]].item(), abs=1e-4)
        assert entry.top_logprobs == pytest.approx(want[at].topk(2).values.tolist(), abs=1e-4)
    assert len(answers["r"].rows) == len(ids) - 1
    for name, length in (("s", 30), ("t", 29)):
        assert_right(yardstick, prompt(length), answers[name])


# -- borders: pairs, chunks, blocks, n-grams -------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [5, 6, 40])
@pytest.mark.parametrize("pcp", [1, 2])
def test_the_first_ratio_2_groups_of_a_prompt_close_right(yardstick, pcp, budget):
    """Lengths 1 to 5 in both parities, then decoding over the next closings, several requests in one step."""
    prompts = {f"r{n}": (prompt(n), greedy(5, prompt_logprobs=1)) for n in range(1, 6)}
    with local_engine(NARROW, 1, pcp, max_num_seqs=5, max_num_batched_tokens=budget) as core:
        answers = generate(core, prompts)
    for name, (ids, _) in prompts.items():
        assert_right(yardstick, ids, answers[name])


@pytest.mark.parametrize("rounding", ["none", "trained"])
@pytest.mark.parametrize("length", [6, 63, 64])
def test_decoding_token_by_token_equals_a_prefill_of_the_same_tokens(length, rounding):
    with local_engine(NARROW, kv_cache_rounding=rounding, max_num_batched_tokens=256) as core:
        decoded = generate(core, {"decoded": (prompt(length), greedy(40))})["decoded"].tokens
        whole = generate(core, {"whole": (prompt(length) + decoded, greedy(1, prompt_logprobs=1))})["whole"]
    rows = np.stack(whole.rows[length - 1 :])
    if rounding == "none":
        assert rows.argmax(1).tolist() == decoded
    else:  # a value at a border of the rounding may move a row
        assert (rows.argmax(1) == decoded).mean() > 0.9


@pytest.mark.parametrize("length", [65, 128, 129, 191, 192, 193])
@pytest.mark.parametrize("pcp", [1, 2])
def test_a_resent_prompt_computes_at_least_its_last_window(pcp, length):
    """Also where the whole prompt is in cached blocks: some rows are left to run, and entries are not made twice."""
    options = dict(enable_prefix_caching=True, swa_bounded_replay=True, max_num_batched_tokens=128)
    with local_engine(NARROW, 1, pcp, **options) as core:
        first = generate(core, {"first": (prompt(length), greedy(4))})["first"]
        before = len(core.executor.steps)
        again = generate(core, {"again": (prompt(length), greedy(4))})["again"]
        [request] = core.executor.steps[before].requests
    hit = (length - 1) // 64 * 64
    assert (first.cached, again.cached, len(again.tokens)) == (0, hit, 4)
    assert (request.num_computed, request.kv_write_start, request.window_start) == (hit - 16, hit, hit - 16)
    assert request.num_tokens == length - hit + 16 and request.sample is not None


@pytest.mark.parametrize("pcp", [1, 2])
def test_engram_rows_span_chunks_and_start_with_pads(yardstick, pcp):
    """Every chunk size from 1 to 7 cuts some 4-gram; rows before the start of the sequence hash as pads."""
    ids = prompt(23)
    want = yardstick.hashes(torch.tensor(ids)).numpy()
    with local_engine(NARROW, 1, pcp) as core:
        core.executor.call_all("start_probe", ["engram.hash_ids"])
        for chunk in range(1, 8):
            core.scheduler.budget = chunk
            generate(core, {"r": (ids, greedy(1))})
            parts = [iter(seen["engram.hash_ids"]) for seen in core.executor.call_all("take_probe")]
            got = np.concatenate([in_order(core, step, [next(p) for p in parts]) for step in core.executor.steps])
            assert np.array_equal(got, want), f"chunks of {chunk}"
            core.executor.steps.clear()
        for runner in core.executor.runners:
            runner.transformer.probe = lambda name, value: None


def in_order(core: EngineCore, step: Any, parts: list[np.ndarray]) -> np.ndarray:
    """What the ranks have of a step's rows, in global order."""
    from paraflash.engine.runner import spans_of
    from paraflash.model.batch import plan_of

    plan = plan_of(spans_of(step.requests), len(parts))
    result = np.zeros((sum(map(len, plan.rows)), *parts[0].shape[1:]), parts[0].dtype)
    for rows, part in zip(plan.rows, parts, strict=True):
        result[rows] = part
    return result


# -- requests that come and go ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [0, 1, 2])
@pytest.mark.parametrize("pcp", [1, 2])
def test_an_abort_with_a_chunk_in_flight_shows_no_token_and_leaks_no_block(yardstick, pcp, chunk):
    """The prompt of 100 takes three chunks; the last one would give a token."""
    with local_engine(NARROW, 1, pcp, max_num_batched_tokens=41, enable_prefix_caching=True) as core:
        core.add_request("other", prompt(7), greedy(8))
        tokens = [t for d in core.step() for t in d.token_ids]
        free = core.scheduler.pool.num_free
        core.add_request("r", prompt(100), greedy(5))
        execute, calls = core.executor.execute, []

        def aborting(step: Any) -> Any:
            output = execute(step)
            calls.append(step)
            if len(calls) == chunk + 1:
                assert any(r.request_id == "r" for r in step.requests)
                core.abort("r")
                assert core.scheduler.pool.num_free == free
                core.add_request("next", prompt(60), greedy(4))
            return output

        core.executor.execute = aborting
        deltas = []
        while core.has_unfinished():
            deltas += core.step()
        assert {d.request_id for d in deltas} == {"other", "next"}
        assert core.scheduler.pool.num_free == core.scheduler.pool.capacity
    told = {name: [t for d in deltas if d.request_id == name for t in d.token_ids] for name in ("other", "next")}
    assert_right(yardstick, prompt(7), Answer(tokens + told["other"]))
    assert_right(yardstick, prompt(60), Answer(told["next"]))


@pytest.mark.parametrize(("tp", "pcp"), [(1, 2), (2, 2)])
def test_more_requests_than_seats_all_finish_with_their_own_tokens(yardstick, tp, pcp):
    prompts = {f"r{i}": (prompt(11 + 7 * i), greedy(2 + i % 4)) for i in range(9)}
    with local_engine(NARROW, tp, pcp, max_num_seqs=2, num_gpu_blocks_override=3) as core:
        answers = generate(core, prompts)
        assert max(len(step.requests) for step in core.executor.steps) == 2
    for name, (ids, params) in prompts.items():
        assert len(answers[name].tokens) == params.max_tokens
        assert_right(yardstick, ids, answers[name])


@pytest.mark.parametrize("pcp", [1, 2])
def test_running_requests_wait_one_step_for_a_token_while_long_prompts_prefill(pcp):
    limits = dict(long_prefill_token_threshold=10, max_num_partial_prefills=1, max_num_batched_tokens=24)
    with local_engine(NARROW, 1, pcp, max_num_seqs=8, **limits) as core:
        for name in "abc":
            core.add_request(name, prompt(4, "abc".index(name)), greedy(50))
        arrivals = {4: ("long1", 150), 6: ("long2", 120), 9: ("short", 8)}
        told: dict[str, list[int]] = {}  # request -> steps in which it got a token
        step = 0
        while core.has_unfinished():
            if step in arrivals:
                name, length = arrivals[step]
                core.add_request(name, prompt(length), greedy(2))
            for delta in core.step():
                told.setdefault(delta.request_id, []).append(step)
            parts = [r for r in core.executor.steps[-1].requests if r.is_prefill]
            assert all(r.num_tokens <= 10 for r in parts)
            assert sum(not r.is_last_chunk for r in parts) <= 1
            step += 1
    assert all(np.diff(told[name]).tolist() == [1] * 49 for name in "abc")
    assert told["short"] == [9, 10], "a short prompt does not wait behind long ones"
    # 15 chunks of the first from step 4 on; the second starts beside the last of these and takes 12.
    assert told["long1"][0] == 4 + 14 and told["long2"][0] == told["long1"][0] + 11


# -- other numbers ---------------------------------------------------------------------------------------------------


def logits_of(folder: Path, tp: int = 1, pcp: int = 1, **options: Any) -> torch.Tensor:
    """Logits [rows, vocab] of two prompts."""
    params = greedy(2, prompt_logprobs=1)
    ids = [[t % 270 for t in prompt(n)] for n in (90, 47)]
    with local_engine(folder, tp, pcp, **options) as core:
        answers = generate(core, {"a": (ids[0], params), "b": (ids[1], params)})
    rows = torch.from_numpy(np.stack(answers["a"].rows + answers["b"].rows)).float()
    assert rows.isfinite().all()
    return rows


def distance(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """One minus the cosine of logits by row: mean and largest."""
    away = 1 - torch.nn.functional.cosine_similarity(got, want)
    return away.mean().item(), away.max().item()


SMOOTH = dict(  # every entry and every expert is chosen, so that small errors stay small
    num_hidden_layers=5, compress_ratios=[0, 2, 2, 1, 1], kv_source_layer_ids=[1, 3], index_source_layer_ids=[1, 3],
    candidate_source_layer_id=-1, index_topk=90, n_routed_experts=2, num_experts_per_tok=2, engram_layer_ids=[0],
    sliding_window=16, hidden_size=64, swiglu_limit=10.0,
)  # fmt: skip


@pytest.mark.parametrize(("head", "rope", "index"), [(64, 16, 64), (512, 64, 128), (96, 32, 32), (32, 2, 32)])
def test_a_coarser_cache_record_moves_the_logits_as_little_as_its_precision(head, rope, index, tmp_path):
    """bfloat16 rows by 5e-6, fp8_ds_mla by 1e-3, the trained rounding by 3e-3; a broken record by about 1."""
    sizes = dict(head_dim=head, qk_rope_head_dim=rope, index_head_dim=index)
    write_model(tmp_path, {**random_text_config(5), **SMOOTH, **sizes}, 5)
    want = logits_of(tmp_path)
    half = distance(logits_of(tmp_path, kv_cache_dtype="bfloat16"), want)
    fp8 = distance(logits_of(tmp_path, 1, 2, kv_cache_dtype="fp8_ds_mla"), want)
    trained = distance(logits_of(tmp_path, kv_cache_dtype="nvfp4_ds_mla", kv_cache_rounding="trained"), want)
    assert half[0] < 3e-5 and half[1] < 5e-4
    assert 1e-4 < fp8[0] < 2e-3 and fp8[1] < 3e-2
    assert fp8[0] < trained[0] < 1e-2 and trained[1] < 6e-2


def test_bfloat16_differs_no_more_between_context_parallel_sizes_than_between_tensor_parallel_sizes():
    options = dict(dtype="bfloat16", kv_cache_dtype="bfloat16", kv_cache_rounding="trained")
    want = logits_of(GOLDEN / "narrow_fp8", **options)
    away = {
        (tp, pcp): (logits_of(GOLDEN / "narrow_fp8", tp, pcp, **options) - want).abs().mean().item()
        for tp, pcp in [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]
    }
    tensor = max(away[2, 1], away[4, 1])
    assert 0 < tensor < 0.5 * want.std()
    assert all(away[split] < 1.2 * tensor for split in [(1, 2), (1, 4), (2, 2)]), away
