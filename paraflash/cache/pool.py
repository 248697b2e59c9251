"""Storage of records addressed by slot: pages of `entries` records each, slot = page * entries + offset.

One class serves the paged pool of compressed KV and index keys and the per-request windows; the byte layout comes
from the record. Reads give fp32 rows, so callers never see bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paraflash.cache.records import Record


class RecordPool:
    """[pages, page_bytes] uint8 on `device`. Slots are int64; a slot out of range is a bug and raises in torch."""

    def __init__(self, record: Record, pages: int, entries: int, device: torch.device | str = "cpu"):
        self.record, self.pages, self.entries = record, pages, entries
        self.storage = torch.zeros(pages, record.page_bytes(entries), dtype=torch.uint8, device=device)
        data, scale = record.data_bytes, record.scale_bytes
        stride, start = (data, scale), (0, data * entries)  # split layout
        if not record.split:
            stride, start = (data + scale, data + scale), (0, data)
        page = self.storage.stride(0)
        self._data = self.storage.as_strided((pages, entries, data), (page, stride[0], 1), start[0])
        self._scale = (
            self.storage.as_strided((pages, entries, scale), (page, stride[1], 1), start[1]) if scale else None
        )

    @property
    def nbytes(self) -> int:
        return self.storage.numel()

    def write(self, slots: Tensor, raw: Tensor) -> None:
        """Stores encoded rows raw [n, nbytes] at slots [n]."""
        page, offset = slots // self.entries, slots % self.entries
        self._data[page, offset] = raw[:, : self.record.data_bytes]
        if self._scale is not None:
            self._scale[page, offset] = raw[:, self.record.data_bytes :]

    def read_raw(self, slots: Tensor) -> Tensor:
        """Encoded rows [n, nbytes] of slots [n]."""
        page, offset = slots // self.entries, slots % self.entries
        data = self._data[page, offset]
        return data if self._scale is None else torch.cat([data, self._scale[page, offset]], -1)

    def read(self, slots: Tensor) -> Tensor:
        """fp32 rows [.., dim] of slots [..]."""
        return self.record.decode(self.read_raw(slots.reshape(-1))).unflatten(0, slots.shape)
