"""Which kernel attends to the rows of a step: by the cache's records, the number of heads and the number of rows.

Plain bf16 rows are read where they are. Other records are decoded into a workspace of bf16 rows. In steps of few rows
(decoding) the records themselves are read, `fp8_ds_mla` by FlashMLA's paged kernel, `nvfp4_ds_mla` by direct.py: the
step's window rows [n] are laid as one page, the chosen ones lie in the pool's pages. What fits no kernel goes to the
reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paraflash.cache.pool import RecordPool
from paraflash.cache.records import Fp8DsMlaRecord, PlainRecord, Record
from paraflash.kernels.cuda import attention, direct, records
from paraflash.kernels.cuda.packages import Packages
from paraflash.kernels.reference import attention as reference

WORKSPACE_ROWS = 1 << 20  # rows decoded at a time: 1 GiB of bf16 at width 512
PAGED_ROWS = 256  # queries up to which the paged kernel takes a step
PAGED_RECORD = (512, 64, 584)  # channels, rope channels and bytes of what the paged kernel reads


@dataclass
class WindowKeys:
    """Window rows of a step: plain rows [n, d] in their record's dtype, or n other records as one page."""

    count: int
    rows: Tensor | None = None
    page: records.Page | None = None

    def readable(self, dtype: torch.dtype) -> bool:
        """Whether `numbers` of this dtype can be had."""
        if self.page is not None:
            return records.readable(self.page.record)
        return self.rows is not None and self.rows.dtype == dtype

    def numbers(self, like: Tensor, room: Tensor | None = None) -> Tensor:
        """[n, d] in the dtype of `like`; in `room` if given."""
        if self.page is None:
            assert self.rows is not None
            return self.rows if room is None else room.copy_(self.rows)
        out = like.new_empty(self.count, self.page.record.dim) if room is None else room
        records.read_rows(self.page, torch.arange(self.count, device=like.device), out)
        return out

    def decoded(self) -> Tensor:
        """[n, d] fp32, as the reference takes them."""
        if self.page is None:
            assert self.rows is not None
            return self.rows.float()
        return self.page.record.decode(self.page.raw())


def window_keys(ring: RecordPool, prior_slots: Tensor, step_rows: Tensor) -> WindowKeys:
    """Ring rows at prior_slots [n], then the step's own rows (bytes [m, nbytes])."""
    count = len(prior_slots) + len(step_rows)
    if not isinstance(ring.record, PlainRecord):
        return WindowKeys(count, page=records.lay_page(ring, prior_slots, step_rows))
    raw = torch.cat([ring.read_raw(prior_slots), step_rows]) if len(prior_slots) else step_rows.contiguous()
    return WindowKeys(count, rows=raw.view(ring.record.dtype))


