"""Writes a checkpoint in the released format from float tensors: quantised per the table, several shards, an index.

`config` decides the format: with `quantization_config` the linears become FP8, the routed experts FP4 and the Engram
tables FP8 rows; without it all of them are BF16. Tensors may come in any order, one at a time.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from paraflash.checkpoint.load import INDEX, SINGLE
from paraflash.checkpoint.memory import stored_bytes
from paraflash.checkpoint.quant import fp4_quant, fp8_block_quant, row_quant
from paraflash.checkpoint.tensors import TensorSpec, tensor_table
from paraflash.config.model import parse_config


@dataclass(frozen=True)
class _Place:
    file: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


_ITEMSIZE = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    shards: int = 1,
    extra: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes config.json, the safetensors shards and, for more than one, the index.

    `tensors` gives every text tensor of the config once, in any float dtype, [out, in]; optional ones may be left out
    and are then zero. `extra` are BF16 tensors outside the table (draft and vision names). Raises ValueError for a
    missing, unknown, repeated, mis-shaped or non-finite tensor; the index is written last, so a failed write is no
    valid checkpoint.
    """
    specs = {spec.name: spec for spec in tensor_table(parse_config(config))}
    extra = extra or {}
    places = _assign(list(specs.values()), extra, shards)
    folder.mkdir(parents=True, exist_ok=True)
    names = [SINGLE] if shards == 1 else [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    (folder / INDEX).unlink(missing_ok=True)
    files: list[BinaryIO] = []
    try:
        starts: dict[str, int] = {}
        for number, name in enumerate(names):
            files.append((folder / name).open("wb"))
            starts |= _write_header(files[-1], {n: p for n, p in places.items() if p.file == number})

        def put(name: str, data: Tensor) -> None:
            file = files[places[name].file]
            file.seek(starts[name])
            file.write(data.contiguous().reshape(-1).view(torch.uint8).numpy().data)

        waiting = dict(specs)
        for name, tensor in tensors:
            spec = waiting.pop(name, None)
            if spec is None:
                raise ValueError(f"{name} is {'given twice' if name in specs else 'no tensor of this config'}")
            _check(spec, tensor)
            data, scale = _encode(spec, tensor)
            put(name, data)
            if scale is not None and spec.scale_name:
                put(spec.scale_name, scale)
        missing = [name for name, spec in waiting.items() if not spec.optional]
        if missing:
            raise ValueError(f"{len(missing)} tensors are missing: {', '.join(missing[:20])}")
        for name, tensor in extra.items():
            put(name, tensor.to(torch.bfloat16))
    finally:
        for file in files:
            file.close()
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    if shards > 1:
        total = sum(place.nbytes for place in places.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {n: names[p.file] for n, p in sorted(places.items())},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _assign(specs: list[TensorSpec], extra: Mapping[str, Tensor], shards: int) -> dict[str, _Place]:
    """Spreads tensors over the shards in order, by bytes; with enough shards each Engram table gets one of the last."""
    if shards < 1:
        raise ValueError(f"shards is {shards}; at least 1 is needed")
    tables = [spec for spec in specs if spec.split.kind == "engram"]
    own = len(tables) if shards > len(tables) else 0
    plain = [spec for spec in specs if not own or spec.split.kind != "engram"]
    total, done = sum(stored_bytes(spec) for spec in plain), 0
    places: dict[str, _Place] = {}

    def place(spec: TensorSpec, file: int) -> None:
        places[spec.name] = _place(file, spec.stored_dtype, spec.stored_shape)
        if spec.scale_name:
            places[spec.scale_name] = _place(file, "F8_E8M0", spec.scale_shape)

    for spec in plain:
        place(spec, done * (shards - own) // total)
        done += stored_bytes(spec)
    for number, spec in enumerate(tables[:own]):
        place(spec, shards - own + number)
    for name, tensor in extra.items():
        if name in places:
            raise ValueError(f"{name} is a text tensor and cannot be an extra one")
        places[name] = _place(0, "BF16", tuple(tensor.shape))
    return places


def _place(file: int, dtype: str, shape: tuple[int, ...]) -> _Place:
    return _Place(file, dtype, shape, math.prod(shape) * _ITEMSIZE[dtype])


def _write_header(file: BinaryIO, places: Mapping[str, _Place]) -> dict[str, int]:
    """Writes the header of one file, sizes the file, and returns where each tensor starts. Wide dtypes come first."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, at = {}, 0
    for name, place in sorted(places.items(), key=lambda item: (-_ITEMSIZE[item[1].dtype], item[0])):
        offsets[name] = at
        at += place.nbytes
        header[name] = {"dtype": place.dtype, "shape": list(place.shape), "data_offsets": [offsets[name], at]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    file.truncate(8 + len(text) + at)
    return {name: 8 + len(text) + offset for name, offset in offsets.items()}


def _check(spec: TensorSpec, tensor: Tensor) -> None:
    if tuple(tensor.shape) != spec.shape:
        raise ValueError(f"{spec.name} has shape {list(tensor.shape)}, not {list(spec.shape)}")
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{spec.name} holds a value that is not finite")


def _encode(spec: TensorSpec, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    tensor = tensor.detach().cpu()
    if spec.dtype == "fp8":
        return fp8_block_quant(tensor)
    if spec.dtype == "fp4":
        return fp4_quant(tensor)
    if spec.dtype == "engram":
        return row_quant(tensor)
    return tensor.to(torch.float32 if spec.dtype == "f32" else torch.bfloat16), None
