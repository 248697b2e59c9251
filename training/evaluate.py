"""Accuracy on the test problems at five TP x PCP splits, with chunked prefill, through the LLM API.

`python -m training.evaluate` prints one row a split: right answers of every task and in all, and how many replies
differ from the first split's. It ends with exit code 1 if a task misses its target or the splits' counts are further
apart than 1 in 1,000 asked. Long prompts take nearly all of the time, so fewer problems of `pairs`, `recall` and `copy`
are asked than of the others; `--full` asks all 1,200.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from training.tasks import TASKS
from training.vocabulary import ASSISTANT, BOS, END_THINK, USER

PROBLEMS = Path(__file__).parents[1] / "tests" / "data" / "miniature"
CHECKPOINT = PROBLEMS / "checkpoint"
SPLITS = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4))
ASKED = {"pairs": 60, "recall": 60, "ngram": 200, "copy": 100, "sort": 200, "arithmetic": 200}
TARGETS = {"pairs": 95, "recall": 95, "ngram": 95, "copy": 95, "sort": 95, "arithmetic": 80}  # per cent
SPARE_TOKENS = 4  # a reply may be so much longer than the right one before it is cut
SHOWN_IDS = 20
# A step takes pieces of several prompts, so that it is large and yet every long prompt (500 tokens and more) comes in
# at least two chunks. Prompts share no prefix: caching would find nothing.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "kv_cache_rounding": "trained",
    "kv_cache_dtype": "float32",  # holds the rounded values as they are, and is read faster than the packed records
    "max_num_batched_tokens": 2048,
    "long_prefill_token_threshold": 480,
    "max_num_seqs": 128,
    "max_model_len": 4096,
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 192 << 20,
    "step_timeout": 60.0,  # ranks may have to share their cores with others
}


@dataclass(frozen=True)
class Problem:
    id: str
    task: str
    question: str
    answer: str


@dataclass
class Result:
    """One split's replies, in the order of the problems; `seconds` from its start to its end."""

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


def request_of(tokenizer: Any, problem: Problem) -> tuple[dict[str, list[int]], Any]:
    """A problem as one user turn without thinking, and greedy parameters with room for its answer."""
    from paraflash import SamplingParams

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    longest = len(ids(problem.answer)) + 1 + SPARE_TOKENS
    prompt = {"prompt_token_ids": ids(f"{BOS}{USER}{problem.question}{ASSISTANT}{END_THINK}")}
    return prompt, SamplingParams(temperature=0.0, max_tokens=longest)


def ask(llm: Any, problems: Sequence[Problem]) -> list[tuple[str, int, int]]:
    """Greedy replies of a running `LLM`: (text, prompt tokens, output tokens). Problems are sent in a mixed order, so
    that short prompts decode while long ones are read."""
    tokenizer = llm.get_tokenizer()
    order = Random(0).sample(range(len(problems)), len(problems))
    prompts, params = zip(*(request_of(tokenizer, problems[i]) for i in order), strict=True)
    outputs = dict(zip(order, llm.generate(list(prompts), list(params), use_tqdm=sys.stderr.isatty()), strict=True))
    found = [outputs[i] for i in range(len(problems))]
    return [(o.outputs[0].text, len(o.prompt_token_ids), len(o.outputs[0].token_ids)) for o in found]


def run_split(checkpoint: Path, problems: Sequence[Problem], tp: int, pcp: int, **options: Any) -> Result:
    """Starts LLMs at one split, asks, and ends them.

    A rank computes with one thread, since a model this small gains nothing from more. A split with fewer ranks than
    there are cores is therefore started several times, and each of the LLMs is asked a part of the problems.
    """
    from paraflash import LLM

    sizes = {"tensor_parallel_size": tp, "prefill_context_parallel_size": pcp}
    engines = min(len(problems), max(1, len(os.sched_getaffinity(0)) // (tp * pcp)))

    def ask_part(part: int) -> list[tuple[str, int, int]]:
        with LLM(str(checkpoint), **{**OPTIONS, **sizes, **options}) as llm:
            return ask(llm, problems[part::engines])

    start = time.perf_counter()
    with ThreadPoolExecutor(engines) as pool:
        parts = list(pool.map(ask_part, range(engines)))
    seconds = time.perf_counter() - start
    found = [parts[i % engines][i // engines] for i in range(len(problems))]
    replies = [text for text, _, _ in found]
    right = [is_right(p, r) for p, r in zip(problems, replies, strict=True)]
    return Result(f"TP{tp}/PCP{pcp}", replies, right, seconds, sum(n for _, n, _ in found), sum(n for *_, n in found))


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


def failures(problems: Sequence[Problem], results: Sequence[Result]) -> list[str]:
    """What a checkpoint must not show: a task below its target at some split, counts more than 1 in 1,000 apart."""
    found = []
    for result in results:
        for task, (right, asked) in counts(problems, result).items():
            if 100 * right < TARGETS.get(task, 0) * asked:
                found.append(f"{result.name}: {right} of {asked} {task} are right; the target is {TARGETS[task]} %")
    totals = [sum(r.right) for r in results]
    allowed = -(-len(problems) // 1000)
    if max(totals) - min(totals) > allowed:
        found.append(f"right answers differ by {max(totals) - min(totals)} between splits; {allowed} may differ")
    return found


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=CHECKPOINT, help="default: the one in the tests")
    parser.add_argument("--problems", type=positive, default=200, help="at most so many of each task")
    parser.add_argument("--full", action="store_true", help="all problems of the test set")
    parser.add_argument("--split", type=split_of, action="append", help="TPxPCP; repeat it; default: all five")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=OPTIONS["dtype"])
    parser.add_argument("--kv-cache-rounding", choices=("trained", "none"), default=OPTIONS["kv_cache_rounding"])
    parser.add_argument("--output", type=Path, help="write problems, replies and times as JSON")
    options = parser.parse_args()
    if not (options.checkpoint / "config.json").exists():
        parser.error(f"{options.checkpoint} holds no checkpoint; training/README.md tells how to make one")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the ranks, see run_split
    problems = read_problems(PROBLEMS, {t: min(200 if options.full else n, options.problems) for t, n in ASKED.items()})
    chosen = {name: getattr(options, name) for name in ("dtype", "kv_cache_rounding")}
    results = []
    start = time.perf_counter()
    for tp, pcp in options.split or SPLITS:
        results.append(run_split(options.checkpoint, problems, tp, pcp, **chosen))
        done = results[-1]
        rate = (done.prompt_tokens + done.output_tokens) / done.seconds
        print(f"{done.name}: {sum(done.right)} of {len(problems)} in {done.seconds:.0f} s, {rate:.0f} tokens/s")
    print(f"\n{len(problems)} problems at {len(results)} splits in {time.perf_counter() - start:.0f} s\n")
    print(table(problems, results))
    if options.output:
        report = {"options": chosen, "problems": [p.id for p in problems], "results": [asdict(r) for r in results]}
        options.output.write_text(json.dumps(report, indent=1), encoding="utf-8")
    wrong = failures(problems, results)
    print("\n" + ("\n".join(wrong) if wrong else "All targets are met."))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
