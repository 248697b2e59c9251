"""Steps that are made before the result of the one before is known: every request gets the tokens it gets otherwise."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_model import EOS, MIX, Rig, answer, mixed_prompts, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import local_engine
from random_models import random_text_config, write_model
from test_graphs import counts_of, engine_of

from paraflash.config.engine import EngineConfig
from paraflash.engine.engine import EngineCore
from paraflash.engine.messages import StepInput, step_of
from paraflash.engine.request import Delta
from paraflash.engine.sampling_params import SamplingParams, StructuredOutputs

GOLDEN = Path(__file__).parent.parent / "data" / "golden"


class AheadRig(Rig):
    """As `Rig`, with a step made ahead wherever the scheduler makes one. `ahead` counts them."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.sent: deque[StepInput] = deque()
        self.drawn: dict[str, int] = {}
        self.ahead = 0

    def finish_step(self, step: StepInput) -> list[Delta]:
        pending = step.columns.pending()
        tokens = [self.drawn[step.columns.request_ids[i]] for i in pending]
        output = self.model.execute(step_of(step.step_id, step.columns.with_tokens(pending, np.array(tokens, int))))
        self.drawn = {name: sampled.token_id for name, sampled in output.sampled.items()}
        deltas = self.scheduler.update(step, output)
        for delta in deltas:
            before = self.last.get(delta.request_id)
            assert before is None or before.finish_reason is None, "nothing follows the last token"
            self.tokens[delta.request_id] += delta.token_ids
            assert delta.num_output_tokens == len(self.tokens[delta.request_id])
            self.last[delta.request_id] = delta
        return deltas

    def advance(self, abort: str = "") -> None:
        """One call of the engine's step, with an abort while steps are in flight."""
        if not self.sent:
            step = self.scheduler.schedule()
            assert step is not None
            self.sent.append(step)
        following = self.scheduler.schedule_ahead()
        if following is not None:
            self.sent.append(following)
            self.ahead += 1
        assert len(self.sent) <= 2
        self.scheduler.abort(abort)
        self.finish_step(self.sent.popleft())

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_unfinished():
                break
            self.advance()
        while self.sent:
            assert self.finish_step(self.sent.popleft()) == []
        assert not self.scheduler.has_unfinished()


@given(**MIX, stops=st.dictionaries(st.integers(0, 7), st.integers(0, 30), max_size=4))
@settings(max_examples=150, deadline=None)
def test_any_mix_finishes_with_the_right_tokens(
    lengths, budget, seats, num_blocks, threshold, same, replay, stops, aborts
):
    rig = AheadRig(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=seats,
        long_prefill_token_threshold=threshold,
        swa_bounded_replay=replay,
    )
    prompts = mixed_prompts(lengths, same)
    for i, (name, ids) in enumerate(prompts.items()):
        rig.add(name, ids, max_tokens=70)
        if i in stops:
            rig.model.script[name] = [*answer(ids, stops[i]), EOS]
    aborted = set()
    for number in range(10000):
        if not rig.scheduler.has_unfinished():
            break
        name = f"r{aborts.get(number)}"
        aborted |= {name} if rig.scheduler.get(name) else set()
        rig.advance(name)
    rig.run()
    rig.assert_answers({name: rig.model.script.get(name) or answer(ids, 70) for name, ids in prompts.items()}, aborted)


def test_decoding_is_always_one_step_ahead():
    rig = AheadRig(num_blocks=40)
    for i in range(3):
        rig.add(f"r{i}", prompt(20, i), max_tokens=30)
    rig.run()
    assert len(rig.model.steps) == 30 and rig.ahead == 29, "no step more, since the last token is known to be the last"
    assert rig.tokens["r1"] == answer(prompt(20, 1), 30)


def test_a_stop_costs_one_row_whose_result_is_dropped():
    rig = AheadRig(num_blocks=40)
    rig.add("r", prompt(20), max_tokens=30)
    rig.model.script["r"] = [*answer(prompt(20), 4), EOS]
    rig.run()
    assert rig.tokens["r"] == rig.model.script["r"] and rig.last["r"].finish_reason == "stop"
    assert len(rig.model.steps) == 6
    rig.assert_all_returned()


