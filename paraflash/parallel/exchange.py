"""How rows cross PCP ranks: every rank contributes some of its local rows, all ranks get all contributions.

Shapes are fixed by the plan, so all ranks issue the same collective with the same padded shape even when they have no
rows; pads are dropped on arrival. With one rank nothing is copied and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from paraflash.parallel.mesh import Group, Started, done
from paraflash.parallel.plan import own_part

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
        return self.gather_start(x).wait()

    def gather_start(self, x: Tensor) -> Started[Tensor]:
        """`gather`, waited for later."""
        if x.shape[0] != self.local:
            raise ValueError(f"{self.label}: {x.shape[0]} rows for a plan of {self.local}")
        if self.group.size == 1 or self.padded == 0:
            return done(x)
        return self.group.all_gather_start(self.pad(x), self.label).then(self.without_pads)

    def reduce_scatter_start(self, x: Tensor) -> Started[Tensor]:
        """Inverse of `gather` with a sum, waited for later: x [total, ..], one summand a rank -> this rank's rows
        [counts[rank], ..]."""
        if self.group.size == 1 or self.padded == 0:
            return done(x)
        return self.group.reduce_scatter_start(self.with_pads(x), self.label).then(lambda rows: rows[: self.local])

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows [counts[rank], ..] of gathered ones [total, ..]."""
        return x[own_part(self.counts, self.group.rank)]

    def without_pads(self, x: Tensor) -> Tensor:
        """x [size * padded, ..] -> [total, ..]."""
        if self._full:
            return x
        return torch.cat([part[:count] for part, count in zip(x.split(self.padded), self.counts, strict=True)])

    def with_pads(self, x: Tensor) -> Tensor:
        """x [total, ..] -> [size * padded, ..], zeros behind the rows of each rank."""
        if self._full:
            return x
        pads = x.new_zeros(self.padded - min(self.counts), *x.shape[1:])
        parts = zip(x.split(self.counts), self.counts, strict=True)
        return torch.cat([rows for part, count in parts for rows in (part, pads[: self.padded - count])])

    def large(self, x: Tensor) -> bool:
        """Whether the most rows [.., ...] that a rank contributes of x are better sent without others; equal on all."""
        return self.padded * _row_bytes(x) >= OWN_BYTES

    def gather_packed(self, *parts: Tensor) -> list[Tensor]:
        """Gathers several tensors of the same rows in one collective; dtypes and trailing shapes may differ.

        Large ones go on their own: copying them into a common row and out again costs more than a launch.
        """
        return self.gather_packed_start(*parts).wait()

    def gather_packed_start(self, *parts: Tensor) -> Started[list[Tensor]]:
        """`gather_packed`, waited for later."""
        if self.group.size == 1 or self.padded == 0:
            return done(list(parts))
        alone = [self.large(p) for p in parts]
        if any(alone):
            packed = self.gather_packed_start(*[p for p, own in zip(parts, alone, strict=True) if not own])
            large = [self.gather_start(p) for p, own in zip(parts, alone, strict=True) if own]

            def in_order() -> list[Tensor]:
                small, big = iter(packed.wait()), iter([started.wait() for started in large])
                return [next(big if own else small) for own in alone]

            return Started(in_order)
        if len(parts) < 2:
            return self.gather_start(parts[0]).then(lambda x: [x]) if parts else done([])
        flat = [_as_bytes(p) for p in parts]
        widths = [f.shape[1] for f in flat]
        like = [(p.dtype, p.shape[1:]) for p in parts]

        def unpacked(gathered: Tensor) -> list[Tensor]:
            # The copy aligns each part for its own dtype.
            copies = [g.clone(memory_format=torch.contiguous_format) for g in gathered.split(widths, 1)]
            return [c.flatten().view(dtype).view(-1, *shape) for c, (dtype, shape) in zip(copies, like, strict=True)]

        return self.gather_start(torch.cat(flat, 1)).then(unpacked)


class Trip:
    """Rows on their way to all ranks, and what is made of them back as sums: by the GPUs' copy engines where there are
    many rows and they reach each other, else by collectives."""

    def __init__(self, rows: RowGather, parts: Sequence[Tensor]):
        """Starts to gather parts [counts[rank], ..]; `out` waits for each of them [total, ..]."""
        self._rows, self._copied = rows, None
        if rows.group.copies is not None and rows.padded > 0:
            self._copied = rows.group.out_start([rows.pad(x) for x in parts], rows.label)
        self.out: Started[list[Tensor]]
        if self._copied is None:
            self.out = rows.gather_packed_start(*parts)
        else:
            self.out = self._copied.then(lambda found: [rows.without_pads(x) for x in found])

    def back_start(self, x: Tensor) -> Started[list[Tensor]]:
        """x [total, ..], one summand a rank; waits for tensors [counts[rank], ..] that make up the sum, in order."""
        rows = self._rows
        if self._copied is None:
            return rows.reduce_scatter_start(x).then(lambda own: [own])
        return rows.group.back_start(rows.with_pads(x), rows.label).then(
            lambda found: [part[: rows.local] for part in found]
        )


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
        arrived = group.all_gather_start(torch.cat([*mine, pad]), "outbox").wait().split(padded)
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
