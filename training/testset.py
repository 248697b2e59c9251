"""The test problems: 200 a task, deterministic: `python -m training.testset tests/data/miniature` writes TASK.jsonl.

`id` numbers a task's problems, `question` is the user's text, `answer` the exact reply. Recall problems have 500-4,000
tokens with the sought record far outside the sliding window, copy problems repeat words 64-127 positions back. All are
kept from training, but for the facts of the n-gram task, which training must have shown.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

from training.tasks import (
    TASKS,
    Turn,
    arithmetic_turn,
    code_records,
    copy_turn,
    encode,
    facts,
    joined,
    look_up,
    ngram_turn,
    pair_records,
    prompt_ids,
    sort_turn,
)  # fmt: skip

SEED, PROBLEMS, FAR = 20_000_003, 200, 192  # FAR: least distance from the sought record to the question


def _length(rng: Random) -> int:
    """500 to 4,000 tokens; short contexts are more frequent (density 1/x^3, mean about 890)."""
    return int(rng.uniform(1 / 4000**2, 1 / 500**2) ** -0.5)


def far_recall(rng: Random, task: str) -> Turn:
    """One look-up over 500-4,000 tokens; for "pairs" the two words of the key stand in different ratio-2 pairs."""
    mark = ";" if task == "pairs" else ","
    while True:
        length = _length(rng)
        make = pair_records if task == "pairs" else code_records
        records = make(rng, max(60, length // (7 if task == "pairs" else 8)))
        notes = "Notes:" + joined(rng, records, mark) + "\n"
        record = records[rng.randrange(len(records))]
        turn = look_up(task, record, notes)
        total = len(prompt_ids(turn))
        at = 2 + len(encode(notes[: notes.index(record[0] + record[1])]))  # position of the key's first token
        if 500 <= total <= 4000 and total - at > FAR and (task != "pairs" or at % 2 == 1):
            return turn


def far_copy(rng: Random) -> Turn:
    """A copy across 64-127 positions, after 150-450 tokens of notes."""
    records = pair_records(rng, rng.randint(25, 70)) if rng.random() < 0.5 else code_records(rng, rng.randint(22, 60))
    notes = "Notes:" + joined(rng, records, ";") + "\n"
    return copy_turn(rng, rng.randint(66, 112), notes)


def test_problems(task: str, count: int = PROBLEMS) -> list[Turn]:
    rng = Random(SEED + TASKS.index(task))
    if task == "ngram":
        return [ngram_turn(rng, fact) for fact in rng.sample(facts(), count)]
    make = {
        "pairs": lambda: far_recall(rng, "pairs"),
        "recall": lambda: far_recall(rng, "recall"),
        "copy": lambda: far_copy(rng),
        "sort": lambda: sort_turn(rng),
        "arithmetic": lambda: arithmetic_turn(rng, held_out=True),
    }[task]
    seen: dict[str, Turn] = {}
    while len(seen) < count:
        turn = make()
        seen.setdefault(turn.prompt, turn)
    return list(seen.values())


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        with (folder / f"{task}.jsonl").open("w", encoding="utf-8") as out:
            for i, turn in enumerate(test_problems(task)):
                row = {"id": f"{task}-{i}", "question": turn.prompt, "answer": turn.answer}
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
