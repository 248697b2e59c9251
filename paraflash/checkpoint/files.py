"""safetensors files, read piece by piece: headers first, then exactly the bytes that a rank needs.

A file is an 8-byte length, a JSON header (name -> dtype, shape, byte range) and the data. Reading goes through plain
file reads into the caller's memory and not through a mapping, so that loading never holds more than it asked for.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# safetensors dtype -> (bytes a value, torch dtype that the raw bytes are viewed as)
DTYPES = {
    "BF16": (2, torch.bfloat16),
    "F16": (2, torch.float16),
    "F32": (4, torch.float32),
    "F64": (8, torch.float64),
    "F8_E4M3": (1, torch.float8_e4m3fn),
    "F8_E5M2": (1, torch.float8_e5m2),
    "F8_E8M0": (1, torch.uint8),  # raw bytes: see quant.py
    "I8": (1, torch.uint8),  # packed FP4
    "U8": (1, torch.uint8),
    "BOOL": (1, torch.bool),
    "I16": (2, torch.int16),
    "I32": (4, torch.int32),
    "I64": (8, torch.int64),
}
_MAX_HEADER = 100_000_000  # safetensors' own limit


class CheckpointError(ValueError):
    """The files of a checkpoint are damaged or are not what the config describes; the message names file and tensor."""


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # absolute byte offset in the file
    nbytes: int


def read_header(path: Path) -> dict[str, Entry]:
    """All tensors of one file. Raises CheckpointError for a file that is missing, cut short or not safetensors."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise CheckpointError(f"{path} is no complete safetensors file: {size} bytes, header length {length}")
            raw = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} has a damaged header: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} has a damaged header: an object is needed")
    entries = {}
    for name, item in raw.items():
        if name != "__metadata__":
            entries[name] = _entry(path, name, item, 8 + length)
            end = entries[name].start + entries[name].nbytes
            if end > size:
                raise CheckpointError(f"{path} is cut short: {name} ends at byte {end}, the file has {size}")
    return entries


def _entry(path: Path, name: str, item: Any, data_start: int) -> Entry:
    try:
        dtype, shape, (begin, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
        whole = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path} has a damaged header: {name} needs dtype, shape and data_offsets")
    if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype][0]:
        raise CheckpointError(f"{path} has a damaged header: {name} {dtype} {list(shape)} spans {end - begin} bytes")
    return Entry(path, dtype, shape, data_start + begin, end - begin)


def read_rows(entry: Entry, first: int, end: int) -> Tensor:
    """Rows [first, end) of a tensor as stored (a 1-d tensor has rows of one value). Reads just those bytes."""
    itemsize, dtype = DTYPES[entry.dtype]
    width = math.prod(entry.shape[1:])
    want = (end - first) * width * itemsize
    raw = np.fromfile(entry.path, np.uint8, want, offset=entry.start + first * width * itemsize)
    if len(raw) != want:
        raise CheckpointError(f"{entry.path} is cut short: {len(raw)} of {want} bytes could be read")
    return torch.from_numpy(raw).view(dtype).view(end - first, *entry.shape[1:])
