"""Engram tables on the devices, their rows split over TP (`--engram-config '{"cpu_offload": false}'`; model.md 3.12).

Each TP rank keeps a run of every table's rows as stored. A lookup reads the rows that are here, zeros for the others,
and sums over TP. ids [T, layers, columns] -> [T, columns * D] a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paraflash.checkpoint.engram_table import EngramTable, check_ids
from paraflash.checkpoint.memory import check_memory
from paraflash.model.inputs import to_device
from paraflash.parallel.exchange import RowGather, sum_over_tp
from paraflash.parallel.mesh import Mesh

PIECE = 1 << 18  # rows copied to a device at a time


class TableShard:
    """The rows of one table that TP rank `rank` of `size` keeps: every rank as many, the last ones fewer."""

    def __init__(self, table: EngramTable, rank: int, size: int, device: torch.device):
        each = -(-table.rows // size)
        self.table, self.first = table, min(table.rows, rank * each)
        end = min(table.rows, self.first + each)
        self.rows = end - self.first
        needed = (self.rows + 1) * (table.row_bytes + table.scale_bytes)
        check_memory(needed, device, "this rank's share of an Engram table")
        # One row of zeros stands behind the kept ones, for ids of other ranks.
        self._raw = torch.zeros(self.rows + 1, table.row_bytes, dtype=torch.uint8, device=device)
        self._scale = torch.zeros(self.rows + 1, table.scale_bytes, dtype=torch.uint8, device=device)
        for start in range(self.first, end, PIECE):
            ids = np.arange(start, min(end, start + PIECE))
            raw, scale = (np.empty((len(ids), n), np.uint8) for n in (table.row_bytes, table.scale_bytes))
            table.gather(ids, raw, scale)
            here = slice(start - self.first, start - self.first + len(ids))
            self._raw[here] = torch.from_numpy(raw).to(device)
            self._scale[here] = torch.from_numpy(scale).to(device)

    @property
    def nbytes(self) -> int:
        return self._raw.nbytes + self._scale.nbytes

    def lookup(self, ids: Tensor) -> Tensor:
        """ids [..] int64 on the device -> values [.., D], zeros where another rank keeps the row."""
        at = ids - self.first
        at = torch.where((at >= 0) & (at < self.rows), at, self.rows)
        return self.table.decode(self._raw[at], self._scale[at])


class EngramShards:
    """Looks up rows in tables that lie on the devices of a mesh."""

    def __init__(self, tables: Sequence[EngramTable], mesh: Mesh):
        self.tables, self._mesh = tables, mesh
        self._shards = [TableShard(table, mesh.tp.rank, mesh.tp.size, mesh.device) for table in tables]

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self._shards)

    def start(self, ids: NDArray[np.integer], everyone: RowGather) -> Callable[[int], Tensor]:
        """As `EngramRows.start`; everyone: the step's rows of all PCP ranks, which give the sums a common shape."""
        return self.staged_rows(to_device(self.stage(ids)(), self._mesh.device), len(ids), ids.shape[2], everyone)

    def stage(self, ids: NDArray[np.integer]) -> Callable[[], Tensor]:
        """As `EngramRows.stage`: here the bytes are those of the ids, layer by layer."""
        checked = np.stack([check_ids(ids[:, n], table.rows) for n, table in enumerate(self.tables)])
        staged = torch.from_numpy(checked.view(np.uint8).reshape(-1))
        staged = staged.pin_memory() if self._mesh.device.type == "cuda" else staged
        return lambda: staged

    def staged_rows(self, buffer: Tensor, count: int, columns: int, everyone: RowGather) -> Callable[[int], Tensor]:
        """As `EngramRows.staged_rows`, summed over TP where a layer asks for it."""
        ids = buffer.view(torch.int64).view(len(self.tables), count, columns)

        def lookup(n: int) -> Tensor:
            return sum_over_tp(self._mesh.tp, self._shards[n].lookup(ids[n]).flatten(1), everyone, "engram")

        return lookup
