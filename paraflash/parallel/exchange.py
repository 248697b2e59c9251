"""How rows cross PCP ranks: every rank contributes some of its local rows, all ranks get all contributions.

Shapes are fixed by the plan, so all ranks issue the same collective with the same padded shape even when they have no
rows; pads are dropped on arrival. With one rank nothing is copied and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from paraflash.parallel.mesh import Group

OWN_BYTES = 1 << 20  # a rank's share of a tensor that is gathered without the others


class RowGather:
    """Gathers counts[r] rows from each rank r into [sum(counts), ..], rank-major and without pads."""

    def __init__(self, group: Group, counts: Sequence[int], label: str):
        self.group, self.counts, self.label = group, tuple(counts), label
        if len(self.counts) != group.size:
            raise ValueError(f"counts has {len(self.counts)} entries for a group of {group.size} ranks")
        self.local = self.counts[group.rank]
        self.padded = max(self.counts)
        self.total = sum(self.counts)
        self._full = group.size == 1 or all(c == self.padded for c in self.counts)

    def pad(self, x: Tensor) -> Tensor:
        """x [counts[rank], ..] -> [padded, ..], zeros behind; the same shape on every rank."""
        return x if x.shape[0] == self.padded else torch.cat([x, x.new_zeros(self.padded - x.shape[0], *x.shape[1:])])

    def gather(self, x: Tensor) -> Tensor:
        """x [counts[rank], ..] -> [total, ..]. No rank has rows: no collective."""
        if x.shape[0] != self.local:
            raise ValueError(f"{self.label}: {x.shape[0]} rows for a plan of {self.local}")
        if self.group.size == 1 or self.padded == 0:
            return x
        gathered = self.group.all_gather(self.pad(x), self.label)
        return gathered if self._full else self._without_pads(gathered)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Inverse of `gather` with a sum: x [total, ..], one summand a rank -> this rank's rows [counts[rank], ..]."""
        if self.group.size == 1 or self.padded == 0:
            return x
        return self.group.reduce_scatter(x if self._full else self._with_pads(x), self.label)[: self.local]

    def _without_pads(self, x: Tensor) -> Tensor:
        """x [size * padded, ..] -> [total, ..]."""
        return torch.cat([part[:count] for part, count in zip(x.split(self.padded), self.counts, strict=True)])

    def _with_pads(self, x: Tensor) -> Tensor:
        """x [total, ..] -> [size * padded, ..], zeros behind the rows of each rank."""
        pads = x.new_zeros(self.padded - min(self.counts), *x.shape[1:])
        parts = zip(x.split(self.counts), self.counts, strict=True)
        return torch.cat([rows for part, count in parts for rows in (part, pads[: self.padded - count])])

    def gather_packed(self, *parts: Tensor) -> list[Tensor]:
        """Gathers several tensors of the same rows in one collective; dtypes and trailing shapes may differ.

        Large ones go on their own: copying them into a common row and out again costs more than a launch.
        """
        if self.group.size == 1 or self.padded == 0:
            return list(parts)
        alone = [self.padded * _row_bytes(p) >= OWN_BYTES for p in parts]
        if any(alone):
            small = iter(self.gather_packed(*[p for p, own in zip(parts, alone, strict=True) if not own]))
            return [self.gather(p) if own else next(small) for p, own in zip(parts, alone, strict=True)]
        if len(parts) < 2:
            return [self.gather(p) for p in parts]
        flat = [_as_bytes(p) for p in parts]
        gathered = self.gather(torch.cat(flat, 1)).split([f.shape[1] for f in flat], 1)
        # The copy aligns each part for its own dtype.
        return [
            g.flatten().clone().view(p.dtype).reshape(-1, *p.shape[1:]) for g, p in zip(gathered, parts, strict=True)
        ]


class Outbox:
    """Rows that other ranks need only in later steps: all of a step leave together, in one gather at its end."""

    def __init__(self) -> None:
        self._parcels: list[tuple[RowGather, Tensor, Callable[[Tensor], None]]] = []

    def post(self, gather: RowGather, rows: Tensor, deliver: Callable[[Tensor], None]) -> None:
        """`send` will call deliver(gather.gather(rows))."""
        self._parcels.append((gather, rows, deliver))

    def send(self) -> None:
        """Delivers everything posted, in order. No rank has rows: no collective and no delivery."""
        parcels, self._parcels = self._parcels, []
        sizes = [[count * _row_bytes(rows) for count in gather.counts] for gather, rows, _ in parcels]
        per_rank = [list(of_rank) for of_rank in zip(*sizes, strict=True)]
        padded = max([0, *(sum(of_rank) for of_rank in per_rank)])
        if padded == 0:
            return
        group = parcels[0][0].group
        mine = [_as_bytes(rows).flatten() for _, rows, _ in parcels]
        pad = mine[0].new_zeros(padded - sum(per_rank[group.rank]))
        arrived = group.all_gather(torch.cat([*mine, pad]), "outbox").split(padded)
        pieces = [x[: sum(of_rank)].split(of_rank) for x, of_rank in zip(arrived, per_rank, strict=True)]
        for (_, rows, deliver), raw in zip(parcels, zip(*pieces, strict=True), strict=True):
            deliver(torch.cat(raw).view(rows.dtype).view(-1, *rows.shape[1:]))


def sum_over_tp(tp: Group, x: Tensor, rows: RowGather, label: str) -> Tensor:
    """Sum of x [T, ..] over the TP group, in one shape for all PCP ranks although T differs between them."""
    return x if tp.size == 1 else tp.all_reduce(rows.pad(x), label)[: x.shape[0]]


def _as_bytes(x: Tensor) -> Tensor:
    """x [n, ..] -> its bytes [n, row bytes]."""
    # A contiguous tensor may have any stride in a dimension of size 1, and viewing it as bytes would then fail.
    flat = x.contiguous().as_strided((x.numel(),), (1,))
    return flat.view(torch.uint8).view(x.shape[0], _row_bytes(x))


def _row_bytes(x: Tensor) -> int:
    return x.element_size() * int(np.prod(x.shape[1:], dtype=np.int64))
