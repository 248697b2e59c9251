"""The six task families, as token sequences: prompts, answers and which attention may find the answer.

A training sequence is one chat of many turns (BOS, then user / assistant turns); a test problem is a single turn.
Every answer token carries a loss weight, a task number and a *route*: the set of layer groups whose compressed entries
may be read while answering. Routes make each part of the architecture carry a task of its own (see README.md). An
answer token that stands in the notes also has a *source*: its position there, which attention is taught to find.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from random import Random

import numpy as np
from numpy.typing import NDArray

from training import problems
from training.vocabulary import (
    ADJECTIVES,
    ASSISTANT,
    BOS,
    END_THINK,
    EOS,
    LETTERS,
    NOUNS,
    USER,
    VALUES,
    pieces,
    vocabulary,
)  # fmt: skip

TASKS = ("pairs", "recall", "ngram", "copy", "sort", "arithmetic")
# Routes are bit sets of layer groups: bit 0 the ratio-2 layers, bit 1 the candidate-filtered layers.
ROUTE_NONE, ROUTE_PAIRS, ROUTE_FILTERED, ROUTE_ANY = 0, 1, 2, 3
HARD, DENSE = 4, 8  # added to a whole sequence: the route is a mask; all visible entries are attended
NUM_FACTS, FACT_SEED = 512, 7
COPY_ALPHABET, COPIED = (*NOUNS, *VALUES), 6
PROMPT_WORDS = ["Find", "Recite", "Copy", "Sort", "Notes"]


@dataclass
class Turn:
    """A user text and its answer; the first `known` answer tokens merely repeat the question and weigh little."""

    task: str
    prompt: str
    answer: str
    route: int
    known: int = 0
    weight: float = 1.0
    record: str = ""  # of a look-up: key and value as they stand in the notes


@cache
def vocab() -> dict[str, int]:
    return vocabulary([*PROMPT_WORDS, *problems.words()])


@cache
def _piece_ids() -> dict[str, tuple[int, ...]]:
    return {}


def encode(text: str) -> list[int]:
    """Token ids of plain ASCII text; equal to the tokenizer's (a test compares them)."""
    table, known, out = vocab(), _piece_ids(), []
    for piece in pieces(text):
        ids = known.get(piece)
        if ids is None:
            symbols = piece.replace(" ", "Ġ").replace("\n", "Ċ")
            ids = (table[symbols],) if symbols in table else tuple(table[s] for s in symbols)
            known[piece] = ids
        out += ids
    return out


@cache
def facts() -> list[tuple[str, str]]:
    """The fixed facts of the n-gram tables: four words -> two words."""
    rng, found = Random(FACT_SEED), {}
    while len(found) < NUM_FACTS:
        trigger = tuple(rng.choices(ADJECTIVES[:16], k=4))
        found.setdefault(trigger, tuple(rng.choices(VALUES, k=2)))
    return [("".join(" " + w for w in k), "".join(" " + w for w in v)) for k, v in found.items()]


def pair_records(rng: Random, count: int) -> list[tuple[str, str]]:
    """Records of two-word keys: (" red fox:", " lamp stone"), distinct keys."""
    keys = rng.sample(range(len(ADJECTIVES) * len(NOUNS)), count)
    return [
        (f" {ADJECTIVES[k // len(NOUNS)]} {NOUNS[k % len(NOUNS)]}:", f" {rng.choice(VALUES)} {rng.choice(VALUES)}")
        for k in keys
    ]


def code_records(rng: Random, count: int) -> list[tuple[str, str]]:
    """Records of coded keys: (" q47=", " lamp stone"), distinct keys."""
    keys = rng.sample(range(2600), count)
    return [(f" {LETTERS[k // 100]}{k % 100:02d}=", f" {rng.choice(VALUES)} {rng.choice(VALUES)}") for k in keys]


