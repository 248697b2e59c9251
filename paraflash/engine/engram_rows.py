"""Engram rows of a step, as stored bytes from host memory (model.md 3.12). ids [T, layers, columns] -> [T, columns*D].

There are two ways. `start` fetches ahead for a pass that runs as it is: on a GPU the bytes are gathered by threads into
pinned buffers, copied and decoded on a stream of their own while earlier layers run, and a layer waits for its own rows
only. `stage` is for a recorded pass: the bytes of all layers in one pinned buffer and one copy, decoded inside the pass
by `staged_rows`. A small step's bytes are gathered on the calling thread: waking others takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from os import cpu_count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paraflash.checkpoint.dummy import DummyEngramTable
from paraflash.checkpoint.engram_table import check_ids
from paraflash.parallel.exchange import RowGather

THREADS = min(8, cpu_count() or 1)  # random reads of host memory: more do not help
PIECE = 4096  # most rows that a thread gathers at a time
FEW = 1024  # rows, of all layers, that are not worth a thread
ALIGNED = 128  # bytes at whose multiples the parts of a staged buffer begin

Lookup = Callable[[int], Tensor]  # rows of the n-th Engram layer


class EngramRows:
    """Looks up rows in `tables` (one per Engram layer) for one device."""

    def __init__(self, tables: Sequence[Any], device: torch.device):
        self.tables, self.device = tables, device
        self._gatherers = ThreadPoolExecutor(THREADS, "engram-gather")  # starts no thread before the first piece
        self._ahead = device.type == "cuda" and not any(isinstance(table, DummyEngramTable) for table in tables)
        if self._ahead and tables:
            self._senders = ThreadPoolExecutor(1, "engram-send")
            self._stream = torch.cuda.Stream(device)

    def start(self, ids: NDArray[np.integer], everyone: RowGather | None = None) -> Lookup:
        """Begins the lookups of a step; the result gives the rows of the n-th Engram layer. Raises IndexError.

        `everyone` is for tables that need an exchange (`EngramShards`); here every rank has all rows.
        """
        if not self._ahead:
            return lambda n: self.tables[n].lookup(ids[:, n]).flatten(1).to(self.device)
        pending = [
            self._senders.submit(self._send, n, *self._gather_layer(n, check_ids(ids[:, n], table.rows)))
            for n, table in enumerate(self.tables)
        ]
        width = [ids.shape[2] * table.dim for table in self.tables]
        return lambda n: self._receive(pending[n], len(ids), width[n])

    def stage(self, ids: NDArray[np.integer]) -> Callable[[], Tensor]:
        """Begins to gather; the result waits for it and gives the bytes, uint8 on the host, for `staged_rows`.

        Their number follows from the number of rows alone. Raises IndexError.
        """
        places, size = self._places(len(ids) * ids.shape[2])
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        into, work = buffer.numpy(), []
        piece = min(PIECE, max(512, ids.size // (4 * THREADS)))
        for n, (table, (raw_at, scale_at)) in enumerate(zip(self.tables, places, strict=True)):
            flat = check_ids(ids[:, n], table.rows).reshape(-1)
            raw, scale = (
                into[at : at + len(flat) * width].reshape(len(flat), width)
                for at, width in ((raw_at, table.row_bytes), (scale_at, table.scale_bytes))
            )
            if ids.size <= FEW:
                table.gather(flat, raw, scale)
            else:
                work += self._submit(table, flat, raw, scale, piece)

        def gathered() -> Tensor:
            for part in work:
                part.result()
            return buffer

        return gathered

    def staged_rows(self, buffer: Tensor, count: int, columns: int, everyone: RowGather | None = None) -> Lookup:
        """Rows from a copy of the bytes that `stage` gathered for ids [count, layers, columns], on its device."""
        places, _ = self._places(count * columns)

        def lookup(n: int) -> Tensor:
            table, (raw_at, scale_at) = self.tables[n], places[n]
            raw, scale = (
                buffer[at : at + count * columns * width].view(count * columns, width)
                for at, width in ((raw_at, table.row_bytes), (scale_at, table.scale_bytes))
            )
            rows: Tensor = table.decode(raw, scale)
            return rows.view(count, columns * table.dim)

        return lookup

    def _places(self, count: int) -> tuple[list[tuple[int, int]], int]:
        """Where in a staged buffer each layer's `count` stored rows and their scales begin, and its size."""
        places, size = [], 0
        for table in self.tables:
            sizes = (count * width for width in (table.row_bytes, table.scale_bytes))
            ends = [-(-n // ALIGNED) * ALIGNED for n in sizes]
            places.append((size, size + ends[0]))
            size += sum(ends)
        return places, size

    def _submit(
        self, table: Any, ids: NDArray[np.int64], raw: NDArray[np.uint8], scale: NDArray[np.uint8], piece: int
    ) -> list[Future[None]]:
        parts = [slice(a, a + piece) for a in range(0, len(ids), piece)]
        return [self._gatherers.submit(table.gather, ids[p], raw[p], scale[p]) for p in parts]

    def _gather_layer(self, n: int, ids: NDArray[np.int64]) -> tuple[Tensor, Tensor, list[Future[None]]]:
        table, flat = self.tables[n], ids.reshape(-1)
        raw = torch.empty(len(flat), table.row_bytes, dtype=torch.uint8, pin_memory=True)
        scale = torch.empty(len(flat), table.scale_bytes, dtype=torch.uint8, pin_memory=True)
        return raw, scale, self._submit(table, flat, raw.numpy(), scale.numpy(), PIECE)

    def _send(self, n: int, raw: Tensor, scale: Tensor, parts: list[Future[None]]) -> tuple[Tensor, torch.cuda.Event]:
        for part in parts:
            part.result()
        with torch.cuda.stream(self._stream), torch.inference_mode():
            on_device = (x.to(self.device, non_blocking=True) for x in (raw, scale))
            rows = self.tables[n].decode(*on_device)
            return rows, self._stream.record_event()

    def _receive(self, pending: Future[tuple[Tensor, torch.cuda.Event]], count: int, width: int) -> Tensor:
        rows, ready = pending.result()
        here = torch.cuda.current_stream(self.device)
        here.wait_event(ready)
        rows.record_stream(here)
        return rows.view(count, width)  # count is 0 on a rank without rows
