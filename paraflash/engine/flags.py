"""The command-line flags of the engine, under vLLM's names, shared by `paraflash generate`, `serve` and `bench`.

`add_engine_flags(parser)` adds them; `engine_config(args)` turns what was given into an `EngineConfig`. A flag that was
not given is absent from the namespace, so the defaults stand in one place only: the dataclass and `resolve`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

from paraflash.arguments import json_object
from paraflash.config.engine import DENSE_WEIGHTS, KV_CACHE_DTYPES, EngineConfig
from paraflash.engine.options import FOREIGN_OPTIONS, check_foreign_options

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def length(text: str) -> int:
    """A count such as 4096, 32k (32,000), 32K (32,768), 1M (1,048,576) or 25.6k."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no length; write 4096, 32k (32,000), 32K (32,768) or 1M (1,048,576)"
        )
    number, unit = match.groups()
    value = float(number) * _UNITS[unit]
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(value)


def model_length(text: str) -> int | None:
    """As `length`; `auto` and -1 mean None: as many as the model and the KV pool allow."""
    return None if text.strip() in ("auto", "-1") else length(text)


_DEFAULTS = {f.name: f.default for f in fields(EngineConfig) if f.default is not MISSING}


def _value(
    group: argparse._ArgumentGroup, name: str, kind: Callable[[str], Any], text: str, *short: str, **more: Any
) -> None:
    default = _DEFAULTS.get(name)
    shown = "" if default is None else f" (default {default})"
    group.add_argument(_flag(name), *short, dest=name, type=kind, default=argparse.SUPPRESS, help=text + shown, **more)


def _switch(group: argparse._ArgumentGroup, name: str, text: str, *short: str) -> None:
    """A pair --x / --no-x."""
    default = _DEFAULTS.get(name)
    shown = "" if default is None else f" (default {'on' if default else 'off'})"
    action = argparse.BooleanOptionalAction
    group.add_argument(_flag(name), *short, dest=name, action=action, default=argparse.SUPPRESS, help=text + shown)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the positional MODEL and all engine flags; usage lines do not list them, --help does, in groups."""
    parser.usage = "%(prog)s [-h] MODEL [flags]"
    parser.add_argument(
        "model", metavar="MODEL", help="folder of the checkpoint (config.json, *.safetensors, tokenizer.json)"
    )
    parallel = parser.add_argument_group("parallelism")
    _value(parallel, "tensor_parallel_size", int, "tensor parallel ranks", "-tp")
    _value(parallel, "prefill_context_parallel_size", int, "prefill context parallel ranks", "-pcp")
    _value(parallel, "pipeline_parallel_size", int, "only 1 is supported", "-pp")
    _value(parallel, "data_parallel_size", int, "only 1 is supported", "-dp")
    _value(parallel, "decode_context_parallel_size", int, "only 1 is supported", "-dcp")
    _switch(parallel, "enable_expert_parallel", "has no effect: whole experts are always spread over all ranks", "-ep")
    _value(parallel, "all2all_backend", str, "exchange of the experts")
    _switch(parallel, "disable_custom_all_reduce", "exchange between GPUs by NCCL alone, not by their copy engines")

    model = parser.add_argument_group("model and kernels")
    _value(model, "tokenizer", str, "folder of tokenizer.json (default: MODEL)")
    _value(model, "device", str, "where the model runs", choices=("auto", "cpu", "cuda"))
    _value(model, "dtype", str, "compute type: auto, bfloat16, float32")
    _value(model, "load_format", str, "auto: read the checkpoint; dummy: random weights")
    _value(model, "hf_overrides", json_object, "JSON object merged into config.json", metavar="JSON")
    _value(
        model,
        "engram_config",
        json_object,
        'JSON object; {"cpu_offload": false} keeps the tables on the devices, split over TP',
        metavar="JSON",
    )
    _value(model, "attention_backend", str, "vLLM's name of this model's kernels, FLASHMLA_SPARSE_DSV41, means auto")
    _value(
        model,
        "moe_backend",
        str,
        "kernels of the routed experts on a GPU: auto, humming, humming_fp8, triton; marlin means humming",
    )
    _value(
        model,
        "dense_weights",
        str,
        "FP8 linears on a GPU: bf16: expanded at load; fp8: one byte; auto: bf16 where the memory plan has room",
        choices=DENSE_WEIGHTS,
    )
    _switch(model, "enforce_eager", "never use CUDA graphs")
    _value(model, "seed", int, "seed of requests that bring none")

    cache = parser.add_argument_group("cache")
    _value(cache, "kv_cache_dtype", str, f"one of {', '.join(KV_CACHE_DTYPES)}")
    _value(cache, "kv_cache_rounding", str, "trained: round what is cached as in training; none: do not")
    _value(cache, "block_size", int, "tokens per KV block; only 64")
    _value(cache, "gpu_memory_utilization", float, "share of GPU memory for weights and KV")
    _value(cache, "kv_cache_memory_bytes", length, "bytes of KV cache per rank, instead of a share of the memory")
    _value(cache, "num_gpu_blocks_override", int, "number of KV blocks, on any device")
    _switch(cache, "enable_prefix_caching", "share the KV of equal prompt beginnings")
    _switch(
        cache,
        "swa_bounded_replay",
        "run the decoder layers of a prompt on its trailing window only (default on, off with --dtype float32)",
    )

    schedule = parser.add_argument_group("scheduling")
    _value(schedule, "max_model_len", model_length, "prompt plus output tokens of a request: 4096, 32k, 1M or auto")
    _value(schedule, "max_num_batched_tokens", length, "tokens of one step (default: by device)")
    _value(schedule, "max_num_seqs", int, "requests of one step (default: by device)")
    _value(schedule, "long_prefill_token_threshold", length, "most tokens that one prompt takes of a step; 0: no cap")
    _value(schedule, "max_num_partial_prefills", int, "most prompts prefilled in one step; 0: no cap")
    _value(schedule, "max_logprobs", int, "most log-probabilities per token that a request may ask for")
    _value(schedule, "max_queue", int, "waiting requests above which new ones are turned away; 0: no limit")
    _switch(schedule, "async_scheduling", "schedule the next step while one runs (default: on with GPUs)")
    _value(schedule, "step_timeout", float, "seconds without progress of a step after which the engine ends")
    _switch(schedule, "check_caches", "debug: compare the caches of all context parallel ranks after each step")

    foreign = parser.add_argument_group("flags of vLLM that are refused or have no effect here")
    for name, option in FOREIGN_OPTIONS.items():
        if option.kind is bool:
            _switch(foreign, name, option.reason, *option.short)
        else:
            kind = json_object if option.kind is dict else option.kind
            _value(foreign, name, kind, option.reason, *option.short)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The `EngineConfig` of parsed flags. Raises `Refused` for options that paraflash does not have."""
    given = vars(args)
    check_foreign_options({name: given[name] for name in FOREIGN_OPTIONS if name in given})
    known = {f.name for f in fields(EngineConfig)}
    return EngineConfig(**{name: value for name, value in given.items() if name in known})
