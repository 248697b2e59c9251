"""`paraflash bench offline`: prefill and decode rates of the engine itself, without a server or a tokenizer.

Prompts are random token ids of exact lengths. Prefill: a fixed number of prompts is always in flight, each asks for one
token; reported are input tok/s and the mean time to first token. Decode: `--decode` requests with `--decode-context`
tokens each generate `--decode-tokens` tokens together; reported is tok/s over the steps in which all of them decode.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paraflash.engine.cli import exit_status
from paraflash.engine.flags import add_engine_flags, engine_config, length

if TYPE_CHECKING:
    from paraflash.engine.engine import EngineCore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)
    group = parser.add_argument_group("load")
    group.add_argument("--input-len", type=length, nargs="*", default=[8192], help="prompt lengths")
    group.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8], help="prompts in flight")
    group.add_argument("--prompts", type=int, default=0, help="prompts per measurement (default: 2 x concurrency)")
    group.add_argument(
        "--budgets", type=length, nargs="*", default=[], help="token budgets to try, at most the engine's"
    )
    group.add_argument("--decode", type=int, nargs="*", default=[], help="numbers of requests that decode together")
    group.add_argument("--decode-context", type=length, default=8192, help="prompt tokens of each")
    group.add_argument("--decode-tokens", type=int, default=33, help="tokens that each generates")
    group.add_argument("--json", type=Path, help="write all results to this file")


def run(args: argparse.Namespace) -> int:
    return exit_status("bench offline", lambda: _measure(args))


def _measure(args: argparse.Namespace) -> None:
    from paraflash.engine.engine import EngineCore

    start = time.perf_counter()
    core = EngineCore(engine_config(args))
    result: dict[str, Any] = {"info": core.info(), "load_seconds": time.perf_counter() - start}
    try:
        dense = result["info"]["ranks"][0]["dense_weights"]
        capacity = result["info"]["kv_capacity_tokens"]
        print(f"loaded in {result['load_seconds']:.1f} s, dense weights {dense}, KV for {capacity} tokens")
        _check_lengths(core, args)
        result["prefill"] = _prefill_matrix(core, args)
        result["decode"] = [_decode(core, n, args) for n in args.decode]
    finally:
        core.shutdown()
        if args.json:
            args.json.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")


def _check_lengths(core: EngineCore, args: argparse.Namespace) -> None:
    """Raises ValueError for a load that the engine would refuse when half of the figures are there."""
    limit = core.config.max_model_len or 0
    if max(args.input_len, default=0) >= limit:
        raise ValueError(
            f"--input-len is {max(args.input_len)}, but a request holds {limit} tokens, its answer of one included; "
            "use shorter prompts or a larger --max-model-len"
        )
    budget = min([*args.budgets, core.config.max_num_batched_tokens or limit])
    needed = args.decode_context + _decode_tokens(budget, max(args.decode, default=0), args)
    if args.decode and needed > limit:
        raise ValueError(
            f"--decode-context is {args.decode_context} and {needed} with what is generated, but a request holds "
            f"{limit} tokens; use a smaller --decode-context or a larger --max-model-len"
        )


def _prompt(core: EngineCore, size: int, number: int) -> list[int]:
    import numpy as np

    ids: list[int] = np.random.default_rng([size, number]).integers(3, core.model.vocab_size, size).tolist()
    return ids


def _prefill_matrix(core: EngineCore, args: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for budget in args.budgets or [core.scheduler.config.max_num_batched_tokens or 0]:
        _set_budget(core, budget)
        for size in args.input_len:
            for concurrency in args.concurrency:
                _prefill(core, size, concurrency, 3)  # not counted: shapes that are new, then captured, then replayed
                entry = _prefill(core, size, concurrency, args.prompts or 2 * concurrency)
                entry["budget"] = budget
                results.append(entry)
                print(
                    f"budget {budget:6} input {size:6} concurrency {concurrency:2}: "
                    f"{entry['input_tokens_per_second']:9.0f} input tok/s, mean TTFT {entry['mean_ttft_ms']:8.1f} ms"
                )
    return results


def _set_budget(core: EngineCore, budget: int) -> None:
    """Another scheduler for the same workers, whose scratch memory is sized for the largest budget."""
    from dataclasses import replace

    from paraflash.engine.scheduler import Scheduler

    core.config = replace(core.config, max_num_batched_tokens=budget)
    core.scheduler = Scheduler(core.config, core.model, core._num_blocks)


_runs = Counter[str]()


def _prefill(core: EngineCore, size: int, concurrency: int, prompts: int) -> dict[str, Any]:
    from paraflash.engine.sampling_params import SamplingParams

    _runs["prefill"] += 1
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    waiting = [(f"p{_runs['prefill']}-{i}", _prompt(core, size, 1000 * _runs["prefill"] + i)) for i in range(prompts)]
    began: dict[str, float] = {}
    ttft: list[float] = []
    start = time.perf_counter()
    while waiting or core.has_unfinished():
        while waiting and len(began) - len(ttft) < concurrency:
            name, ids = waiting.pop(0)
            began[name] = time.perf_counter()
            core.add_request(name, ids, params)
        for delta in core.step():
            if delta.token_ids:
                ttft.append(time.perf_counter() - began[delta.request_id])
    seconds = time.perf_counter() - start
    return {
        "input_len": size,
        "concurrency": concurrency,
        "prompts": prompts,
        "seconds": seconds,
        "input_tokens_per_second": size * prompts / seconds,
        "mean_ttft_ms": 1e3 * sum(ttft) / len(ttft),
    }


def _decode_tokens(budget: int, requests: int, args: argparse.Namespace) -> int:
    """What each request generates: the first one goes on until the last one has been prefilled, one after the other."""
    return int(args.decode_tokens + requests * -(-args.decode_context // budget) + requests)


def _decode(core: EngineCore, requests: int, args: argparse.Namespace) -> dict[str, Any]:
    """Only steps in which every request gets a token count: the prefill before them does not."""
    from paraflash.engine.sampling_params import SamplingParams

    _runs["decode"] += 1
    context = args.decode_context
    tokens = _decode_tokens(core.config.max_num_batched_tokens or context, requests, args)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for i in range(requests):
        core.add_request(f"d{_runs['decode']}-{i}", _prompt(core, context, 10**6 * _runs["decode"] + i), params)
    steps: list[float] = []
    while core.has_unfinished():
        start = time.perf_counter()
        got = sum(len(d.token_ids) for d in core.step())
        if got == requests:
            steps.append(time.perf_counter() - start)
    steps = sorted(steps[2:])  # the first ones may meet new shapes
    median = steps[len(steps) // 2] if steps else float("nan")
    print(
        f"decode {requests:3} requests, context {context}: {requests / median:8.1f} tok/s, step {median * 1e3:.2f} ms"
    )
    return {"requests": requests, "context": context, "steps": len(steps), "median_step_seconds": median}
