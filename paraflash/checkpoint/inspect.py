"""What a checkpoint holds and what each rank of a topology would: as plain data, as tables, as markdown.

A folder with only a config.json works too; the sizes then come from the tensor table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from paraflash.checkpoint.memory import rank_bytes, stored_bytes
from paraflash.checkpoint.tensors import SKIPPED, Shard, TensorSpec, split_range, tensor_table
from paraflash.config.model import ModelConfig

ITEMSIZE = {"bfloat16": 2, "float32": 4}


def kind_of(name: str) -> str:
    """A tensor name with its layer and expert numbers replaced by L and E."""
    return re.sub(r"\bexperts\.\d+", "experts.E", re.sub(r"^(layers|mtp)\.\d+", r"\1.L", name))


def describe(folder: Path, model: ModelConfig, tp: int, pcp: int, dtype: str) -> dict[str, Any]:
    """Everything `checkpoint inspect` shows, as JSON data; bytes are ints. Reads headers only.

    `problems` is the text of the checks that failed, or None; `files` is empty for a folder without weights.
    """
    from paraflash.checkpoint.files import CheckpointError
    from paraflash.checkpoint.load import INDEX, SINGLE, Checkpoint

    checkpoint, problems = None, None
    if (folder / INDEX).exists() or (folder / SINGLE).exists():
        try:
            checkpoint = Checkpoint.open(folder)
            checkpoint.check(model)
        except CheckpointError as error:
            problems = str(error)
    entries = checkpoint.entries if checkpoint else {}
    files: dict[str, int] = {}
    skipped: dict[str, dict[str, int]] = {}
    for name, entry in entries.items():
        files[entry.path.name] = files.get(entry.path.name, 0) + entry.nbytes
        if SKIPPED.match(name):
            group = skipped.setdefault(re.split(r"[._]", name)[0], {"tensors": 0, "bytes": 0})
            group["tensors"] += 1
            group["bytes"] += entry.nbytes
    return {
        "folder": str(folder),
        "files": files,
        "tensors": _kinds(tensor_table(model)),
        "skipped": skipped,
        "ranks": [_rank(model, tp, pcp, rank, dtype) for rank in range(tp * pcp)],
        "dtype": dtype,
        "problems": problems,
    }


def _kinds(specs: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {}
    for spec in specs:
        # Tables of different Engram layers differ in rows: each is a kind of its own.
        key = spec.name if spec.split.kind == "engram" else kind_of(spec.name)
        kind = kinds.setdefault(
            key,
            {
                "name": key,
                "shape": list(spec.shape),
                "dtype": spec.dtype,
                "scale_shape": list(spec.scale_shape) or None,
                "shard": str(spec.split),
                "tensors": 0,
                "bytes": 0,
            },
        )
        kind["tensors"] += 2 if spec.scale_name else 1
        kind["bytes"] += stored_bytes(spec)
    return list(kinds.values())


def _rank(model: ModelConfig, tp: int, pcp: int, rank: int, dtype: str) -> dict[str, Any]:
    shard = Shard(rank, tp, tp * pcp)
    stored = rank_bytes(model, shard, 2, keep_quantized=True)
    plain = rank_bytes(model, shard, ITEMSIZE[dtype])
    groups = split_range(model.o_groups, shard.tp_rank, tp)
    return {
        "rank": rank,
        "tp_rank": shard.tp_rank,
        "pcp_rank": rank // tp,
        "heads": [n * model.heads_per_group for n in groups],
        "experts": list(shard.experts(model.num_experts)),
        "gpu_bytes": stored.device,  # FP8 and FP4 kept as stored, the rest BF16
        "cpu_bytes": plain.device,  # dequantised
        "expert_gpu_bytes": stored.experts,
        "expert_cpu_bytes": plain.experts,
        "engram_mapped_bytes": stored.engram,  # once a node, in the page cache
    }


def size(count: int) -> str:
    """Bytes for people."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"


def markdown(model: ModelConfig) -> str:
    """The tensor table as markdown."""
    lines = ["| tensor | shape | stored | scale | count | split |", "|---|---|---|---|---|---|"]
    for kind in _kinds(tensor_table(model)):
        cells = (kind["name"], kind["shape"], kind["dtype"], kind["scale_shape"] or "", kind["tensors"], kind["shard"])
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def print_tables(report: dict[str, Any], write: Callable[[Any], None]) -> None:
    """Shows a `describe` report; `write` is a rich console's print."""
    from rich.table import Table

    def table(title: str, columns: list[str], rows: Iterable[Iterable[Any]]) -> None:
        result = Table(title=title, title_justify="left")
        for column in columns:
            result.add_column(column, justify="left" if column in ("tensor", "stored", "split", "file") else "right")
        for row in rows:
            result.add_row(*(str(cell) for cell in row))
        write(result)

    if report["files"]:
        table("Files", ["file", "bytes"], ((name, size(n)) for name, n in report["files"].items()))
    kinds = report["tensors"]
    rows = [(k["name"], k["shape"], k["dtype"], k["tensors"], size(k["bytes"]), k["shard"]) for k in kinds]
    total = ("all", "", "", sum(k["tensors"] for k in kinds), size(sum(k["bytes"] for k in kinds)), "")
    skipped = [(f"{n} (skipped)", "", "", g["tensors"], size(g["bytes"]), "") for n, g in report["skipped"].items()]
    columns = ["tensor", "shape", "stored", "count", "bytes", "split"]
    table("Tensors (counts and bytes include scales)", columns, [*rows, total, *skipped])
    table(
        "Ranks (GPU: FP8, FP4 as stored; CPU: dequantised; Engram: once a node)",
        ["rank", "tp", "pcp", "heads", "experts", "GPU weights", f"CPU {report['dtype']}", "Engram on host"],
        (
            (
                *(r[key] for key in ("rank", "tp_rank", "pcp_rank")),
                *(f"{r[key][0]}-{r[key][1] - 1}" if r[key][0] < r[key][1] else "none" for key in ("heads", "experts")),
                *(size(r[key]) for key in ("gpu_bytes", "cpu_bytes", "engram_mapped_bytes")),
            )
            for r in report["ranks"]
        ),
    )
