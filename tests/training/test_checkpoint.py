"""The trained checkpoint answers short problems of every task right, at one rank and over two, from the engine."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
import pytest
from in_process import generate, local_engine

from paraflash.engine.sampling_params import SamplingParams
from paraflash.engine.tokenizer import load_tokenizer
from training import evaluate, export, faults, tasks
from training.testset import Turn

CHECKPOINT = evaluate.CHECKPOINT
ASKED, LEAST = 5, 4  # problems of each task, the shortest ones; how many must be right


def _problems() -> list[evaluate.Problem]:
    found = evaluate.read_problems(evaluate.PROBLEMS, dict.fromkeys(tasks.TASKS, 200))
    found.sort(key=lambda p: len(p.question))
    return [p for task in tasks.TASKS for p in [p for p in found if p.task == task][:ASKED]]


def _replies(problems: list[evaluate.Problem], pcp: int) -> list[str]:
    """Greedy texts; caches start as NaN and prompts of 500 tokens come in chunks."""
    prompts = {}
    for p in problems:
        turn = Turn(p.task, p.question, p.answer, tasks.ROUTE_ANY)
        most = len(tasks.encode(p.answer)) + 1 + evaluate.SPARE_TOKENS
        prompts[p.id] = (tasks.prompt_ids(turn), SamplingParams(temperature=0.0, max_tokens=most))
    options = dict(kv_cache_rounding="trained", max_num_batched_tokens=1024, long_prefill_token_threshold=300)
    with local_engine(
        CHECKPOINT, 1, pcp, **options, max_num_seqs=len(problems), num_gpu_blocks_override=200, check_caches=False
    ) as core:
        answers = generate(core, prompts)
    tokenizer = load_tokenizer(str(CHECKPOINT))
    return [tokenizer.decode(answers[p.id].tokens) for p in problems]


def test_short_problems_are_answered_right_and_alike_over_two_ranks() -> None:
    problems = _problems()
    alone, split = (_replies(problems, pcp) for pcp in (1, 2))
    for task in tasks.TASKS:
        right = sum(evaluate.is_right(p, r) for p, r in zip(problems, alone, strict=True) if p.task == task)
        assert right >= LEAST, f"{right} of {ASKED} {task}"
    assert split == alone


@pytest.mark.parametrize("fault, task", [("pairs_unlinked", "pairs"), ("candidates_shifted", "recall")])
def test_a_broken_part_costs_the_answers_of_its_task(fault: str, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above would see, and what the ablation shows at length."""
    problems = [p for p in _problems() if p.task == task]
    faults.install(fault, monkeypatch.setattr)
    right = sum(evaluate.is_right(p, r) for p, r in zip(problems, _replies(problems, 1), strict=True))
    assert right <= 1, f"{right} of {ASKED} {task}"


def test_the_checkpoint_is_small_and_has_a_card() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= export.MOST_BYTES
    assert "released format" in (CHECKPOINT / "README.md").read_text(encoding="utf-8")
