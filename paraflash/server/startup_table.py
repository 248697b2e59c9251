"""The one table that is printed at start: topology, what each rank holds, KV capacity, kernels."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_LIMITS = ("max_model_len", "max_num_batched_tokens", "max_num_seqs")
_SWITCHES = ("enable_prefix_caching", "swa_bounded_replay")


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def rows(names: tuple[str, ...], info: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and value of each line. `info` is `EngineCore.info()`; what it lacks is left out."""
    out = [("model", ", ".join(names))]
    if "model" in info:
        out.append(("checkpoint", str(info["model"])))
    if "tensor_parallel_size" in info:
        tp, pcp = info["tensor_parallel_size"], info["prefill_context_parallel_size"]
        out.append(
            ("topology", f"TP {tp} x PCP {pcp}: {info['world_size']} rank(s) on {info['device']}, {info['dtype']}")
        )
    for name in _LIMITS:
        if info.get(name) is not None:
            out.append((name.replace("_", " "), f"{info[name]:,}"))
    if "kv_capacity_tokens" in info:
        capacity = f"{info['kv_capacity_tokens']:,} tokens ({info['num_blocks'] - 1:,} blocks of {info['block_size']})"
        out.append(("KV capacity", f"{capacity}, {info['kv_cache_dtype']}, rounding {info['kv_cache_rounding']}"))
    switches = [
        f"{name.removeprefix('enable_').replace('_', ' ')} {'on' if info[name] else 'off'}"
        for name in _SWITCHES
        if name in info
    ]
    if switches:
        out.append(("cache", ", ".join(switches)))
    kernels = [
        f"{name} {info[key]}"
        for name, key in (("attention", "attention_backend"), ("MoE", "moe_backend"))
        if key in info
    ]
    kernels += [
        f"dense weights {held['dense_weights']}" for held in info.get("ranks", [])[:1] if "dense_weights" in held
    ]
    if kernels:
        out.append(("kernels", ", ".join(kernels)))
    for rank, held in enumerate(info.get("ranks", [])):
        sizes = [
            f"{key.removesuffix('_bytes').replace('_', ' ')} {_bytes(v)}"
            for key, v in held.items()
            if key.endswith("_bytes")
        ]
        out.append((f"rank {rank} holds", ", ".join(sizes)))
    return out


def print_table(names: tuple[str, ...], info: dict[str, Any]) -> None:
    table = Table(title="paraflash", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows(names, info):
        table.add_row(label, value)
    Console(stderr=True).print(table)
