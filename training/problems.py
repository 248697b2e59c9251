"""Word problems in GSM8K's format, one or two steps, with a worked answer that ends in `#### N`.

Templates are cut into token ids once; a problem fills in names, things and small numbers. A problem belongs to the
held-out split when a hash of its question says so, so that no training problem is ever a test problem.
"""

from __future__ import annotations

import zlib
from random import Random

NAMES = "Tom Ann Ben Eve Sam Mia Leo Zoe Max Amy".split()
ITEMS = "apples books coins pens cards eggs shells stamps cakes toys".split()

# (question, answer, numbers); every number is one of a, b, c (given) and d, e (worked out).
ONE_STEP = [
    ("{N} has {a} {I}. {N} buys {b} more. How many {I} does {N} have now?", "+"),
    ("{N} finds {a} {I} on Monday and {b} {I} on Friday. How many {I} in total?", "+"),
    ("{N} has {a} {I} and {M} has {b} {I}. How many {I} do they have together?", "+"),
    ("{N} has {a} {I}. {N} gives {b} {I} to {M}. How many {I} are left?", "-"),
    ("There are {a} {I} in a box. {N} takes {b} out. How many {I} are left?", "-"),
    ("{N} has {a} bags with {b} {I} each. How many {I} in total?", "*"),
    ("Each box holds {b} {I}. {N} fills {a} boxes. How many {I} in total?", "*"),
]
TWO_STEPS = [
    ("{N} has {a} {I}. {N} buys {b} more. Then {N} gives {c} {I} to {M}. How many {I} are left?", "+-"),
    ("{N} has {a} {I}. {N} gives {b} {I} to {M}. Then {N} finds {c} more. How many {I} does {N} have now?", "-+"),
    ("{N} has {a} bags with {b} {I} each and {c} more {I}. How many {I} in total?", "*+"),
    ("{N} fills {a} boxes with {b} {I} each. Then {N} takes {c} out. How many {I} are left?", "*-"),
    ("{N} has {a} {I}, {M} has {b} {I} and {K} has {c} {I}. How many {I} do they have together?", "++"),
]


def _apply(op: str, x: int, y: int) -> int:
    return x + y if op == "+" else x - y if op == "-" else x * y


def _numbers(rng: Random, ops: str) -> tuple[int, int, int]:
    if ops[0] == "*":
        a, b = rng.randint(2, 9), rng.randint(2, 9)
    elif ops[0] == "-":
        a = rng.randint(5, 20)
        b = rng.randint(1, a - 1)
    else:
        a, b = rng.randint(2, 15), rng.randint(2, 15)
    first = _apply(ops[0], a, b)
    c = rng.randint(1, min(12, first - 1)) if ops[1:] == "-" and first > 1 else rng.randint(1, 12)
    return a, b, c


def problem(rng: Random) -> tuple[str, str, int]:
    """One random problem: question, worked answer, final number."""
    question, ops = rng.choice(ONE_STEP) if rng.random() < 0.5 else rng.choice(TWO_STEPS)
    a, b, c = _numbers(rng, ops)
    while len(ops) > 1 and ops[1] == "-" and c >= _apply(ops[0], a, b):
        a, b, c = _numbers(rng, ops)
    names = rng.sample(NAMES, 3)
    item = rng.choice(ITEMS)
    text = question.format(N=names[0], M=names[1], K=names[2], I=item, a=a, b=b, c=c)
    first = _apply(ops[0], a, b)
    steps = f"{a}{ops[0]}{b}=<<{a}{ops[0]}{b}={first}>>{first}"
    result = first
    if len(ops) > 1:
        result = _apply(ops[1], first, c)
        steps += f"\n{first}{ops[1]}{c}=<<{first}{ops[1]}{c}={result}>>{result}"
    return text, f"{steps} {item}.\n#### {result}", result


def is_held_out(question: str) -> bool:
    """One question in eight is kept from training."""
    return zlib.crc32(question.encode()) % 8 == 0


def split_problem(rng: Random, held_out: bool) -> tuple[str, str, int]:
    """A random problem of the training or the held-out split."""
    while True:
        found = problem(rng)
        if is_held_out(found[0]) == held_out:
            return found


def words() -> list[str]:
    """Every word token the templates need, " word" or "Word" as written."""
    from training.vocabulary import pieces

    found: dict[str, None] = {}
    for question, _ in (*ONE_STEP, *TWO_STEPS):
        for item in ITEMS:
            text = question.format(N="Tom", M="Tom", K="Tom", I=item, a=1, b=1, c=1)
            found.update(dict.fromkeys(p for p in pieces(text) if p.strip().isalpha()))
    for name in NAMES:
        found.update({name: None, " " + name: None})
    return list(found)
