"""`paraflash plan`: one table (and plot) of every TP x PCP split for a model, a GPU type and a workload.

Reads a config only, no weights and no GPU; `--calibrate` instead measures this machine and saves it as a GPU type.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paraflash.config.engine import DENSE_WEIGHTS
from paraflash.config.model import ConfigError, ModelConfig, load_config, parse_config
from paraflash.planner.hardware import USER_FILE, Hardware, load_hardware, save_entry
from paraflash.planner.memory import MemoryOptions
from paraflash.planner.predict import EFFICIENCIES, Prediction, predict_all, recommend
from paraflash.planner.workload import Workload

TERM_TITLES = {
    "gemm": "GEMM",
    "attention": "attention",
    "index": "index",
    "moe": "MoE",
    "residual": "residual",
    "all_reduce": "all-reduce",
    "pcp_exchange": "PCP exchange",
    "engram": "Engram",
    "launch": "launch",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL_OR_CONFIG", help="model folder, or a config.json")
    parser.add_argument(
        "--gpu",
        help="entry of the hardware file: H20, H20-141GB, H100, H200, H200-x2, B200 or your own (default H20)",
    )
    parser.add_argument("--num-gpus", type=int, default=8, help="GPUs of the instance (default 8)")
    parser.add_argument("--input-len", type=int, default=32768, help="tokens of a prompt (default 32768)")
    parser.add_argument("--concurrency", type=int, default=8, help="prompts that arrive together (default 8)")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=4096, help="rows of a step over all ranks (default 4096)"
    )
    parser.add_argument(
        "--max-num-seqs", type=int, default=256, help="requests with a window of their own (default 256)"
    )
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=("auto", "bfloat16", "fp8_ds_mla", "nvfp4_ds_mla"),
        help="auto is bfloat16",
    )
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.92, help="share of GPU memory for weights and KV"
    )
    parser.add_argument(
        "--dense-weights",
        default="auto",
        choices=DENSE_WEIGHTS,
        help="FP8 linears: expanded to bf16, or in one byte (memory only); auto: bf16 where it fits",
    )
    parser.add_argument(
        "--engram-config",
        type=json.loads,
        default={},
        metavar="JSON",
        help='{"cpu_offload": false} keeps the tables on the GPUs',
    )
    parser.add_argument(
        "--moe-backend", default="marlin", choices=tuple(EFFICIENCIES), help="which efficiency factors (default marlin)"
    )
    parser.add_argument(
        "--swa-bounded-replay",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the decoder layers of a prompt on its trailing window only",
    )
    parser.add_argument("--hardware-file", type=Path, default=USER_FILE, help=f"your own entries (default {USER_FILE})")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="also draw the terms, and speed against prompt length"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure this machine and save it to the hardware file (named by --gpu)",
    )


def read_model(path: str) -> ModelConfig:
    """A model folder or a config.json. Raises `ConfigError`."""
    if Path(path).is_dir():
        return load_config(path)
    try:
        return parse_config(json.loads(Path(path).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; a model folder or a config.json is needed") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None


def _engram_on_gpu(config: Any) -> bool:
    if (
        not isinstance(config, dict)
        or set(config) - {"cpu_offload"}
        or not isinstance(config.get("cpu_offload", True), bool)
    ):
        raise ValueError(f'--engram-config is {config!r}; {{"cpu_offload": true or false}} is needed')
    return not config.get("cpu_offload", True)


def run(args: argparse.Namespace) -> int:
    """Prints the plan; returns 0, or 1 if no split runs, or 2 for bad input."""
    try:
        if args.calibrate:
            return _calibrate(args)
        if args.model is None:
            raise ValueError("MODEL_OR_CONFIG is missing; a model folder or a config.json is needed")
        return _plan(args)
    except (ValueError, OSError) as error:  # ConfigError and HardwareError are ValueErrors
        print(f"paraflash plan: {error}", file=sys.stderr)
        return 2


def _calibrate(args: argparse.Namespace) -> int:
    from paraflash.planner.calibrate import measure

    entry = measure(args.gpu)
    save_entry(entry, args.hardware_file)
    if args.json:
        print(json.dumps(asdict(entry), indent=2))
    else:
        _print_hardware(entry)
        print(f"saved to {args.hardware_file}; use it with --gpu {entry.name!r}")
    return 0


def _plan(args: argparse.Namespace) -> int:
    model = read_model(args.model)
    hardware = load_hardware(args.gpu or "H20", args.hardware_file)
    workload = Workload(args.input_len, args.concurrency, args.max_num_batched_tokens, args.swa_bounded_replay)
    if args.input_len > model.max_position_embeddings:
        raise ValueError(f"--input-len is {args.input_len}; the model has {model.max_position_embeddings} positions")
    options = MemoryOptions(
        kv_cache_dtype="bfloat16" if args.kv_cache_dtype == "auto" else args.kv_cache_dtype,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_num_seqs=args.max_num_seqs,
        dense_weights=args.dense_weights,
        engram_on_gpu=_engram_on_gpu(args.engram_config),
    )
    if args.max_num_seqs < 1:
        raise ValueError(f"--max-num-seqs is {args.max_num_seqs}; at least 1 is needed")
    efficiency = EFFICIENCIES[args.moe_backend]
    predictions = predict_all(model, hardware, args.num_gpus, workload, efficiency, options)
    best = recommend(predictions)
    if args.json:
        print(json.dumps(to_json(predictions, best, hardware, workload, args.moe_backend), indent=2))
    else:
        _print_plan(predictions, best, hardware, workload, args.moe_backend)
    if args.plot:
        from paraflash.planner.plot import draw

        draw(args.plot, model, hardware, predictions, workload, efficiency, options)
    return 0 if best else 1


def to_json(
    predictions: list[Prediction], best: Prediction | None, hardware: Hardware, workload: Workload, backend: str
) -> dict[str, Any]:
    """The plan as plain data: seconds, bytes, FLOPs; terms are of one rank, summed over the workload's steps."""
    return {
        "gpu": asdict(hardware),
        "workload": asdict(workload),
        "moe_backend": backend,
        "efficiency": asdict(EFFICIENCIES[backend]),
        "recommended": str(best.topology) if best else None,
        "splits": [
            {
                "topology": str(p.topology),
                "tensor_parallel_size": p.topology.tp,
                "prefill_context_parallel_size": p.topology.pcp,
                "refused": p.refused or None,
                "input_tokens_per_second": p.tokens_per_second,
                "mean_ttft_seconds": p.mean_ttft,
                "memory": {**asdict(p.memory), "fixed": p.memory.fixed} if p.memory else None,
                "terms": {name: asdict(term) for name, term in p.cost.terms.items()} if p.cost else None,
            }
            for p in predictions
        ],
    }


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"