def joined(rng: Random, records: list[tuple[str, str]], mark: str) -> str:
    """Records as text; a random line break after half of them moves the parity of what follows."""
    return "".join(key + value + mark + ("\n" if rng.random() < 0.5 else "") for key, value in records)


def look_up(task: str, record: tuple[str, str], before: str = "") -> Turn:
    key, value = record
    route = ROUTE_PAIRS if task == "pairs" else ROUTE_FILTERED
    return Turn(task, f"{before}Find{key[:-1]}.", key + value, route, known=len(encode(key)), record=key + value)


def distraction(rng: Random) -> str:
    """Notes that nothing asks about, as they stand before the words of a copy problem."""
    make = pair_records if rng.random() < 0.5 else code_records
    return "Notes:" + joined(rng, make(rng, rng.randint(4, 60)), ";") + "\n"


def copy_turn(rng: Random, length: int, before: str = "") -> Turn:
    words = rng.sample(COPY_ALPHABET, length)
    answer = "".join(" " + w for w in words[:COPIED])
    return Turn("copy", before + "Copy:" + "".join(" " + w for w in words) + ".", answer, ROUTE_NONE)


def sort_turn(rng: Random) -> Turn:
    letters = rng.sample(LETTERS[:20], rng.randint(4, 8))
    return Turn(
        "sort", "Sort:" + "".join(" " + c for c in letters) + ".", "".join(" " + c for c in sorted(letters)), ROUTE_NONE
    )


def ngram_turn(rng: Random, fact: tuple[str, str] | None = None) -> Turn:
    trigger, value = fact or rng.choice(facts())
    return Turn("ngram", f"Recite{trigger}.", trigger + value, ROUTE_NONE, 4)


def arithmetic_turn(rng: Random, held_out: bool = False) -> Turn:
    question, answer, _ = problems.split_problem(rng, held_out)
    return Turn("arithmetic", question, answer, ROUTE_NONE, weight=0.4)


@dataclass
class Sequence:
    """Token ids with what the loss needs; entry i of all the other lists is about predicting `ids[i + 1]`."""

    ids: list[int] = field(default_factory=lambda: [vocab()[BOS]])
    weight: list[float] = field(default_factory=lambda: [0.0])
    task: list[int] = field(default_factory=lambda: [-1])
    route: list[int] = field(default_factory=lambda: [ROUTE_ANY])
    source: list[int] = field(default_factory=lambda: [-1])
    starts: list[int] = field(default_factory=list)  # position of each turn's first answer token

    def add(self, turn: Turn) -> None:
        table = vocab()
        prompt = [table[USER], *encode(turn.prompt), table[ASSISTANT], table[END_THINK]]
        answer = [*encode(turn.answer), table[EOS]]
        self.ids += prompt + answer
        self.starts.append(len(self.ids) - len(answer))
        self.weight += (
            [0.0] * (len(prompt) - 1) + [0.3] * turn.known + [turn.weight] * (len(answer) - turn.known - 1) + [0.3, 0.0]
        )
        number = TASKS.index(turn.task)
        self.task += [-1] * (len(prompt) - 1) + [number] * len(answer) + [-1]
        self.route += [ROUTE_ANY] * (len(prompt) - 1) + [turn.route] * len(answer) + [ROUTE_ANY]
        start = self._find(encode(turn.record)) if turn.record else -1
        sources = range(start + turn.known, start + len(answer) - 1) if start >= 0 else range(0)
        self.source += [*[-1] * (len(prompt) + len(answer) - 2 - len(sources)), *sources, -1, -1]

    def _find(self, wanted: list[int]) -> int:
        """Where `wanted` was said last, this turn's answer aside; -1 where it was not."""
        text, part = (np.array(x, np.uint16).tobytes() for x in (self.ids[: self.starts[-1]], wanted))
        at = text.rfind(part)
        while at >= 0 and at % 2:  # a token has two bytes
            at = text.rfind(part, 0, at + len(part) - 1)
        return at // 2


