"""The same logits, tokens and caches at every TP x PCP split, through the scheduler and the paged caches."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paraflash.checkpoint.memory import NotEnoughMemory
from paraflash.config.engine import EngineConfig
from paraflash.engine.engine import EngineCore
from paraflash.engine.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parent))
GOLDEN = Path(__file__).parent.parent / "data" / "golden"
TOPOLOGIES = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]
GREEDY = dict(temperature=0.0, ignore_eos=True)


@contextmanager
def engine(name: str, tp: int, pcp: int, rounding: str = "none", **options) -> Iterator[EngineCore]:
    """Every cache starts as NaN, so that a read of a row nobody wrote shows in the logits."""
    config = EngineConfig(
        model=str(GOLDEN / name),
        device="cpu",
        dtype="float32",
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        kv_cache_rounding=rounding,
        **{
            "kv_cache_dtype": "float32",
            "swa_bounded_replay": False,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": 40,
            "max_num_batched_tokens": 48,
            **options,
        },
    )
    core = EngineCore(config, runner_factory="logits_runner:LogitsRunner")
    try:
        core.executor.call_all("poison")
        yield core
    finally:
        core.shutdown()


def run(core: EngineCore, prompts: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, tuple[list[int], list]]:
    """(tokens, prompt logits rows) of each request."""
    for request_id, (ids, params) in prompts.items():
        core.add_request(request_id, ids, params)
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    rows: dict[str, list] = {name: [] for name in prompts}
    while core.has_unfinished():
        for delta in core.step():
            tokens[delta.request_id] += delta.token_ids
            rows[delta.request_id] += delta.prompt_logprobs or []
    return {name: (tokens[name], rows[name]) for name in prompts}


@pytest.mark.parametrize(
    "name,tp,pcp",
    [*((name, *topology) for name in ("narrow", "narrow_fp8", "wide") for topology in TOPOLOGIES), ("wide", 4, 2)],
)
def test_golden_logits_and_greedy_tokens_in_mode_r0(name, tp, pcp):
    golden = load_file(GOLDEN / name / "expected_plain.safetensors")
    prompts = {str(i): golden[f"prompt.{i}.input_ids"].tolist() for i in range(7)}
    with engine(name, tp, pcp) as core:
        params = SamplingParams(max_tokens=16, prompt_logprobs=1, **GREEDY)
        results = run(core, {key: (ids, params) for key, ids in prompts.items()})
        assert len(set(core.executor.call_all("cache_hash"))) == 1
    for key, (tokens, rows) in results.items():
        want = golden[f"prompt.{key}.logits"][:-1]
        if len(want):
            got = torch.from_numpy(np.stack(rows))
            assert (got - want).abs().max() < 1e-4, f"prompt {key}"
        margin = golden[f"prompt.{key}.greedy_margin"]
        sure = int((margin < 1e-4).nonzero()[0]) if (margin < 1e-4).any() else 16
        assert tokens[:sure] == golden[f"prompt.{key}.greedy"].tolist()[:sure], f"prompt {key}"


@pytest.mark.parametrize("tp,pcp", [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", ["narrow_fp8", "wide"])
def test_golden_greedy_tokens_in_mode_r_where_stable(name, tp, pcp):
    golden = load_file(GOLDEN / name / "expected.safetensors")
    stability = json.loads((GOLDEN / name / "stability.json").read_text())
    stable = [i for i, s in enumerate(stability) if s["stable"] and s["length"] <= 64]
    with engine(name, tp, pcp, "trained", kv_cache_dtype="nvfp4_ds_mla") as core:
        params = SamplingParams(max_tokens=16, **GREEDY)
        results = run(core, {str(i): (golden[f"prompt.{i}.input_ids"].tolist(), params) for i in stable})
    for i in stable:
        steps = stability[i]["greedy_steps_that_agree"]
        assert results[str(i)][0][:steps] == golden[f"prompt.{i}.greedy"].tolist()[:steps], f"prompt {i}"


@pytest.mark.parametrize("pcp", [1, 2, 4])
def test_every_chunk_budget_gives_the_same_greedy_tokens(pcp):
    golden = load_file(GOLDEN / "narrow" / "expected_plain.safetensors")
    ids, want = golden["prompt.6.input_ids"].tolist(), golden["prompt.6.greedy"].tolist()
    assert len(ids) == 130
    with engine("narrow", 1, pcp, enable_prefix_caching=False) as core:
        for budget in range(1, 41):
            core.scheduler.budget = budget
            params = SamplingParams(max_tokens=16, **GREEDY)
            assert run(core, {f"b{budget}": (ids, params)})[f"b{budget}"][0] == want, f"budget {budget}"


@pytest.mark.parametrize("pcp", [2, 4, 8])
def test_prompts_around_the_number_of_ranks_equal_one_rank(pcp):
    lengths = sorted({1, 2, pcp - 1, pcp, pcp + 1, 2 * pcp - 1, 2 * pcp + 1})
    chosen = random.Random(3)
    prompts = {
        str(n): ([chosen.randrange(3, 384) for _ in range(n)], SamplingParams(max_tokens=5, **GREEDY)) for n in lengths
    }
    with engine("narrow", 1, 1) as core:
        want = run(core, prompts)
    with engine("narrow", 1, pcp) as core:
        together = run(core, prompts)
        alone = {key: run(core, {key + "a": value})[key + "a"] for key, value in prompts.items()}
    assert together == want and alone == want


def mixed_workload(core: EngineCore, seed: int, after_step=lambda: None) -> dict[str, list[int]]:
    """Requests of many lengths that arrive, run together, are preempted and aborted at random."""
    chosen = random.Random(seed)
    tokens: dict[str, list[int]] = {}
    waiting = [
        (f"r{i}", [chosen.randrange(3, 384) for _ in range(chosen.choice([1, 2, 55, 60, 62, 90]))]) for i in range(16)
    ]
    aborted = {f"r{i}": chosen.randrange(1, 12) for i in (3, 8, 11)}  # request -> steps after which it is aborted
    step = 0
    while waiting or core.has_unfinished():
        for _ in range(chosen.randrange(3)):
            if waiting:
                name, ids = waiting.pop()
                tokens[name] = []
                core.add_request(name, ids, SamplingParams(max_tokens=chosen.randrange(5, 25), **GREEDY))
        for name in [n for n, left in aborted.items() if n in tokens and left <= 0]:
            core.abort(name)
            del aborted[name]
        if core.has_unfinished():
            for delta in core.step():
                tokens[delta.request_id] += delta.token_ids
            after_step()
        aborted = {n: left - (n in tokens) for n, left in aborted.items()}
        step += 1
    assert core.stats()["preemptions"] > 0, "the workload must be tight enough to preempt"
    return {name: t for name, t in tokens.items() if name not in ("r3", "r8", "r11")}


TIGHT = dict(num_gpu_blocks_override=6, max_num_batched_tokens=33, max_num_seqs=6, enable_prefix_caching=False)


@pytest.mark.parametrize("tp,pcp", [(1, 2), (2, 2), (1, 4)])
def test_a_mixed_workload_keeps_all_caches_equal_and_all_tokens_those_of_one_rank(tp, pcp):
    with engine("narrow", 1, 1, **TIGHT) as core:
        want = mixed_workload(core, 5)
    with engine("narrow", tp, pcp, check_caches=True, **TIGHT) as core:
        assert mixed_workload(core, 5) == want


@pytest.mark.parametrize("tp,pcp", [(2, 1), (1, 2), (1, 4), (2, 2)])
def test_all_ranks_issue_the_same_collectives_with_the_same_shapes(tp, pcp):
    seen = []
    with engine("narrow", tp, pcp, **TIGHT) as core:
        core.executor.call_all("start_collective_log")

        def compare() -> None:
            logs = core.executor.call_all("collective_log")
            assert all(log == logs[0] for log in logs[1:])
            seen.extend(logs[0])

        mixed_workload(core, 7, compare)
    groups = {entry.group for entry in seen}
    assert groups == {name for name, size in (("tp", tp), ("pcp", pcp)) if size > 1}, "none on a group of one rank"


@pytest.mark.parametrize("pcp", [2, 4])
def test_a_decode_step_exchanges_what_its_layers_store_in_one_gather(pcp):
    with engine("narrow", 1, pcp) as core:
        for i in range(3):
            core.add_request(str(i), list(range(5 + i, 30)), SamplingParams(max_tokens=20, **GREEDY))
        core.step()
        core.step()
        core.executor.call_all("start_collective_log")
        core.step()
        log = core.executor.call_all("collective_log")[0]
    layers = 10
    assert Counter(entry.label for entry in log) == {"experts": 2 * layers, "outbox": 1, "sampled": 1, "logits": 1}


def test_the_window_exchange_sends_a_fraction_of_a_full_gather():
    limits = {"text_config": {"max_position_embeddings": 4096, "sliding_window": 128}}
    ids = [random.Random(1).randrange(3, 384) for _ in range(2048)]
    options = dict(hf_overrides=limits, max_num_batched_tokens=2048, kv_cache_dtype="nvfp4_ds_mla")
    with engine("narrow", 1, 4, "trained", **options) as core:
        core.executor.call_all("start_collective_log")
        run(core, {"a": (ids, SamplingParams(max_tokens=1, **GREEDY))})
        log = core.executor.call_all("collective_log")[0]
    layers, record = 10, 64 + 2
    sent = sum(entry.nbytes for entry in log if entry.label == "window")
    # Two chunks of 256 rows a rank send 127 rows each; all ranks are padded to that.
    assert sent == layers * 2 * 127 * record
    full = layers * 512 * record
    print(f"window exchange of one 2,048-token prefill at PCP 4: {sent} bytes a rank; a full gather: {full}")
    assert sent < full / 2


def test_a_kv_cache_that_cannot_fit_is_refused_with_the_numbers():
    needed = r"a KV cache of 100000001 blocks and 8 windows: [\d.]+ GiB are needed"
    with pytest.raises(NotEnoughMemory, match=needed), engine("narrow", 1, 1, num_gpu_blocks_override=10**8):
        pass
