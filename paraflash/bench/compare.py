"""The outputs of two servers for the same prompts, token by token.

Greedy decoding of one model on two splits or engines may part where two tokens are nearly equal. So what is reported of
a difference is where it begins and by how much each server prefers its own token (a log-probability gap, in nats): a
small gap is rounding, a large one is a fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx

from paraflash.bench import client as http


@dataclass
class Output:
    """One server's answer. Tokens are compared by id where both servers give ids, else by text."""

    tokens: list[str]
    logprobs: list[float | None]
    tops: list[dict[str, float]]  # per position: token text -> log-probability, the most likely ones
    ids: list[int] | None
    finish_reason: str | None


@dataclass
class Gap:
    """By how much a server prefers its own token over the other server's."""

    nats: float
    at_least: bool  # the other token is not among the reported ones, so this is a lower bound

    def __str__(self) -> str:
        return f"{'>= ' if self.at_least else ''}{self.nats:.4f}"


@dataclass
class Comparison:
    equal: bool
    position: int | None = None  # index of the first output token that differs
    token_a: str | None = None  # None: this output has ended there
    token_b: str | None = None
    gap_a: Gap | None = None
    gap_b: Gap | None = None
    length: int = 0  # tokens up to the first difference
    max_logprob_difference: float = 0.0  # over those tokens
    error: str | None = None
    finish_reasons: tuple[str | None, str | None] = field(default=(None, None))


async def generate(client: httpx.AsyncClient, body: dict[str, Any]) -> Output:
    """One whole answer with log-probabilities. Raises ServerProblem."""
    try:
        answer = await http.post(client, "/v1/completions", {**body, "return_token_ids": True})
    except http.ServerProblem as problem:
        if "return_token_ids" not in str(problem):
            raise
        answer = await http.post(client, "/v1/completions", body)  # a server that refuses fields it does not know
    try:
        choice = answer["choices"][0]
    except (KeyError, IndexError):
        raise http.ServerProblem("the answer has no choices") from None
    found = choice.get("logprobs") or {}
    if not found.get("tokens"):
        raise http.ServerProblem("the answer has no log-probabilities, which the comparison needs")
    return Output(
        tokens=found["tokens"],
        logprobs=found["token_logprobs"],
        tops=[top or {} for top in found.get("top_logprobs") or [{}] * len(found["tokens"])],
        ids=choice.get("token_ids"),
        finish_reason=choice.get("finish_reason"),
    )


def _gap(output: Output, position: int, other: str) -> Gap | None:
    own, top = output.logprobs[position], output.tops[position]
    if own is None or not top:
        return None
    if other in top and other != output.tokens[position]:
        return Gap(own - top[other], at_least=False)
    return Gap(own - min(top.values()), at_least=True)


def compare(a: Output, b: Output) -> Comparison:
    """Where two outputs part, if they do. An output that ends earlier parts at its end."""
    by_id = a.ids is not None and b.ids is not None and len(a.ids) == len(a.tokens) and len(b.ids) == len(b.tokens)
    left, right = (a.ids, b.ids) if by_id else (a.tokens, b.tokens)
    assert left is not None and right is not None
    shared = min(len(left), len(right))
    position = next((i for i in range(shared) if left[i] != right[i]), shared)
    pairs = zip(a.logprobs[:position], b.logprobs[:position], strict=True)
    worst = max((abs(x - y) for x, y in pairs if x is not None and y is not None), default=0.0)
    reasons = (a.finish_reason, b.finish_reason)
    if position == len(left) == len(right):
        return Comparison(True, length=position, max_logprob_difference=worst, finish_reasons=reasons)
    token_a = a.tokens[position] if position < len(left) else None
    token_b = b.tokens[position] if position < len(right) else None
    both = token_a is not None and token_b is not None
    return Comparison(
        equal=False,
        position=position,
        token_a=token_a,
        token_b=token_b,
        gap_a=_gap(a, position, token_b) if both and token_b is not None else None,
        gap_b=_gap(b, position, token_a) if both and token_a is not None else None,
        length=position,
        max_logprob_difference=worst,
        finish_reasons=reasons,
    )


def summary(results: list[Comparison]) -> list[str]:
    """The printed lines: a table of the prompts that differ, then the totals."""
    lines = []
    different = [(i, r) for i, r in enumerate(results) if not r.equal and r.error is None]
    if different:
        lines += [
            "| Prompt | First difference at token | A | B | Gap in A | Gap in B |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
    for i, r in different:
        tokens = ["(end)" if t is None else repr(t).replace("|", "\\|") for t in (r.token_a, r.token_b)]
        gaps = ["-" if g is None else str(g) for g in (r.gap_a, r.gap_b)]
        lines.append(f"| {i} | {r.position} | {' | '.join(tokens)} | {' | '.join(gaps)} |")
    lines += [f"Prompt {i}: {r.error}" for i, r in enumerate(results) if r.error]
    equal = sum(r.equal for r in results)
    lines.append(f"Equal outputs: {equal} of {len(results)} ({100 * equal / len(results):.2f} %)")
    compared = [r for r in results if r.error is None]
    if compared:
        tokens_same = sum(r.length for r in compared)
        worst = max(r.max_logprob_difference for r in compared)
        lines.append(f"Tokens before the first difference: {tokens_same}")
        lines.append(f"Largest log-probability difference over them: {worst:.6f}")
    known = [g.nats for _, r in different for g in (r.gap_a, r.gap_b) if g is not None]
    if known:
        lines.append(f"Largest gap at a first difference: {max(known):.4f}")
    return lines
