"""Engram tables as lookup stores: rows stay in the checkpoint file, mapped read-only into memory (model.md 2.1, 3.12).

All ranks of a node share one copy in the page cache; a lookup touches only its rows. ids [..] -> rows [.., D].
"""

from __future__ import annotations

import mmap

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paraflash.checkpoint.files import CheckpointError, Entry
from paraflash.checkpoint.quant import E8M0_NAN, row_dequant


class EngramTable:
    """One layer's table: e4m3 rows [rows, D] with UE8M0 scales [rows, D/32], or BF16 rows without scales.

    A lookup is `gather`, which copies stored bytes and runs in any thread, and `decode`, which runs on any device.
    """

    def __init__(self, weight: Entry, scale: Entry | None, dtype: torch.dtype):
        self.rows, self.dim = weight.shape
        self.dtype = dtype
        self._path = weight.path
        self._weight = _map(weight)
        self._scale = _map(scale) if scale else None
        self.row_bytes = self._weight.shape[1]
        self.scale_bytes = self._scale.shape[1] if self._scale is not None else 0

    def lookup(self, ids: NDArray[np.integer]) -> Tensor:
        """Dequantised rows [.., D] on the CPU in `dtype`. Raises IndexError for an id outside the table."""
        wanted = check_ids(ids, self.rows)
        raw = torch.empty(*wanted.shape, self.row_bytes, dtype=torch.uint8)
        scale = torch.empty(*wanted.shape, self.scale_bytes, dtype=torch.uint8)
        self.gather(wanted, raw.numpy(), scale.numpy())
        return self.decode(raw, scale)

    def gather(self, ids: NDArray[np.int64], raw: NDArray[np.uint8], scale: NDArray[np.uint8]) -> None:
        """Copies the stored rows of checked ids [..] into raw [.., row_bytes] and scale [.., scale_bytes]."""
        np.take(self._weight, ids, axis=0, out=raw, mode="clip")  # "raise" would go through another buffer
        if self._scale is None:
            return
        np.take(self._scale, ids, axis=0, out=scale, mode="clip")
        if (scale == E8M0_NAN).any():
            raise CheckpointError(f"an Engram row in {self._path} has the scale byte 255, which is NaN")

    def decode(self, raw: Tensor, scale: Tensor) -> Tensor:
        """Gathered bytes -> values [.., D] in `dtype`, on the bytes' device."""
        if not self.scale_bytes:
            return raw.view(torch.bfloat16).to(self.dtype)
        return row_dequant(raw.view(torch.float8_e4m3fn), scale).to(self.dtype)


def check_ids(ids: NDArray[np.integer], rows: int) -> NDArray[np.int64]:
    """`ids` as int64; raises IndexError where one is outside [0, rows)."""
    wide: NDArray[np.int64] = np.asarray(ids, np.int64)
    if wide.size and (wide.min() < 0 or wide.max() >= rows):
        bad = wide[(wide < 0) | (wide >= rows)][0]
        raise IndexError(f"Engram row {bad} is outside a table of {rows} rows")
    return wide


def _map(entry: Entry) -> NDArray[np.uint8]:
    """Maps the bytes of one tensor's rows read-only, without read-ahead: neighbours of a hashed row are not wanted."""
    with entry.path.open("rb") as file:
        start = entry.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(file.fileno(), entry.start - start + entry.nbytes, access=mmap.ACCESS_READ, offset=start)
    if hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_RANDOM)
    raw = np.frombuffer(mapped, np.uint8, entry.nbytes, entry.start - start)
    return raw.reshape(entry.shape[0], -1)
