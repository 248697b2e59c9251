"""Every fault of the ablation changes what a random checkpoint computes, where it should and nowhere else."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from in_process import GREEDY, generate, local_engine

from paraflash.engine.sampling_params import SamplingParams
from paraflash.parallel.plan import make_plan
from training import ablation, evaluate, export, faults, tasks, testset
from training.model import Miniature
from training.train import prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("checkpoint")
    raw, config, _ = prepare(out, small=True)
    export.write_model(out, raw, Miniature(config, seed=5).parameters_by_name)
    return out


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return tasks.prompt_ids(testset.test_problems("pairs", 1)[0])[:421]


def _logits(folder: Path, ids: list[int], pcp: int, budget: int) -> torch.Tensor:
    """[positions - 1, vocab] of one prompt, without comparing caches: a fault may make them differ between ranks."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, **GREEDY)
    options = dict(max_num_batched_tokens=budget, check_caches=False)
    with local_engine(folder, pcp=pcp, **options) as core:
        core.executor.on_all(lambda runner: [part.view(torch.uint8).zero_() for part in runner.cache._parts()])
        return torch.stack([torch.from_numpy(row) for row in generate(core, {"a": (ids, params)})["a"].rows])


@pytest.fixture(scope="module")
def intact(folder: Path, prompt: list[int]) -> torch.Tensor:
    return _logits(folder, prompt, 1, 512)


# fault -> (PCP, tokens a step, whether an unsplit prompt of one chunk is untouched)
CASES = {
    "pairs_unlinked": (1, 512, False),
    "pairs_at_borders": (2, 101, True),
    "short_halo": (2, 512, True),
    "engram_reset": (1, 101, True),
    "candidates_shifted": (1, 512, False),
    "pads_routed": (2, 101, True),
}


@pytest.mark.parametrize("fault", CASES)
def test_fault_changes_logits(folder: Path, prompt, intact, fault: str, monkeypatch) -> None:
    pcp, budget, spares_whole = CASES[fault]
    faults.install(fault, monkeypatch.setattr)
    changed = (_logits(folder, prompt, pcp, budget) - intact).abs().amax(1)
    assert changed.isfinite().all()
    assert changed.max() > 1e-2 and (changed > 1e-3).sum() >= 20
    if spares_whole:
        torch.testing.assert_close(_logits(folder, prompt, 1, 512), intact, atol=1e-4, rtol=0)


def test_intact_engine_agrees_at_every_setting_of_the_cases(folder: Path, prompt, intact) -> None:
    for pcp, budget in {case[:2] for case in CASES.values()}:
        torch.testing.assert_close(_logits(folder, prompt, pcp, budget), intact, atol=1e-4, rtol=0)


def test_every_fault_of_the_table_exists_and_is_measured_once() -> None:
    used = [fault for setting in ablation.SETTINGS for fault in setting.faults]
    assert sorted(used) == sorted(faults.FAULTS) == sorted(f for f in ablation.MEANING if f)


def test_workers_start_with_the_fault(folder: Path) -> None:
    setting = ablation.Setting(1, 64, 4, ("pairs_unlinked",))
    problems = evaluate.read_problems(evaluate.PROBLEMS, {"copy": 2})
    replies = [ablation.measure(folder, setting, fault, problems).replies for fault in ("", "pairs_unlinked")]
    assert replies[0] != replies[1]


def test_replies_are_judged_by_what_the_task_asks() -> None:
    sum_ = evaluate.Problem("arithmetic-0", "arithmetic", "?", "2+3=<<2+3=5>>5 pens.\n#### 5")
    assert evaluate.is_right(sum_, "5 pens.\n#### 5") and not evaluate.is_right(sum_, "#### 15")
    assert not evaluate.is_right(sum_, "5")
    copy = evaluate.Problem("copy-0", "copy", "?", " fox lamp")
    assert evaluate.is_right(copy, " fox lamp") and not evaluate.is_right(copy, " fox lamp box")


def test_tables_count_right_answers_and_name_other_replies() -> None:
    problems = [evaluate.Problem(f"sort-{i}", "sort", "?", str(i)) for i in range(4)]
    one = evaluate.Result("TP1/PCP1", ["0", "1", "2", "x"], [True, True, True, False], 2.0, 8, 4)
    two = evaluate.Result("TP1/PCP2", ["0", "1", "y", "x"], [True, True, False, False], 3.0, 8, 4)
    text = evaluate.table(problems, [one, two])
    assert "| TP1/PCP1 | 3 / 4 | 3 / 4 | 75.00 % | 0 | 2 |" in text
    assert "| TP1/PCP2 | 2 / 4 | 2 / 4 | 50.00 % | 1 | 3 |" in text and text.endswith("to: sort-2")
    setting = ablation.SETTINGS[0]
    rows = [ablation.Row(setting, "", {"sort": (4, 4)}), ablation.Row(setting, "short_halo", {"sort": (1, 4)}, 3)]
    assert "| 25.0 |" in ablation.table(rows) and "| 75.0 (sort) | 3 |" in ablation.table(rows)


def test_a_missed_target_and_counts_too_far_apart_are_named() -> None:
    problems = [evaluate.Problem(f"sort-{i}", "sort", "?", "x") for i in range(20)]

    def result(name: str, right: int) -> evaluate.Result:
        return evaluate.Result(name, ["x"] * 20, [i < right for i in range(20)], 1.0, 1, 1)

    assert evaluate.failures(problems, [result("a", 20), result("b", 19)]) == []
    (low,) = evaluate.failures(problems, [result("a", 18), result("b", 19)])
    assert low == "a: 18 of 20 sort are right; the target is 95 %"
    many = [evaluate.Problem(f"arithmetic-{i}", "arithmetic", "?", "x") for i in range(20)]
    (apart,) = evaluate.failures(many, [result("a", 20), result("b", 18)])
    assert apart == "right answers differ by 2 between splits; 1 may differ"


def test_long_prompts_are_evaluated_in_chunks() -> None:
    problems = evaluate.read_problems(evaluate.PROBLEMS, {"pairs": 200, "recall": 200})
    shortest = min(len(tasks.encode(p.question)) for p in problems)
    assert evaluate.OPTIONS["long_prefill_token_threshold"] < shortest


def test_the_setting_for_borders_splits_every_pair() -> None:
    (setting,) = [s for s in ablation.SETTINGS if "pairs_at_borders" in s.faults]
    for start in range(0, 5 * setting.chunk, setting.chunk):
        lengths = np.full(3, setting.chunk)
        plan = make_plan(lengths, np.full(3, start), np.ones(3, bool), setting.pcp)
        for segment in (s for of_rank in plan.segments for s in of_rank):
            assert not [e for e in range(segment.start, segment.end - 1) if e % 2 == 0]


def test_the_setting_for_the_halo_has_segments_longer_than_it() -> None:
    (setting,) = [s for s in ablation.SETTINGS if "short_halo" in s.faults]
    copies = evaluate.read_problems(evaluate.PROBLEMS, {"copy": ablation.ASKED["copy"]})
    lengths = [len(tasks.encode(p.question)) for p in copies]
    assert max(lengths) <= setting.chunk
    assert sum(n // (2 * setting.pcp) > faults.HALO for n in lengths) > len(lengths) / 2
