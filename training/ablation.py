"""What each fault costs: `python -m training.ablation` prints accuracy with one part broken at a time.

A fault is judged against the intact engine at the same setting, one at which the fault has something to break: a short
halo needs segments longer than it, a lost pair needs many borders, padding rows need ranks with unequal rows.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

from training.evaluate import (
    CHECKPOINT,
    PROBLEMS,
    Problem,
    Result,
    counts,
    differing,
    positive,
    read_problems,
    run_split,
)
from training.tasks import TASKS

ASKED = {"pairs": 24, "recall": 24, "ngram": 60, "copy": 60, "sort": 60, "arithmetic": 60}


@dataclass(frozen=True)
class Setting:
    """One way to run the problems of `tasks`, with at most `chunk` tokens of a prompt a step; every fault of it is
    compared with none."""

    pcp: int
    chunk: int
    requests: int
    faults: tuple[str, ...]
    tasks: tuple[str, ...] = TASKS

    @property
    def name(self) -> str:
        return f"TP1/PCP{self.pcp}, chunks of {self.chunk}, {self.requests} requests at a time"


SETTINGS = (
    # Copy problems in one chunk: their last segment, which rank 0 has, is longer than 64 rows, and rank 1 decodes too.
    Setting(2, 1024, 16, ("pairs_unlinked", "short_halo", "engram_reset", "candidates_shifted")),
    # Eight rows over four ranks: segments 0, 1, 2, 3-4, 5, 6, 7, so that the two tokens of every pair are on two ranks.
    Setting(4, 8, 24, ("pairs_at_borders",), ("pairs",)),
    # Five rows decode on four ranks: one of them has two, the others one and a pad.
    Setting(4, 480, 5, ("pads_routed",), ("ngram", "copy", "sort", "arithmetic")),
)
MEANING = {
    "": "nothing",
    "pairs_unlinked": "pair linkage off: the odd token of every ratio-2 group stands in for the even one",
    "pairs_at_borders": "pair linkage off where the even token is on another rank or in an earlier step",
    "short_halo": "halo of 64 rows instead of 127",
    "engram_reset": "Engram look-back reset at every border of a chunk (a decoded token is a chunk of one)",
    "candidates_shifted": "candidate filter off by one block",
    "pads_routed": "padding rows routed: the rows behind them get the experts' output of others",
}


@contextmanager
def broken(fault: str) -> Iterator[None]:
    """LLMs made inside start workers with the fault; "" leaves them intact."""
    from paraflash.engine import llm

    if not fault:
        yield
        return
    core = partial(llm.EngineCore, runner_factory=f"training.faults:broken_{fault}")
    with mock.patch.object(llm, "EngineCore", core):
        yield


def measure(checkpoint: Path, setting: Setting, fault: str, problems: Sequence[Problem]) -> Result:
    with broken(fault):
        return run_split(
            checkpoint,
            problems,
            1,
            setting.pcp,
            long_prefill_token_threshold=setting.chunk,
            max_num_seqs=setting.requests,
        )


@dataclass(frozen=True)
class Row:
    """One measurement: right and asked of each task; `others` replies differ from those of the intact engine."""

    setting: Setting
    fault: str
    found: dict[str, tuple[int, int]]
    others: int = 0


def table(rows: Sequence[Row]) -> str:
    """Markdown: accuracy of each task in per cent, the largest loss against the intact engine above, other replies."""
    heads = ["Broken", *TASKS, "Largest loss", "Other replies", "Setting"]
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
    intact: dict[str, float] = {}
    for row in rows:
        share = {t: 100 * row.found[t][0] / row.found[t][1] for t in TASKS if t in row.found}
        cells = [MEANING[row.fault], *(f"{share[t]:.1f}" if t in share else "" for t in TASKS)]
        if row.fault:
            task = max(share, key=lambda t: intact[t] - share[t])
            cells += [f"{intact[task] - share[task]:.1f} ({task})", str(row.others)]
        else:
            intact = share
            cells += ["", ""]
        lines.append("| " + " | ".join([*cells, row.setting.name]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=CHECKPOINT, help="default: the one in the tests")
    parser.add_argument("--problems", type=positive, default=200, help="at most so many of each task")
    parser.add_argument("--fault", choices=[f for f in MEANING if f], action="append", help="only these; repeat it")
    parser.add_argument("--output", type=Path, help="write the counts as JSON")
    options = parser.parse_args()
    if not (options.checkpoint / "config.json").exists():
        parser.error(f"{options.checkpoint} holds no checkpoint; training/README.md tells how to make one")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the ranks, see run_split
    rows: list[Row] = []
    start = time.perf_counter()
    for setting in SETTINGS:
        faults = [f for f in setting.faults if options.fault is None or f in options.fault]
        problems = read_problems(PROBLEMS, {task: min(ASKED[task], options.problems) for task in setting.tasks})
        intact = None
        for fault in ["", *faults] if faults else []:
            result = measure(options.checkpoint, setting, fault, problems)
            intact = intact or result
            rows.append(Row(setting, fault, counts(problems, result), len(differing(problems, intact, result))))
            print(f"{fault or 'intact'}, {setting.name}: {rows[-1].found} in {result.seconds:.0f} s", flush=True)
    asked = ", ".join(f"{min(n, options.problems)} {task}" for task, n in ASKED.items())
    print(f"\nAccuracy in per cent of {asked} problems, {time.perf_counter() - start:.0f} s in all\n\n{table(rows)}")
    if options.output:
        report = [{"setting": r.setting.name, "fault": r.fault, "found": r.found, "others": r.others} for r in rows]
        options.output.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
