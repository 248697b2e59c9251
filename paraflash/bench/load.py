"""Offers load to a server in waves and collects what comes back.

A wave is `num_prompts` requests that are due at the times of `Arrivals`, at most `max_concurrency` of them in flight.
The next wave starts when the last answer of one is complete. Warm-up requests and waves come first and are not counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from paraflash.bench import client as http
from paraflash.bench.arrivals import Arrivals
from paraflash.bench.prompts import Prompt, TokenPool, chat_prompt, random_prompts
from paraflash.bench.stats import Outcome, Wave

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_COUNTER_LAG = 0.5  # seconds within which a server's counters take in the answers that it has finished
_MEASURED, _WARMUP, _SINGLE = 0, 1, 2  # parts of a run, so that none repeats another's prompts


@dataclass(frozen=True)
class Load:
    model: str
    num_prompts: int
    input_len: int
    output_len: int
    backend: str = "openai"
    endpoint: str = "/v1/completions"
    seed: int = 0
    prefix_len: int = 0
    range_ratio: float = 0.0
    arrivals: Arrivals = field(default_factory=Arrivals)
    max_concurrency: int | None = None
    num_warmups: int = 0  # single requests before everything else
    warmup_waves: int = 0
    waves: int = 1
    ignore_eos: bool = False
    fields: dict[str, Any] = field(default_factory=dict)  # further fields of each request's body

    @property
    def total_requests(self) -> int:
        return self.num_warmups + self.num_prompts * (self.warmup_waves + self.waves)


@dataclass
class Run:
    waves: list[Wave]
    server_counted: dict[str, float] | None  # what the server's own counters grew by; None if it has none
    prompts: list[Prompt]  # of the measured waves, in the outcomes' order


Progress = Callable[[str, Outcome], None]


def request_body(load: Load, prompt: Prompt) -> dict[str, Any]:
    body: dict[str, Any] = {"model": load.model, **load.fields}
    if load.backend == "openai":
        body |= {"prompt": prompt.content, "max_tokens": prompt.output_tokens}
    else:
        messages = [{"role": "user", "content": prompt.content}]
        body |= {"messages": messages, "max_completion_tokens": prompt.output_tokens}
    return body | ({"ignore_eos": True} if load.ignore_eos else {})


async def make_prompts(
    client: httpx.AsyncClient, load: Load, pool: TokenPool | None, count: int, part: tuple[int, ...]
) -> list[Prompt]:
    if load.backend == "openai":
        assert pool is not None, "the completions backend draws from a pool"
        return random_prompts(
            pool,
            count,
            load.input_len,
            load.output_len,
            seed=load.seed,
            part=part,
            prefix_len=load.prefix_len,
            range_ratio=load.range_ratio,
        )
    rng = np.random.default_rng([load.seed, 1, *part])
    return [await chat_prompt(client, load.model, load.input_len, load.output_len, rng) for _ in range(count)]


async def run_wave(
    client: httpx.AsyncClient,
    load: Load,
    prompts: list[Prompt],
    arrival_seed: list[int],
    done: Callable[[Outcome], None],
) -> Wave:
    """Sends the prompts of one wave and waits for every answer."""
    slots = asyncio.Semaphore(load.max_concurrency or len(prompts) or 1)
    due = load.arrivals.times(len(prompts), arrival_seed)
    begin = time.perf_counter()

    async def one(prompt: Prompt, delay: float) -> Outcome:
        await asyncio.sleep(begin + delay - time.perf_counter())
        async with slots:
            outcome = await http.stream(client, load.endpoint, request_body(load, prompt), prompt.tokens)
        done(outcome)
        return outcome

    outcomes = await asyncio.gather(*(one(p, d) for p, d in zip(prompts, due, strict=True)))
    return Wave(list(outcomes), time.perf_counter() - begin)


async def run_load(
    client: httpx.AsyncClient, load: Load, pool: TokenPool | None, progress: Progress = lambda stage, outcome: None
) -> Run:
    """Warm-up requests, warm-up waves, then the measured waves."""
    for prompt in await make_prompts(client, load, pool, load.num_warmups, (_SINGLE,)):
        body = request_body(load, prompt)
        progress("warm-up", await http.stream(client, load.endpoint, body, prompt.tokens))
    for i in range(load.warmup_waves):
        prompts = await make_prompts(client, load, pool, load.num_prompts, (_WARMUP, i))
        await run_wave(client, load, prompts, [load.seed, _WARMUP, i], lambda o: progress("warm-up", o))

    if load.num_warmups or load.warmup_waves:
        await asyncio.sleep(_COUNTER_LAG)  # the warm-up must not count
    before = await http.counters(client)
    waves, sent = [], []
    for i in range(load.waves):
        prompts = await make_prompts(client, load, pool, load.num_prompts, (_MEASURED, i))
        stage = f"wave {i + 1}/{load.waves}"
        waves.append(
            await run_wave(client, load, prompts, [load.seed, _MEASURED, i], lambda o, s=stage: progress(s, o))  # type: ignore[misc]
        )
        sent += prompts
    expected = sum(o.output_tokens for wave in waves for o in wave.outcomes if o.ok)
    return Run(waves, await _growth(client, before, expected), sent)


async def _growth(
    client: httpx.AsyncClient, before: dict[str, float] | None, generated: int
) -> dict[str, float] | None:
    """What the counters grew by; waits a little for a server that counts the last answers late."""
    until = time.monotonic() + _COUNTER_LAG
    while before is not None and (after := await http.counters(client)):
        grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
        if grown.get("generation_tokens", generated) >= generated or time.monotonic() > until:
            return grown
        await asyncio.sleep(0.05)
    return None
