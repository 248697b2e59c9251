"""Storage of records addressed by slot: pages of `entries` records each, slot = page * entries + offset.

One class serves the paged pool of compressed KV and index keys and the per-request windows; the byte layout comes
from the record. Reads give fp32 rows, so callers never see bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paraflash.cache.records import PlainRecord, Record


class Arena:
    """One allocation of plain rows for several pools, with spare rows behind them in which a step lays keys of its own.

    A kernel can so reach pool rows and step rows by row number in one tensor, without gathering either.
    """

    def __init__(self, record: PlainRecord, pool_rows: int, spare: int, device: torch.device | str = "cpu"):
        self._data = torch.zeros(pool_rows + spare, record.dim, dtype=record.dtype, device=device)
        self._taken, self._pool_rows, self._spare = 0, pool_rows, spare

    @property
    def rows(self) -> Tensor:
        """[pool rows + spare, dim]."""
        return self._data

    def take(self, count: int) -> tuple[Tensor, int]:
        """Bytes [count, row bytes] of the next `count` rows for a pool, and the number of the first."""
        first, self._taken = self._taken, self._taken + count
        if self._taken > self._pool_rows:
            raise ValueError(f"{self._taken} rows are taken of an arena for pools of {self._pool_rows} rows")
        return self._data[first : self._taken].view(torch.uint8), first

    def lay(self, rows: Tensor) -> int:
        """Copies rows [n, dim] into the spare rows and returns the number of the first; valid until the next call."""
        if len(rows) > self._spare:
            raise ValueError(
                f"{len(rows)} rows of a step do not fit into {self._spare} spare rows of the cache's arena"
            )
        self._data[self._pool_rows : self._pool_rows + len(rows)] = rows
        return self._pool_rows


class RecordPool:
    """[pages, page_bytes] uint8 on `device`, in `arena` if given. Slots are int64; one out of range raises in torch."""

    def __init__(
        self, record: Record, pages: int, entries: int, device: torch.device | str = "cpu", arena: Arena | None = None
    ):
        self.record, self.entries = record, entries
        self.arena, self.first_row = arena, 0
        if arena is None:
            self.storage = torch.zeros(pages, record.page_bytes(entries), dtype=torch.uint8, device=device)
        else:
            rows, self.first_row = arena.take(pages * entries)
            self.storage = rows.view(pages, record.page_bytes(entries))
        # Rows without scales lie back to back: they move as whole 8-byte words.
        plain = isinstance(record, PlainRecord) and record.nbytes % 8 == 0
        self._words = self.storage.view(torch.int64).view(-1, record.nbytes // 8) if plain else None
        data, scale = record.data_bytes, record.scale_bytes
        row, first_scale, next_scale = record.strides(entries)
        page, base = self.storage.stride(0), self.storage.storage_offset()
        self.layout = (page, row, first_scale, next_scale)  # bytes from page to page, then as in `Record.strides`
        self._data = self.storage.as_strided((pages, entries, data), (page, row, 1), base)
        self._scale = (
            self.storage.as_strided((pages, entries, scale), (page, next_scale, 1), base + first_scale)
            if scale
            else None
        )

    @property
    def nbytes(self) -> int:
        return self.storage.numel()

    def write(self, slots: Tensor, raw: Tensor) -> None:
        """Stores encoded rows raw [n, nbytes] at slots [n]."""
        if self._words is not None:
            self._words[slots] = raw.contiguous().view(torch.int64)
            return
        page, offset = slots // self.entries, slots % self.entries
        self._data[page, offset] = raw[:, : self.record.data_bytes]
        if self._scale is not None:
            self._scale[page, offset] = raw[:, self.record.data_bytes :]

    def read_raw(self, slots: Tensor) -> Tensor:
        """Encoded rows [n, nbytes] of slots [n]."""
        if self._words is not None:
            return self._words.index_select(0, slots).view(torch.uint8)
        page, offset = slots // self.entries, slots % self.entries
        data = self._data[page, offset]
        return data if self._scale is None else torch.cat([data, self._scale[page, offset]], -1)

    def read(self, slots: Tensor) -> Tensor:
        """fp32 rows [.., dim] of slots [..]."""
        return self.record.decode(self.read_raw(slots.reshape(-1))).unflatten(0, slots.shape)