class Attention:
    """`Kernels.attend` with what is installed."""

    def __init__(self, packages: Packages):
        self._packages = packages
        self._merged = attention.MergedIndices()
        self._paged_window, self._paged_slots = attention.MergedIndices(), attention.MergedIndices()

    def __call__(
        self,
        q: Tensor,
        keys: WindowKeys,
        window_index: Tensor,
        pool: RecordPool | None,
        slots: Tensor | None,
        sink: Tensor,
        scale: float,
    ) -> Tensor:
        width = q.shape[2]
        stored = None if pool is None else pool.record
        plain = stored is None or (isinstance(stored, PlainRecord) and stored.dtype == q.dtype)
        fits = keys.readable(q.dtype) and width >= 16 and width & (width - 1) == 0
        if not fits or len(q) == 0 or not (plain or (stored is not None and records.readable(stored))):
            return reference.attend(q, keys.decoded(), window_index, pool, slots, sink, scale)
        if self._paged(q, keys, stored):
            return self._attend_pages(q, keys, window_index, pool, slots, sink, scale)
        if keys.page is not None and direct.fits(keys.page.record, stored, width) and direct.pays(*q.shape[:2]):
            return direct.attend(q, keys.page, window_index, pool, slots, sink, scale)
        if pool is None or slots is None:
            return self._attend_rows(q, keys.numbers(q), window_index, None, None, sink, scale)
        if not plain:
            return self._attend_decoded(q, keys, window_index, pool, slots, sink, scale)
        window = keys.numbers(q)
        if pool.arena is None or not self._flash(q):
            own = pool.storage.view(q.dtype).view(-1, width)
            return attention.triton_attention(q.contiguous(), window, window_index, own, slots, sink, scale)
        merged, lengths = self._merged.of(window_index, slots, pool.arena.lay(window), pool.first_row)
        return attention.flash_attention(self._flash(q), q, pool.arena.rows, merged, lengths, sink, scale)

    def _flash(self, q: Tensor) -> Any:
        """FlashMLA where it is there and takes q, else None."""
        return self._packages.sparse_attention if attention.flash_takes(q) else None

    def _paged(self, q: Tensor, keys: WindowKeys, stored: Record | None) -> bool:
        """Whether the paged kernel takes the step: a decode step, or another one as small."""
        few = len(q) <= PAGED_ROWS and q.shape[1] <= attention.FLASH_HEADS and q.dtype == torch.bfloat16
        if self._packages.paged_attention is None or not few or keys.page is None:
            return False
        return all(
            isinstance(r, Fp8DsMlaRecord) and (r.dim, r.rope_dim, r.nbytes) == PAGED_RECORD
            for r in (keys.page.record, stored or keys.page.record)
        )

    def _attend_pages(
        self,
        q: Tensor,
        keys: WindowKeys,
        window_index: Tensor,
        pool: RecordPool | None,
        slots: Tensor | None,
        sink: Tensor,
        scale: float,
    ) -> Tensor:
        """The kernel reads 64 keys at a time: lists are padded with -1, which merging with nothing does."""
        run = self._packages.paged_attention
        assert run is not None and keys.page is not None
        padded, sinks = attention.pad_heads(q, sink)
        index, _ = self._paged_window.of(window_index, None, 0, 0)
        more, more_index = None, None
        if pool is not None and slots is not None:
            more, (more_index, _) = pages_of(pool), self._paged_slots.of(slots, None, 0, 0)
        return run(padded, pages_of(keys.page), index, more, more_index, scale, sinks)[:, : q.shape[1]]

    def _attend_rows(
        self,
        q: Tensor,
        window: Tensor,
        window_index: Tensor,
        chosen: Tensor | None,
        index: Tensor | None,
        sink: Tensor,
        scale: float,
    ) -> Tensor:
        """Over rows [n, d]: window_index into `window`; index into `chosen`, which lies right behind it."""
        flash = self._flash(q)
        if flash is None:
            return attention.triton_attention(q.contiguous(), window, window_index, chosen, index, sink, scale)
        count = len(window) + (0 if chosen is None else len(chosen))
        merged, lengths = attention.merge_indices(window_index, index, 0, len(window))
        rows_of_both = window.as_strided((count, q.shape[2]), (q.shape[2], 1))
        return attention.flash_attention(flash, q, rows_of_both, merged, lengths, sink, scale)

    def _attend_decoded(
        self,
        q: Tensor,
        keys: WindowKeys,
        window_index: Tensor,
        pool: RecordPool,
        slots: Tensor,
        sink: Tensor,
        scale: float,
    ) -> Tensor:
        """Decodes the chosen rows of a part of the queries at a time into a workspace behind the window rows."""
        out, k = torch.empty_like(q, memory_format=torch.contiguous_format), slots.shape[1]
        step = max(1, WORKSPACE_ROWS // k)
        room = q.new_empty(keys.count + min(step, len(q)) * k, q.shape[2])
        own, chosen = room.split([keys.count, len(room) - keys.count])
        keys.numbers(q, own)
        for first in range(0, len(q), step):
            part = slice(first, first + step)
            wanted = slots[part].contiguous()
            records.read_rows(pool, wanted.view(-1), chosen)
            place = torch.arange(wanted.numel(), device=q.device).view(wanted.shape)
            index = torch.where(wanted >= 0, place, -1)
            out[part] = self._attend_rows(q[part], own, window_index[part], chosen, index, sink, scale)
        return out


def pages_of(held: RecordPool | records.Page) -> Tensor:
    """[pages, entries, 1, bytes of a record] over the storage: how the paged kernel is told where pages and rows begin.

    Rows do not lie so: a page holds all data, then all scales (`Record.strides`).
    """
    pages, nbytes = held.storage.shape[0], held.record.nbytes
    return held.storage.as_strided((pages, held.entries, 1, nbytes), (held.storage.stride(0), nbytes, nbytes, 1))