def test_blocks_run_out_and_a_request_gives_way_in_synchronous_order():
    rig = AheadRig(num_blocks=7)
    for name in ("a", "b"):
        rig.add(name, prompt(60, ord(name)), max_tokens=250)
    rig.run()
    assert rig.scheduler.stats().preemptions > 0
    for name in ("a", "b"):
        assert rig.tokens[name] == answer(prompt(60, ord(name)), 250)
    rig.assert_all_returned()


@pytest.mark.parametrize(
    "rule",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"prompt_logprobs": 1},
    ],
    ids=lambda rule: next(iter(rule)),
)
def test_what_depends_on_results_runs_in_synchronous_order(rule: dict[str, Any]) -> None:
    rig = AheadRig(num_blocks=40)
    rig.add("r", prompt(200), max_tokens=5, **rule)
    rig.add("beside", prompt(5), max_tokens=5)
    rig.run()
    assert rig.ahead <= 1, "the other request, when this one is done"
    assert rig.tokens["r"] == answer(prompt(200), 5)


def workload(vocab: int, seed: int) -> list[tuple[str, list[int], SamplingParams]]:
    r = random.Random(seed)
    shared = [r.randrange(3, vocab) for _ in range(70)]
    found = []
    for i in range(9):
        ids = (shared if r.random() < 0.4 else []) + [r.randrange(3, vocab) for _ in range(r.choice([1, 3, 30, 66]))]
        rules: dict[str, Any] = r.choice([{"temperature": 0.0}, {"temperature": 1.3, "top_p": 0.9, "seed": i}, {}])
        rules |= r.choice([{}, {}, {"logprobs": 1}, {"min_tokens": 5}, {"presence_penalty": 0.7}])
        stops = [r.randrange(3, vocab) for _ in range(vocab // 12)]
        found.append(
            (
                f"r{i}",
                ids,
                SamplingParams(
                    max_tokens=r.choice([6, 7, 25] if "min_tokens" in rules else [1, 7, 25]),
                    stop_token_ids=stops,
                    **rules,
                ),
            ),
        )
    return found


Result = dict[str, tuple[list[int], str | None, list[float]]]


def generate(core: EngineCore, seed: int, vocab: int = 270, ends: list[str] | None = None) -> Result:
    """Requests come while others run; one is aborted after its third token."""
    waiting, r = workload(vocab, seed), random.Random(seed)
    found: Result = {name: ([], None, []) for name, _, _ in waiting}
    while waiting or core.has_unfinished():
        if waiting and (r.random() < 0.5 or not core.has_unfinished()):
            core.add_request(*waiting.pop(0))
        for delta in core.step():
            tokens, _, values = found[delta.request_id]
            tokens += delta.token_ids
            values += [x.logprob for x in delta.logprobs or []]
            found[delta.request_id] = (tokens, delta.finish_reason, values)
            if delta.request_id == "r4" and len(tokens) == 3 and delta.finish_reason is None:
                core.abort("r4")
                found["r4"] = (tokens, "abort", values)
    if ends is not None:
        ends += [reason or "" for _, reason, _ in found.values()]
    return found


def check_same(found: Result, wanted: Result) -> None:
    for name, (tokens, reason, values) in wanted.items():
        assert found[name][:2] == (tokens, reason), name
        assert np.allclose(found[name][2], values, atol=1e-4)


@pytest.mark.parametrize(("tp", "pcp"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("seed", range(600, 604))
def test_an_engine_gives_the_same_tokens(seed: int, tp: int, pcp: int, tmp_path: Path) -> None:
    write_model(tmp_path, random_text_config(seed, tp, pcp), seed)
    options: dict[str, Any] = {
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 8 if seed % 2 else 24,
        "enable_prefix_caching": True,
        "check_caches": False,
    }
    with local_engine(tmp_path, tp, pcp, **options) as core:
        ends: list[str] = []
        wanted = generate(core, seed, ends=ends)
    assert {"stop", "length"} <= set(ends)
    with local_engine(tmp_path, tp, pcp, async_scheduling=True, **options) as core:
        check_same(generate(core, seed), wanted)
        steps = core.executor.steps
        assert sum(bool(step.columns.pending()) for step in steps) > len(steps) // 4
        assert not core._sent and core.scheduler.pool.num_free == core.scheduler.pool.capacity


@pytest.mark.parametrize("position", [0, 5])
def test_a_last_token_does_not_wait_for_the_step_sent_after_it(position: int, tmp_path: Path) -> None:
    write_model(tmp_path, random_text_config(600, 1, 1), 600)
    rules: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    with local_engine(tmp_path, 1, 1, async_scheduling=True, check_caches=False) as core:
        core.add_request("free", [5, 6, 7], SamplingParams(max_tokens=position + 1, **rules))
        tokens: list[int] = []
        while core.has_unfinished():
            tokens += [token for delta in core.step() for token in delta.token_ids]
        count = tokens.index(tokens[-1]) + 1
        before = len(core.executor.steps)
        core.add_request("r", [5, 6, 7], SamplingParams(max_tokens=30, stop_token_ids=[tokens[-1]], **rules))
        ends = [delta.finish_reason for _ in range(count) for delta in core.step()]
        assert ends == [None] * (count - 1) + ["stop"]
        assert len(core.executor.steps) - before == count, "the step that was sent before the end was known"
        assert core.has_unfinished() and core.step() == [] and not core.has_unfinished()
        assert core.scheduler.pool.num_free == core.scheduler.pool.capacity


@pytest.mark.parametrize(("seed", "pcp", "seats"), [(604, 1, 1), (608, 2, 4), (606, 3, 2)])
def test_recorded_passes_take_the_tokens_that_a_step_left_open(seed: int, pcp: int, seats: int, tmp_path: Path) -> None:
    write_model(tmp_path, random_text_config(seed, 1, pcp), seed)
    options: dict[str, Any] = {
        "max_num_seqs": seats,
        "num_gpu_blocks_override": 6,
        "enable_prefix_caching": True,
        "check_caches": False,
    }
    with local_engine(tmp_path, 1, pcp, **options) as core:
        wanted = generate(core, seed)
    with engine_of(tmp_path, 1, pcp, async_scheduling=True, **options) as core:
        check_same(generate(core, seed), wanted)
        counts_of(core)  # all ranks record and replay the same steps
        launched = zip(core.executor.steps, core.executor.runners[0].launches, strict=True)
        assert sum(bool(step.columns.pending()) and pass_number > 0 for step, pass_number in launched) > 2
        assert core.scheduler.pool.num_free == core.scheduler.pool.capacity


@pytest.mark.parametrize(("tp", "pcp"), [(1, 1), (2, 1), (1, 2)])
def test_worker_processes_give_the_same_tokens(tp: int, pcp: int) -> None:
    def tokens(ahead: bool) -> Result:
        config = EngineConfig(
            model=str(GOLDEN / "narrow"),
            device="cpu",
            dtype="float32",
            tensor_parallel_size=tp,
            prefill_context_parallel_size=pcp,
            kv_cache_dtype="float32",
            kv_cache_rounding="none",
            swa_bounded_replay=False,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            num_gpu_blocks_override=10,
            async_scheduling=ahead,
        )
        core = EngineCore(config)
        try:
            found = generate(core, 7)
            grammar = SamplingParams(max_tokens=6, structured_outputs=StructuredOutputs(choice=["yes", "no"]))
            core.add_request("g", [5, 6, 7], grammar)
            core.add_request("plain", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
            for name in ("g", "plain"):
                found[name] = ([], None, [])
            while core.has_unfinished():
                for delta in core.step():
                    found[delta.request_id] = (found[delta.request_id][0] + delta.token_ids, delta.finish_reason, [])
            assert core.executor.call_all("cache_hash"), "nothing is in flight"
            core.add_request("gone", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
            core.step()
            core.step()
            core.abort("gone")  # a step of it is in flight where the engine runs ahead
            while core.has_unfinished():
                assert core.step() == []
            assert core.executor.call_all("cache_hash"), "nothing is in flight"
            return found
        finally:
            core.shutdown()

    check_same(tokens(True), tokens(False))