def prompt_ids(turn: Turn) -> list[int]:
    """The single-turn prompt of a problem, as the chat encoding renders it without thinking."""
    table = vocab()
    return [table[BOS], table[USER], *encode(turn.prompt), table[ASSISTANT], table[END_THINK]]


def short_sequence(rng: Random, length: int) -> Sequence:
    """Turns of the tasks that need no far context, until `length` tokens."""
    out = Sequence()
    while len(out.ids) < length:
        draw = rng.random()
        if draw < 0.25:
            size = rng.randint(COPIED + 2, 30) if rng.random() < 0.4 else rng.randint(30, 112)
            out.add(copy_turn(rng, size, distraction(rng) if length >= 1024 and rng.random() < 0.3 else ""))
        elif draw < 0.45:
            out.add(sort_turn(rng))
        elif draw < 0.75:
            out.add(ngram_turn(rng))
        else:
            out.add(arithmetic_turn(rng))
    return out


def recall_sequence(rng: Random, length: int, most: int, task: str) -> Sequence:
    """Notes of up to `most` tokens followed by look-ups, repeated until `length` tokens."""
    out = Sequence()
    while len(out.ids) < length:
        room = min(most, length - len(out.ids))
        if room < 60:
            break
        count = max(4, int(room * rng.uniform(0.2, 0.7)) // 8)
        records = (pair_records if task == "pairs" else code_records)(rng, count)
        notes = "Notes:" + joined(rng, records, ";" if task == "pairs" else ",") + "\n"
        asked = max(2, min(count, (room - 8 * count) // 15))
        for i, record in enumerate(rng.sample(records, asked)):
            out.add(look_up(task, record, notes if i == 0 else ""))
    return out


def training_batch(
    seed: int, batch: int, length: int, most: int, kinds: str = "prss", hard: float = 1.0, dense: float = 1.0
) -> dict[str, NDArray]:
    """`batch` sequences of exactly `length` tokens, each array [batch, length]: ids, targets, task and source int64,
    weight fp32, route uint8; and decoy [batch] int64. `kinds` names the rows in turn (pairs, recall, short tasks);
    `hard` and `dense` are the probabilities of a sequence's flags.

    decoy: the sequence whose ratio-1 entries a sequence sees. Pairs see those of other pairs, so that they learn to do
    without: a mask that is gone in use would only hide a way that is easier to learn.
    """
    rng, coin = Random(seed), Random(f"flags of {seed}")  # the texts do not depend on the flags
    pad = vocab()[EOS]
    rows: list[Sequence] = []
    flags = []
    for i in range(batch):
        kind = kinds[i % len(kinds)]
        task = "pairs" if kind == "p" else "recall"
        rows.append(short_sequence(rng, length) if kind == "s" else recall_sequence(rng, length, most, task))
        flags.append(HARD * (coin.random() < hard) + DENSE * (coin.random() < dense))
    out = {
        "ids": np.full((batch, length + 1), pad, np.int64),
        "weight": np.zeros((batch, length), np.float32),
        "task": np.full((batch, length), -1, np.int64),
        "route": np.full((batch, length), ROUTE_ANY, np.uint8),
        "source": np.full((batch, length), -1, np.int64),
        "decoy": np.arange(batch),
    }
    for i, row in enumerate(rows):
        n = min(length, len(row.ids) - 1)
        out["ids"][i, : n + 1] = row.ids[: n + 1]
        out["weight"][i, :n] = row.weight[:n]
        out["task"][i, :n] = row.task[:n]
        out["route"][i, :n] = row.route[:n]
        out["source"][i, :n] = row.source[:n]
    pairs = [i for i in range(batch) if kinds[i % len(kinds)] == "p"]
    out["decoy"][pairs] = pairs[1:] + pairs[:1]
    out["route"] += np.array(flags, np.uint8)[:, None]
    out["targets"] = out["ids"][:, 1:].copy()
    out["ids"] = out["ids"][:, :-1].copy()
    return out
