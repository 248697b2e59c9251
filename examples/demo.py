"""The demo: a trained miniature of the architecture, the same questions at four TP x PCP splits, the same tokens.

Serves the checkpoint of the test data (released format, six generated tasks, see docs/miniature.md), asks a long
question and one of each task at every split, prints the answers of one rank beside the right ones and a table of the
splits, and exits with 1 if any token differs or an answer is wrong. fp32, so that splits can be asked for equality.
Needs no GPU.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # training is a folder of scripts, not an installed package
from training.evaluate import CHECKPOINT, PROBLEMS, Problem, is_right, read_problems, request_of
from training.tasks import TASKS

TOPOLOGIES = [(1, 1), (2, 1), (1, 2), (2, 2)]
LONG_QUESTION = 5000  # characters at most; about 2,000 tokens
SHOWN = 60  # characters of a question


def questions() -> list[Problem]:
    """The longest recall problem of at most LONG_QUESTION characters, then the first problem of every task."""
    recall = read_problems(PROBLEMS, {"recall": 200})
    long = max((p for p in recall if len(p.question) <= LONG_QUESTION), key=lambda p: len(p.question))
    return [long, *read_problems(PROBLEMS, dict.fromkeys(TASKS, 1))]


def run_topology(problems: list[Problem], tp: int, pcp: int) -> dict[str, Any]:
    """Asks the problems at one split; returns texts, tokens and measurements."""
    from paraflash import LLM, SamplingParams

    with LLM(
        str(CHECKPOINT),
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        device="cpu",
        dtype="float32",
        kv_cache_dtype="float32",
        kv_cache_rounding="trained",
        max_num_batched_tokens=1024,
        max_num_seqs=16,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
    ) as llm:
        tokenizer = llm.get_tokenizer()
        prompts, params = map(list, zip(*(request_of(tokenizer, p) for p in problems), strict=True))
        llm.generate(prompts[-2:], params[-2:], use_tqdm=False)  # warm-up
        start = time.perf_counter()
        llm.generate(prompts[:1], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        prefill = len(prompts[0]["prompt_token_ids"]) / (time.perf_counter() - start)
        outputs = llm.generate(prompts, params)
        times = [o.metrics for o in outputs]
        decode = sum(len(o.outputs[0].token_ids) - 1 for o in outputs) / (
            max(t.last_token_time for t in times) - min(t.first_token_time for t in times)
        )
        return {
            "lengths": [len(o.prompt_token_ids) for o in outputs],
            "prefill": prefill,
            "ttft": sum(t.first_token_time - t.arrival_time for t in times) / len(times),
            "decode": decode,
            "cache_bytes": llm.core.info()["ranks"][0]["cache_bytes"],
            "texts": [o.outputs[0].text for o in outputs],
            "tokens": [o.outputs[0].token_ids for o in outputs],
        }


def main() -> int:
    from rich.markup import escape
    from rich.table import Table

    from paraflash.console import table_console

    console = table_console()
    problems = questions()
    results = {(tp, pcp): run_topology(problems, tp, pcp) for tp, pcp in TOPOLOGIES}
    base = results[TOPOLOGIES[0]]

    answers = Table(title="questions to the trained miniature, greedy answers at TP1/PCP1")
    for column in ("task", "tokens", "question", "answer", "right answer", "right"):
        answers.add_column(column, justify="right" if column == "tokens" else "left")
    right = [is_right(p, text) for p, text in zip(problems, base["texts"], strict=True)]
    for p, length, text, good in zip(problems, base["lengths"], base["texts"], right, strict=True):
        question = p.question if len(p.question) <= SHOWN else f"... {p.question[-SHOWN:]}"
        shown = (escape(" ".join(x.split())) for x in (question, text, p.answer))
        answers.add_row(p.task, str(length), *shown, "✓" if good else "NO")
    console.print(answers)

    splits = Table(title=f"one prompt of {base['lengths'][0]} tokens and {len(problems) - 1} shorter ones, CPU, fp32")
    for column in ("topology", "prefill tok/s", "mean TTFT", "decode tok/s", "cache MB a rank", "tokens equal"):
        splits.add_column(column, justify="left" if column == "topology" else "right")
    for (tp, pcp), r in results.items():
        splits.add_row(
            f"TP{tp}/PCP{pcp}",
            f"{r['prefill']:.0f}",
            f"{r['ttft']:.2f} s",
            f"{r['decode']:.1f}",
            f"{r['cache_bytes'] / 1e6:.1f}",
            "yes" if r["tokens"] == base["tokens"] else "NO",
        )
    console.print(splits)
    console.print("Ranks are processes on the same cores: the table shows equal tokens, not how GPUs scale.")
    return 0 if all(right) and all(r["tokens"] == base["tokens"] for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
