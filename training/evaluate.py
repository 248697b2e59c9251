"""Accuracy on the test problems at five TP x PCP splits, with chunked prefill, through the LLM API.

`python -m training.evaluate CHECKPOINT` prints one row a split: right answers of every task and in all, and how many
replies differ from the first split's. Long prompts take nearly all of the time, so only the first 24 of each recall
task and 40 of copy are asked beside 200 of each of the others, 688 in all; `--full` asks all 1,200.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.tasks import TASKS
from training.vocabulary import ASSISTANT, BOS, END_THINK, USER

PROBLEMS = Path(__file__).parents[1] / "tests" / "data" / "miniature"
SPLITS = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4))
ASKED = {"pairs": 24, "recall": 24, "ngram": 200, "copy": 40, "sort": 200, "arithmetic": 200}
SPARE_TOKENS = 4  # a reply may be so much longer than the right one before it is cut
SHOWN_IDS = 20
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "kv_cache_rounding": "trained",
    "kv_cache_dtype": "float32",  # holds the rounded values as they are, and is read faster than the packed records
    "max_num_batched_tokens": 512,
    "max_num_seqs": 128,
    "max_model_len": 4096,
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 96 << 20,
}


@dataclass(frozen=True)
class Problem:
    id: str
    task: str
    question: str
    answer: str


@dataclass
class Result:
    """One split's replies, in the order of the problems; `seconds` without start-up."""

    name: str
    replies: list[str]
    right: list[bool]
    seconds: float
    prompt_tokens: int
    output_tokens: int


def read_problems(folder: Path, asked: dict[str, int]) -> list[Problem]:
    """The first `asked[task]` problems of every task. Raises ValueError where the file has fewer."""
    found = []
    for task, count in asked.items():
        lines = (folder / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
        if len(lines) < count:
            raise ValueError(f"{folder / task}.jsonl has {len(lines)} problems, not the {count} asked for")
        found += [Problem(task=task, **json.loads(line)) for line in lines[:count]]
    return found


def is_right(problem: Problem, reply: str) -> bool:
    """Word problems are judged by the number after `####`, all others by the whole reply."""
    if problem.task == "arithmetic":
        mark = "####"
        return mark in reply and reply.rpartition(mark)[2].strip() == problem.answer.rpartition(mark)[2].strip()
    return reply.strip() == problem.answer.strip()


def ask(llm: Any, name: str, problems: Sequence[Problem]) -> Result:
    """Greedy replies of a running `LLM`, each problem as one user turn without thinking."""
    from paraflash import SamplingParams

    tokenizer = llm.get_tokenizer()
    prompts, params = [], []
    for p in problems:
        text = f"{BOS}{USER}{p.question}{ASSISTANT}{END_THINK}"
        prompts.append({"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False).ids})
        longest = len(tokenizer.encode(p.answer, add_special_tokens=False).ids) + 1 + SPARE_TOKENS
        params.append(SamplingParams(temperature=0.0, max_tokens=longest))
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    seconds = time.perf_counter() - start
    replies = [o.outputs[0].text for o in outputs]
    return Result(
        name,
        replies,
        [is_right(p, r) for p, r in zip(problems, replies, strict=True)],
        seconds,
        sum(len(o.prompt_token_ids) for o in outputs),
        sum(len(o.outputs[0].token_ids) for o in outputs),
    )


def run_split(checkpoint: Path, problems: Sequence[Problem], tp: int, pcp: int, **options: Any) -> Result:
    """Starts an LLM at one split, asks, and ends it."""
    from paraflash import LLM

    sizes = {"tensor_parallel_size": tp, "prefill_context_parallel_size": pcp}
    with LLM(str(checkpoint), **{**OPTIONS, **sizes, **options}) as llm:
        return ask(llm, f"TP{tp}/PCP{pcp}", problems)


def counts(problems: Sequence[Problem], result: Result) -> dict[str, tuple[int, int]]:
    """Task -> (right, asked), and the same of all under "all"."""
    found = {}
    for task in [t for t in TASKS if any(p.task == t for p in problems)]:
        of_task = [r for p, r in zip(problems, result.right, strict=True) if p.task == task]
        found[task] = (sum(of_task), len(of_task))
    return found | {"all": (sum(result.right), len(result.right))}


def differing(problems: Sequence[Problem], first: Result, other: Result) -> list[str]:
    """Ids of the problems to which the two gave different replies."""
    return [p.id for p, a, b in zip(problems, first.replies, other.replies, strict=True) if a != b]


def table(problems: Sequence[Problem], results: Sequence[Result]) -> str:
    """One Markdown row a split, then the ids whose replies differ."""
    tasks = list(counts(problems, results[0]))[:-1]
    heads = ["Topology", *tasks, "Correct / total", "Accuracy", "Other replies", "Seconds"]
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
    notes = []
    for result in results:
        found = counts(problems, result)
        right, total = found["all"]
        other = differing(problems, results[0], result)
        cells = [result.name, *(f"{a} / {b}" for a, b in list(found.values())[:-1]), f"{right} / {total}"]
        cells += [f"{100 * right / total:.2f} %", str(len(other)), f"{result.seconds:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
        if other:
            shown = ", ".join(other[:SHOWN_IDS]) + (", ..." if len(other) > SHOWN_IDS else "")
            notes.append(f"{result.name} replies otherwise than {results[0].name} to: {shown}")
    return "\n".join([*lines, *([""] if notes else []), *notes])


def split_of(text: str) -> tuple[int, int]:
    """ "2x4" -> TP 2, PCP 4."""
    tp, _, pcp = text.partition("x")
    if not (tp.isdigit() and pcp.isdigit() and int(tp) and int(pcp)):
        raise argparse.ArgumentTypeError(f"{text!r} is no TPxPCP, as in 2x2")
    return int(tp), int(pcp)


def positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least 1")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--problems", type=positive, default=200, help="at most so many of each task")
    parser.add_argument("--full", action="store_true", help="all problems of the test set")
    parser.add_argument("--split", type=split_of, action="append", help="TPxPCP; repeat it; default: all five")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=OPTIONS["dtype"])
    parser.add_argument("--kv-cache-rounding", choices=("trained", "none"), default=OPTIONS["kv_cache_rounding"])
    parser.add_argument("--max-num-batched-tokens", type=positive, default=OPTIONS["max_num_batched_tokens"])
    parser.add_argument("--max-num-seqs", type=positive, default=OPTIONS["max_num_seqs"])
    parser.add_argument("--output", type=Path, help="write problems, replies and times as JSON")
    options = parser.parse_args()
    problems = read_problems(PROBLEMS, {t: min(200 if options.full else n, options.problems) for t, n in ASKED.items()})
    names = ("dtype", "kv_cache_rounding", "max_num_batched_tokens", "max_num_seqs")
    chosen = {name: getattr(options, name) for name in names}
    results = []
    for tp, pcp in options.split or SPLITS:
        results.append(run_split(options.checkpoint, problems, tp, pcp, **chosen))
        done = results[-1]
        rate = (done.prompt_tokens + done.output_tokens) / done.seconds
        print(f"{done.name}: {sum(done.right)} of {len(problems)} in {done.seconds:.0f} s, {rate:.0f} tokens/s")
    print("\n" + table(problems, results))
    if options.output:
        report = {"options": chosen, "problems": [p.id for p in problems], "results": [asdict(r) for r in results]}
        options.output.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
