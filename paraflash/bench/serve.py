"""`paraflash bench serve`: load on any OpenAI-compatible server, with the flags, the printed block and the result file
of `vllm bench serve`. Added to those: waves, and checks of the prompt lengths and of the server's own token counters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paraflash.arguments import json_object
from paraflash.bench.flags import count_from, key_value, positive, share

if TYPE_CHECKING:
    from paraflash.bench.load import Load, Run
    from paraflash.bench.stats import Outcome

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_METRICS = ("ttft", "tpot", "itl", "e2el")


def _metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if bad := [name for name in names if name not in _METRICS]:
        raise argparse.ArgumentTypeError(f"{bad[0]!r} is not one of {', '.join(_METRICS)}")
    return names


def _percentiles(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if bad := [v for v in values if not 0 <= v <= 100]:
        raise argparse.ArgumentTypeError(f"{bad[0]} is not in [0, 100]")
    return values


def _goal(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in ("ttft", "tpot", "e2el"):
        raise argparse.ArgumentTypeError(f"{text!r} is not ttft:MS, tpot:MS or e2el:MS")
    return name, positive(limit)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=["openai", "openai-chat"], default="openai", help="API of the server")
    server.add_argument("--base-url", help="root of the server; instead of --host and --port")
    server.add_argument("--host", default="127.0.0.1", help="of the server")
    server.add_argument("--port", type=int, default=8000, help="of the server")
    server.add_argument("--endpoint", help="default: /v1/completions, or /v1/chat/completions for openai-chat")
    server.add_argument("--model", help="model name or folder; default: the first of /v1/models")
    server.add_argument("--served-model-name", help="name in the requests, if it is not --model")
    server.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: OPENAI_API_KEY")
    server.add_argument("--header", type=key_value, action="append", default=[], metavar="KEY=VALUE")
    server.add_argument("--ready-check-timeout-sec", type=float, default=0, help="wait so long for the server to be up")
    server.add_argument("--request-timeout", type=positive, metavar="S", help="a silence of S seconds is a failure")

    data = parser.add_argument_group("prompts")
    data.add_argument("--dataset-name", choices=["random"], default="random")
    data.add_argument("--num-prompts", type=count_from(1), default=1000, help="requests (of each wave)")
    data.add_argument("--random-input-len", "--input-len", type=count_from(1), default=1024, help="tokens")
    data.add_argument("--random-output-len", "--output-len", type=count_from(1), default=128, help="tokens")
    data.add_argument("--random-range-ratio", type=share, default=0.0, help="lengths vary by this share either way")
    data.add_argument(
        "--random-prefix-len", type=count_from(0), default=0, help="tokens before the input that all share"
    )
    data.add_argument("--tokenizer", help="model folder or tokenizer.json to take token ids from")
    data.add_argument("--vocab-size", type=count_from(10), help="draw ids from a vocabulary of this size")
    data.add_argument("--seed", type=count_from(0), default=0)

    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=positive, default=math.inf, help="requests/s; inf: all at once")
    load.add_argument("--burstiness", type=positive, default=1.0, help="1: Poisson; below: more bursty")
    load.add_argument("--ramp-up-strategy", choices=["linear", "exponential"])
    load.add_argument("--ramp-up-start-rps", type=positive)
    load.add_argument("--ramp-up-end-rps", type=positive)
    load.add_argument("--max-concurrency", type=count_from(1), help="most requests in flight")
    load.add_argument("--num-warmups", type=count_from(0), default=0, help="single requests before, not counted")
    load.add_argument("--num-warmup-waves", type=count_from(0), default=0, help="whole waves before, not counted")
    load.add_argument("--num-waves", type=count_from(1), default=1, help="measured waves, one after the other")
    load.add_argument("--ignore-eos", action="store_true", help="always generate the full output length")
    load.add_argument("--temperature", type=float, default=0.0)
    for name in _SAMPLING[1:]:
        load.add_argument(f"--{name.replace('_', '-')}", type=int if name == "top_k" else float)
    load.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="further fields of each request"
    )

    add("--percentile-metrics", type=_metrics, default=["ttft", "tpot", "itl"], help="of ttft,tpot,itl,e2el")
    add("--metric-percentiles", type=_percentiles, default=[99.0], help="e.g. 50,90,99")
    add("--goodput", type=_goal, nargs="+", default=[], metavar="METRIC:MS", help="limits that a good request meets")
    add("--save-result", action="store_true", help="write a JSON file")
    add("--save-detailed", action="store_true", help="the generated texts and finish reasons too")
    add("--result-dir", default=".", help="folder of the JSON file")
    add("--result-filename", help="default: made of label, rate, model and time")
    add("--label", help="name of the run in the JSON file")
    add("--metadata", type=key_value, nargs="*", default=[], metavar="KEY=VALUE", help="more entries of the JSON file")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def build_load(args: argparse.Namespace, model: str) -> Load:
    """The load that the flags describe. Raises ValueError for flags that do not go together."""
    from paraflash.bench.arrivals import Arrivals
    from paraflash.bench.load import ENDPOINTS, Load

    if args.ramp_up_strategy and not (args.ramp_up_start_rps and args.ramp_up_end_rps):
        raise ValueError("ramp-up-strategy needs ramp-up-start-rps and ramp-up-end-rps")
    if args.ramp_up_strategy and math.isfinite(args.request_rate):
        raise ValueError("ramp-up-strategy and request-rate exclude each other")
    if args.backend == "openai-chat" and (args.random_prefix_len or args.random_range_ratio):
        raise ValueError("random-prefix-len and random-range-ratio need --backend openai, which sends token ids")
    fields = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    return Load(
        model=model,
        backend=args.backend,
        endpoint=args.endpoint or ENDPOINTS[args.backend],
        num_prompts=args.num_prompts,
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        seed=args.seed,
        prefix_len=args.random_prefix_len,
        range_ratio=args.random_range_ratio,
        arrivals=Arrivals(
            rate=args.request_rate,
            burstiness=args.burstiness,
            ramp=args.ramp_up_strategy,
            ramp_start=args.ramp_up_start_rps or 0.0,
            ramp_end=args.ramp_up_end_rps or 0.0,
        ),
        max_concurrency=args.max_concurrency,
        num_warmups=args.num_warmups,
        warmup_waves=args.num_warmup_waves,
        waves=args.num_waves,
        ignore_eos=args.ignore_eos,
        fields=fields | args.extra_body,
    )


async def measure(args: argparse.Namespace) -> tuple[Load, Run]:
    """Finds model and token ids, then runs the load with a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from paraflash.bench import client as http
    from paraflash.bench.load import run_load
    from paraflash.bench.prompts import find_pool

    base_url = http.base_url_of(args.base_url or f"http://{args.host}:{args.port}")
    headers = dict(args.header) | ({"Authorization": f"Bearer {args.api_key}"} if args.api_key else {})
    async with http.open_client(base_url, headers, args.request_timeout) as client:
        entries = await http.wait_until_listed(client, args.ready_check_timeout_sec)
        model = args.served_model_name or args.model or entries[0]["id"]
        load = build_load(args, model)
        pool = None
        if load.backend == "openai":
            pool = await find_pool(client, args.model or model, entries, args.vocab_size, args.tokenizer)
            print(f"Model {model} at {base_url}; token ids: {len(pool.ids)} of {pool.source}")
        columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), disable=args.disable_tqdm) as bar:
            task, failed = bar.add_task("start", total=load.total_requests), Counter[bool]()

            def progress(stage: str, outcome: Outcome) -> None:
                failed[not outcome.ok] += 1
                text = f"{stage}, {failed[True]} failed" if failed[True] else stage
                bar.update(task, advance=1, description=text)

            return load, await run_load(client, load, pool, progress)