def _print_hardware(hardware: Hardware) -> None:
    from rich.table import Table

    from paraflash.console import table_console

    table = Table(title=hardware.name)
    for column in ("field", "value", "source"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for field, source in hardware.sources.items():
        table.add_row(field, f"{getattr(hardware, field):.4g}", source)
    table_console().print(table)


def _print_plan(
    predictions: list[Prediction], best: Prediction | None, hardware: Hardware, workload: Workload, backend: str
) -> None:
    from rich.table import Table

    from paraflash.console import table_console

    console = table_console()
    world = predictions[0].topology.world
    replay = "on" if workload.bounded_replay else "off"
    prompts = f"{workload.concurrency} prompts of {workload.input_len} tokens"
    head = f"{world} x {hardware.name}, {prompts}, budget {workload.batch_budget}"
    first = predictions[0]
    main = Table(title=f"{head}, {backend} experts, bounded replay {replay}")
    for column in (
        "split",
        "dense",
        "GPU a rank",
        "host a node",
        "KV tokens",
        "input tok/s",
        "change",
        "mean TTFT ms",
        "",
    ):
        main.add_column(column, justify="left" if column in ("split", "") else "right", no_wrap=column == "split")
    for p in predictions:
        if p.memory is None:
            main.add_row(str(p.topology), *["-"] * 7, p.refused)
            continue
        change = p.tokens_per_second / first.tokens_per_second - 1 if first.tokens_per_second else 0.0
        main.add_row(
            str(p.topology),
            p.memory.dense_weights,
            _size(p.memory.fixed),
            _size(p.memory.host_node),
            f"{p.memory.kv_tokens:,}",
            f"{p.tokens_per_second:,.0f}",
            f"{change:+.1%}" if p is not first and first.tokens_per_second else "",
            f"{p.mean_ttft * 1e3:,.0f}",
            p.refused or ("recommended" if p is best else ""),
        )
    console.print(main)

    terms = Table(title="Where a rank's time goes: microseconds a prompt token", padding=(0, 0))
    terms.add_column("split", no_wrap=True)
    for title in TERM_TITLES.values():
        terms.add_column(title, justify="right")
    terms.add_column("sum", justify="right")
    for p in predictions:
        if p.cost:
            scale = 1e6 / (workload.input_len * workload.concurrency)
            parts = [f"{p.cost.terms[name].seconds * scale:.2f}" for name in TERM_TITLES]
            terms.add_row(str(p.topology), *parts, f"{p.cost.seconds * scale:.2f}")
    console.print(terms)
    if best is None:
        console.print("No split runs with these settings.")
