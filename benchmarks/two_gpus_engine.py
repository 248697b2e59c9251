"""One engine of `two_gpus.py` in its own process: lines of JSON in on standard input, lines of JSON out.

Jobs: "cell" (waves of prompts), "decode", "breakdown", "collectives", "hardware", "quit". The first line that it prints
says that the engine is ready. With `--golden` it runs the golden model instead and leaves logits and tokens in a file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, Path(__file__).resolve().parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from paraflash.config.engine import EngineConfig  # noqa: E402
from paraflash.engine.engine import EngineCore  # noqa: E402
from paraflash.engine.sampling_params import SamplingParams  # noqa: E402

GOLDEN = ROOT / "tests" / "data" / "golden" / "wide"
STEP_TIMEOUT = 300.0  # kernels are compiled inside steps
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


class Prompts:
    """Random prompts, none of them twice."""

    def __init__(self, vocab: int):
        self._vocab, self._draw = vocab, np.random.default_rng(7)

    def take(self, length: int) -> list[int]:
        return [int(i) for i in self._draw.integers(self._vocab // 10, self._vocab * 9 // 10, length)]


def run_wave(core: EngineCore, prompts: list[list[int]]) -> dict[str, Any]:
    """Sends all prompts at once and asks each for one token."""
    start = time.monotonic()
    for i, ids in enumerate(prompts):
        core.add_request(str(i), ids, SamplingParams(max_tokens=1, **GREEDY))
    added, first = time.monotonic(), []
    while core.has_unfinished():
        first += [time.monotonic() - start for delta in core.step() if delta.token_ids]
    seconds = time.monotonic() - start
    return {"seconds": seconds, "ttft": first, "add_seconds": added - start, "tokens": sum(map(len, prompts))}


def run_cell(core: EngineCore, prompts: Prompts, length: int, concurrency: int, waves: int) -> dict[str, Any]:
    """One warm-up wave and `waves` measured ones."""
    done = [run_wave(core, [prompts.take(length) for _ in range(concurrency)]) for _ in range(waves + 1)][1:]
    return {
        "waves": done,
        "input_throughput": sum(w["tokens"] for w in done) / sum(w["seconds"] for w in done),
        "mean_ttft": statistics.mean(t for w in done for t in w["ttft"]),
    }


def run_decode(core: EngineCore, prompts: Prompts, rows: int, context: int, tokens: int) -> dict[str, Any]:
    """Steps in which all `rows` requests decode, and nothing else."""
    for i in range(rows):
        core.add_request(str(i), prompts.take(context), SamplingParams(max_tokens=tokens, **GREEDY))
    times = []
    while core.has_unfinished():
        full = len(core.scheduler.running) == rows and not any(r.is_prefill for r in core.scheduler.running)
        start = time.monotonic()
        core.step()
        if full and not core.scheduler.waiting:
            times.append(time.monotonic() - start)
    times = times[tokens // 8 :]  # the first ones warm up
    return {
        "steps": len(times),
        "median_seconds": statistics.median(times),
        "tokens_per_second": rows * len(times) / sum(times),
    }


def serve(args: argparse.Namespace, answer: Any) -> None:
    setup = json.loads(args.setup)
    start = time.monotonic()
    core = EngineCore(
        EngineConfig(
            model=setup["model"],
            device=setup["device"],
            tensor_parallel_size=args.tp,
            prefill_context_parallel_size=args.pcp,
            load_format="dummy",
            max_num_batched_tokens=setup["budget"],
            max_num_seqs=16,
            num_gpu_blocks_override=setup["blocks"],
            enable_prefix_caching=False,
            swa_bounded_replay=setup["replay"],
            step_timeout=STEP_TIMEOUT,
        ),
        runner_factory="rank_runner:BenchRunner",
    )
    try:
        prompts = Prompts(core.model.vocab_size)
        loaded = time.monotonic() - start
        for _ in range(3):  # shapes run as they are, are captured, and are replayed from then on
            run_wave(core, [prompts.take(setup["longest"])])
        run_decode(core, prompts, 16, setup["budget"] // 16, 12)
        warm = time.monotonic() - start
        facts = core.executor.call_all("facts")
        answer({"ready": True, "loaded_seconds": loaded, "warm_seconds": warm, "ranks": facts})
        for line in sys.stdin:
            job = json.loads(line)
            name, values = job["job"], job.get("values", [])
            if name == "quit":
                return
            if name == "cell":
                answer(run_cell(core, prompts, *values))
            elif name == "decode":
                answer(run_decode(core, prompts, *values))
            else:
                answer({"ranks": core.executor.call_all(name, *values)})
    finally:
        core.shutdown()


def golden(args: argparse.Namespace, answer: Any) -> None:
    """Prompt logits and greedy tokens of all golden prompts in one batch, with bf16 and with fp32 activations."""
    from safetensors.numpy import load_file

    setup, found = json.loads(args.setup), {}
    expected = load_file(GOLDEN / "expected.safetensors")
    prompts = {str(i): expected[f"prompt.{i}.input_ids"].tolist() for i in range(7)}
    for dtype, rounding in (("bfloat16", "trained"), ("float32", "none")):
        config = EngineConfig(
            model=str(GOLDEN),
            device=setup["device"],
            dtype=dtype,
            kv_cache_dtype="bfloat16",
            kv_cache_rounding=rounding,
            tensor_parallel_size=args.tp,
            prefill_context_parallel_size=args.pcp,
            max_num_batched_tokens=48,
            max_num_seqs=8,
            num_gpu_blocks_override=40,
            enable_prefix_caching=False,
            swa_bounded_replay=False,
            step_timeout=STEP_TIMEOUT,
        )
        core = EngineCore(config, runner_factory="rank_runner:GoldenRunner")
        try:
            tokens: dict[str, list[int]] = {name: [] for name in prompts}
            rows: dict[str, list[Any]] = {name: [] for name in prompts}
            for name, ids in prompts.items():
                core.add_request(name, ids, SamplingParams(max_tokens=16, prompt_logprobs=1, **GREEDY))
            while core.has_unfinished():
                for delta in core.step():
                    tokens[delta.request_id] += delta.token_ids
                    rows[delta.request_id] += delta.prompt_logprobs or []
            hashes = core.executor.call_all("cache_hash")
        finally:
            core.shutdown()
        for name in prompts:
            found[f"{dtype}.{name}.tokens"] = np.array(tokens[name])
            found[f"{dtype}.{name}.logits"] = np.array(rows[name], np.float32)
        found[f"{dtype}.equal_caches"] = np.array(len(set(hashes)) == 1)
        np.savez(args.golden + ".part.npz", **found)
        os.replace(args.golden + ".part.npz", args.golden)
    answer({"ready": True})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--pcp", type=int, required=True)
    parser.add_argument("--setup", required=True)
    parser.add_argument("--golden", default="")
    args = parser.parse_args()
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints goes to the log

    def answer(value: dict[str, Any]) -> None:
        channel.write(json.dumps(value) + "\n")
        channel.flush()

    (golden if args.golden else serve)(args, answer)


if __name__ == "__main__":
    main()