def notes(result: dict[str, Any], counted: dict[str, float] | None) -> list[str]:
    """What a reader must know besides the block: failures, wrong prompt lengths, disagreement with the server."""
    lines = []
    errors = Counter(error for error in result["errors"] if error)
    lines += [f"Failed: {n} x {error}" for error, n in errors.most_common(5)]
    mismatches = result["prompt_length_mismatches"]
    if mismatches:
        pairs = Counter((m["sent"], m["server"]) for m in mismatches)
        shown = "; ".join(f"sent {s}, server counted {c} ({n} x)" for (s, c), n in pairs.most_common(3))
        lines.append(f"WARNING: prompt length mismatch in {len(mismatches)} of {result['completed']} requests: {shown}")
    if result["prompt_lengths_unverified"]:
        n = result["prompt_lengths_unverified"]
        lines.append(f"WARNING: the server gave no usage for {n} requests: their lengths are not verified")
    for name, key in (("prompt_tokens", "total_input_tokens"), ("generation_tokens", "total_output_tokens")):
        theirs, ours = (counted or {}).get(name), result[key]
        if theirs is not None and abs(theirs - ours) > 0.01 * max(ours, 1):
            lines.append(f"WARNING: the server's {name} counter grew by {theirs:.0f}, the answers add up to {ours}")
    return lines


def result_record(args: argparse.Namespace, load: Load, run: Run, result: dict[str, Any]) -> dict[str, Any]:
    """The JSON result file: what was asked for, then the figures under vLLM's names."""
    outcomes = [o for wave in run.waves for o in wave.outcomes]
    record: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "label": args.label,
        "model_id": load.model,
        "tokenizer_id": args.tokenizer,
        "num_prompts": args.num_prompts,
        "num_waves": args.num_waves,
        "seed": args.seed,
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **dict(args.metadata),
        **result,
        "wave_durations": [wave.duration for wave in run.waves],
        "server_counters": run.server_counted,
    }
    if args.save_detailed:
        record["generated_texts"] = [o.text for o in outcomes]
        record["finish_reasons"] = [o.finish_reason for o in outcomes]
    return record


def result_path(args: argparse.Namespace, model: str) -> Path:
    if args.result_filename:
        return Path(args.result_dir) / args.result_filename
    concurrency = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    name = f"{args.label or args.backend}-{args.request_rate:g}qps{concurrency}-{Path(model).name}"
    return Path(args.result_dir) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, 1 if every request failed, 2 if the run could not start, 130 if it was interrupted."""
    from paraflash.bench.client import ServerProblem
    from paraflash.bench.stats import format_block, summarize

    try:
        load, done = asyncio.run(measure(args))
    except (ServerProblem, ValueError) as problem:
        print(f"bench serve: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    result = summarize(done.waves, args.metric_percentiles, dict(args.goodput))
    print(
        format_block(result, args.percentile_metrics, args.metric_percentiles, args.max_concurrency, args.request_rate)
    )
    for line in notes(result, done.server_counted):
        print(line)
    if args.save_result or args.save_detailed:
        path = result_path(args, load.model)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result_record(args, load, done, result), indent=1), encoding="utf-8")
        print(f"Result written to {path}")
    return 0 if result["completed"] else 1
