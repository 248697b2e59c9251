"""`paraflash checkpoint synth` and `paraflash checkpoint inspect`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from paraflash.config.model import ConfigError, load_config

_PRESETS = ("tiny", "small", "wide512")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    synth = commands.add_parser("synth", help="write a small random checkpoint in the released format")
    synth.add_argument("folder", type=Path, help="where to write; created if it does not exist")
    synth.add_argument("--preset", choices=_PRESETS, default="tiny", help="sizes to start from (default: tiny)")
    synth.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=JSON",
        help="override one config field, e.g. text_config.n_routed_experts=32; repeatable",
    )
    synth.add_argument("--seed", type=int, default=0)
    synth.add_argument("--shards", type=int, default=4, help="safetensors files (default: 4); 1 writes no index")
    synth.add_argument("--unquantized", action="store_true", help="BF16 weights instead of FP8 and FP4")
    synth.add_argument(
        "--text-only", action="store_true", help="leave out the vision and draft tensors that are skipped"
    )
    synth.add_argument("--force", action="store_true", help="replace a checkpoint that is in the folder")

    inspect = commands.add_parser("inspect", help="show what a checkpoint holds and what each rank would hold")
    inspect.add_argument("folder", type=Path, help="a model folder; one with only a config.json works too")
    inspect.add_argument("-tp", "--tensor-parallel-size", type=_positive, default=1)
    inspect.add_argument("-pcp", "--prefill-context-parallel-size", type=_positive, default=1)
    inspect.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of dequantised weights")
    shape = inspect.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print one JSON object")
    shape.add_argument("--table", action="store_true", help="print the tensor table as markdown")


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 with a message on stderr for bad settings or a checkpoint that does not fit its config."""
    try:
        return _synth(args) if args.action == "synth" else _inspect(args)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least 1")
    return int(text)


def _overrides(items: list[str]) -> dict[str, Any]:
    result = {}
    for item in items:
        path, equals, text = item.partition("=")
        try:
            if not path or not equals:
                raise ValueError
            result[path] = json.loads(text)
        except ValueError:
            raise ConfigError(f"--set {item}: PATH=JSON is needed, e.g. text_config.index_topk=32") from None
    return result


def _synth(args: argparse.Namespace) -> int:
    if args.shards < 1:
        raise ConfigError(f"--shards is {args.shards}; at least 1 is needed")
    occupied = (args.folder / "config.json").exists() or any(args.folder.glob("*.safetensors"))
    if occupied and not args.force:
        raise ConfigError(f"{args.folder} holds a checkpoint; --force replaces it")
    from paraflash.checkpoint.synthetic import synthetic_config, write_synthetic

    config = synthetic_config(args.preset, _overrides(args.set), quantise=not args.unquantized)
    write_synthetic(args.folder, config, args.seed, args.shards, extra_tensors=not args.text_only)
    total = sum(path.stat().st_size for path in args.folder.iterdir() if path.is_file())
    print(f"{args.folder}: {args.preset} checkpoint, {args.shards} shard(s), {total / 2**20:.1f} MiB, seed {args.seed}")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from paraflash.checkpoint.inspect import describe, markdown, print_tables

    model = load_config(args.folder)
    if args.table:
        print(markdown(model))
        return 0
    tp, pcp = args.tensor_parallel_size, args.prefill_context_parallel_size
    if model.o_groups % tp:
        raise ConfigError(f"--tensor-parallel-size is {tp}; it must divide the {model.o_groups} output groups")
    report = describe(args.folder, model, tp, pcp, args.dtype)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        from paraflash.console import table_console

        print_tables(report, table_console().print)
    if report["problems"]:
        print(f"error: {report['problems']}", file=sys.stderr)
        return 1
    return 0
