"""GSM8K-format accuracy of one or several servers, record by record, so that topologies can be compared on each answer.

A record is {"question": ..., "answer": "... #### N"}. Prompts hold a few worked examples; the number that a model ends
on is compared with N as a number. `Answer` is one model's reply to one record.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from paraflash.bench import client as http

# A minus after a digit is a subtraction, no sign.
_NUMBER = r"(?:(?<!\d)[-\u2212]\$?|\$[-\u2212]?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_ENDINGS = (rf"####[^\d\n]*?({_NUMBER})", rf"\\boxed\{{[^{{}}\d]*?({_NUMBER})", rf"({_NUMBER})")
_INSTRUCTION = "Solve the problem step by step. End with a line `#### N`, where N is the answer as a bare number."


@dataclass(frozen=True)
class Record:
    id: int  # line number in the file, from 0
    question: str
    solution: str  # worked, without calculator notes
    answer: Decimal


@dataclass
class Answer:
    id: int
    number: Decimal | None  # None: no number found, or no reply
    correct: bool
    text: str
    tokens: int
    seconds: float
    finish_reason: str | None
    error: str | None


def to_number(text: str) -> Decimal | None:
    """`$1,234.50` as a number; None if it is none. 18 and 18.0 are equal."""
    cleaned = re.sub(r"[\s$,]", "", text).replace("\u2212", "-")
    try:
        number = Decimal(cleaned)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def final_number(text: str) -> Decimal | None:
    """The number a reply ends on: in the line of the last `####`, else in the last `\\boxed{}`, else the last one."""
    for pattern in _ENDINGS:
        if found := re.findall(pattern, text):
            return to_number(found[-1])
    return None


def read_records(path: Path) -> list[Record]:
    """Raises ValueError naming the line for anything but {"question": text, "answer": text with `#### number`}."""
    records = []
    for i, line in enumerate(path.read_text("utf-8").split("\n")):
        if not line.strip():
            continue
        where = f"{path}:{i + 1}"
        try:
            data = json.loads(line)
            question, answer = data["question"], data["answer"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{where} is not a JSON object with question and answer") from None
        solution, mark, last = str(answer).rpartition("####")
        number = to_number(last) if mark else None
        if number is None:
            raise ValueError(f"{where}: answer ends with {str(answer)[-40:]!r}, not with '#### number'")
        worked = re.sub(r"<<[^>]*>>", "", solution).strip()
        records.append(Record(i, str(question), f"{worked}\n#### {last.strip()}", number))
    if not records:
        raise ValueError(f"{path} has no record")
    return records


def choose_shots(records: list[Record], count: int, seed: int) -> list[Record]:
    """`count` worked examples, in a random order that the seed determines."""
    if count > len(records):
        raise ValueError(f"num-shots is {count}, but there are only {len(records)} records to take them from")
    return [records[i] for i in np.random.default_rng(seed).permutation(len(records))[:count]]


def request_body(record: Record, shots: list[Record], endpoint: str) -> dict[str, Any]:
    """The prompt fields of one request for endpoint "completions" or "chat"."""
    examples = "".join(f"Question: {s.question}\nAnswer: {s.solution}\n\n" for s in shots)
    asked = f"{examples}Question: {record.question}\nAnswer:"
    if endpoint == "completions":
        return {"prompt": asked, "stop": ["\nQuestion:"]}
    return {"messages": [{"role": "user", "content": f"{_INSTRUCTION}\n\n{asked}"}]}


async def evaluate(
    client: httpx.AsyncClient,
    records: list[Record],
    shots: list[Record],
    *,
    endpoint: str,
    fields: dict[str, Any],
    concurrency: int,
    done: Callable[[Answer], None] = lambda answer: None,
) -> list[Answer]:
    """Asks every record, `concurrency` at a time. `fields` go into each request (model, max_tokens, sampling)."""
    slots = asyncio.Semaphore(concurrency)
    path = "/v1/completions" if endpoint == "completions" else "/v1/chat/completions"

    async def ask(record: Record) -> Answer:
        async with slots:
            got = await http.stream(client, path, {**request_body(record, shots, endpoint), **fields})
        number = final_number(got.text) if got.ok else None
        answer = Answer(
            id=record.id,
            number=number,
            correct=number == record.answer,
            text=got.text,
            tokens=got.output_tokens if got.ok else 0,
            seconds=got.latency if got.ok else 0.0,
            finish_reason=got.finish_reason,
            error=got.error,
        )
        done(answer)
        return answer

    return list(await asyncio.gather(*map(ask, records)))


@dataclass(frozen=True)
class Score:
    correct: int
    total: int
    output_rate: float  # mean over the replies of output tokens / seconds of the request
    api_errors: int  # also count as wrong
    length_finishes: int


def score(answers: list[Answer]) -> Score:
    rates = [a.tokens / a.seconds for a in answers if a.seconds > 0]
    return Score(
        correct=sum(a.correct for a in answers),
        total=len(answers),
        output_rate=sum(rates) / len(rates) if rates else 0.0,
        api_errors=sum(a.error is not None for a in answers),
        length_finishes=sum(a.finish_reason == "length" for a in answers),
    )


def differing(results: dict[str, list[Answer]]) -> dict[int, dict[str, Answer]]:
    """Records whose numbers are not the same for every server. Failed requests are no answer and do not count."""
    by_id: dict[int, dict[str, Answer]] = {}
    for name, answers in results.items():
        for a in answers:
            if a.error is None:
                by_id.setdefault(a.id, {})[name] = a
    return {i: got for i, got in sorted(by_id.items()) if len({a.number for a in got.values()}) > 1}


def table(results: dict[str, list[Answer]]) -> str:
    """One Markdown row per server."""
    lines = [
        "| Topology | Correct / total | Accuracy | Mean output tok/s | API errors | Length finishes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, answers in results.items():
        s = score(answers)
        lines.append(
            f"| {name} | {s.correct} / {s.total} | {100 * s.correct / s.total:.2f} % | {s.output_rate:.2f} "
            f"| {s.api_errors} | {s.length_finishes} |"
        )
    return "\n".join(lines)
