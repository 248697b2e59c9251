"""Engram rows of a step, fetched ahead of the layers that add them (model.md 3.12).

On a GPU the stored bytes are gathered from host memory by threads into pinned buffers, copied and decoded on a stream
of their own while earlier layers run; a layer waits for its own rows only. ids [T, layers, columns] -> [T, columns*D].
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paraflash.checkpoint.engram_table import check_ids
from paraflash.parallel.exchange import RowGather

THREADS = min(8, os.cpu_count() or 1)  # random reads of host memory: more do not help
PIECE = 4096  # rows that a thread gathers at a time


class EngramRows:
    """Looks up rows in `tables` (one per Engram layer) for one device."""

    def __init__(self, tables: Sequence[Any], device: torch.device):
        self.tables, self.device = tables, device
        self._ahead = device.type == "cuda" and all(hasattr(table, "gather") for table in tables)
        if self._ahead and tables:
            self._gatherers = ThreadPoolExecutor(THREADS, "engram-gather")
            self._senders = ThreadPoolExecutor(1, "engram-send")
            self._stream = torch.cuda.Stream(device)

    def start(self, ids: NDArray[np.integer], everyone: RowGather | None = None) -> Callable[[int], Tensor]:
        """Begins the lookups of a step; the result gives the rows of the n-th Engram layer. Raises IndexError.

        `everyone` is for tables that need an exchange (`EngramShards`); here every rank has all rows.
        """
        if not self._ahead:
            return lambda n: self.tables[n].lookup(ids[:, n]).flatten(1).to(self.device)
        pending = [
            self._senders.submit(self._send, n, *self._gather(n, check_ids(ids[:, n], table.rows)))
            for n, table in enumerate(self.tables)
        ]
        width = [ids.shape[2] * table.dim for table in self.tables]
        return lambda n: self._receive(pending[n], len(ids), width[n])

    def _gather(self, n: int, ids: NDArray[np.int64]) -> tuple[Tensor, Tensor, list[Future[None]]]:
        table, flat = self.tables[n], ids.reshape(-1)
        raw = torch.empty(len(flat), table.row_bytes, dtype=torch.uint8, pin_memory=True)
        scale = torch.empty(len(flat), table.scale_bytes, dtype=torch.uint8, pin_memory=True)
        parts = [slice(a, a + PIECE) for a in range(0, len(flat), PIECE)]
        to_raw, to_scale = raw.numpy(), scale.numpy()
        return raw, scale, [self._gatherers.submit(table.gather, flat[p], to_raw[p], to_scale[p]) for p in parts]

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
