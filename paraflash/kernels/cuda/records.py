"""Rows of a record pool as numbers: gathered by slot and decoded in one pass. And a step's window rows as one page.

Serves the caches that are not plain bf16 rows. Codes are decoded by arithmetic on their bits, as in formats.py; every
value is exact in bf16 (at most six significant bits times a power of two, or bf16 itself).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paraflash.cache.pool import RecordPool
from paraflash.cache.records import Fp8DsMlaRecord, Fp8IndexRecord, Mxfp4Record, Mxfp8Record, Nvfp4Record, Record
from paraflash.kernels.cuda.launch import ceil_div, kernel
from paraflash.kernels.sizes import power_of_2

KINDS: dict[type[Record], int] = {
    Mxfp8Record: 1,
    Nvfp4Record: 2,
    Fp8DsMlaRecord: 3,
    Mxfp4Record: 4,
    Fp8IndexRecord: 5,
}


@triton.jit
def e4m3(byte):
    """e4m3 codes (int32) -> fp32: their bits put in place, the difference of the exponents' biases multiplied away.

    That goes through numbers below the least normal one, which fp32 products keep.
    """
    return (((byte & 127) << 20) | ((byte & 128) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def e2m1(code):
    """e2m1 codes (int32) -> fp32, likewise."""
    return (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def e8m0(byte):
    """UE8M0 scale bytes (int32, 1 to 254) -> fp32."""
    return (byte << 23).to(tl.float32, bitcast=True)


@kernel(do_not_specialize=("count", "entries"))
def _read_kernel(
    storage_ptr, slots_ptr, out_ptr, count, entries, page_stride, data_stride, scale_start, scale_stride,
    KIND: tl.constexpr, WIDTH: tl.constexpr, NOPE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots_ptr + row, mask=row < count, other=-1)
    ok = (slot >= 0)[:, None]
    page = storage_ptr + (slot // entries).to(tl.int64) * page_stride
    data = (page + (slot % entries) * data_stride)[:, None]
    scale = (page + scale_start + (slot % entries) * scale_stride)[:, None]
    c = tl.arange(0, WIDTH)[None, :]
    if KIND == 1:
        byte = tl.load(data + c, mask=ok, other=0).to(tl.int32)
        value = e4m3(byte) * e8m0(tl.load(scale + c // 32, mask=ok, other=1).to(tl.int32))
    elif KIND == 3:
        byte = tl.load(data + c, mask=ok & (c < NOPE), other=0).to(tl.int32)
        head = e4m3(byte) * e8m0(tl.load(scale + c // 64, mask=ok & (c < NOPE), other=1).to(tl.int32))
        tail = data + NOPE + 2 * (c - NOPE)
        low = tl.load(tail, mask=ok & (c >= NOPE), other=0).to(tl.int32)
        high = tl.load(tail + 1, mask=ok & (c >= NOPE), other=0).to(tl.int32)
        value = tl.where(c < NOPE, head, ((low << 16) | (high << 24)).to(tl.float32, bitcast=True))
    elif KIND == 5:
        byte = tl.load(data + c, mask=ok, other=0).to(tl.int32)
        bits = tl.zeros((ROWS, 1), dtype=tl.int32)
        for b in tl.static_range(4):
            bits |= tl.load(scale + b, mask=ok, other=0).to(tl.int32) << (8 * b)
        value = e4m3(byte) * bits.to(tl.float32, bitcast=True)
    else:
        byte = tl.load(data + c // 2, mask=ok, other=0).to(tl.int32)
        code = (byte >> (4 * (c % 2))) & 15
        if KIND == 2:
            value = e2m1(code) * e4m3(tl.load(scale + c // 16, mask=ok, other=0).to(tl.int32))
        else:
            value = e2m1(code) * e8m0(tl.load(scale + c // 32, mask=ok, other=1).to(tl.int32))
    at = row.to(tl.int64)[:, None] * WIDTH + c
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=(row < count)[:, None])


def readable(record: Record) -> bool:
    """Whether `read_rows` knows the record and its width."""
    return type(record) in KINDS and record.dim & (record.dim - 1) == 0


@dataclass
class Page:
    """storage [1, record.page_bytes(entries)] uint8: records laid as in a page of a pool."""

    record: Record
    entries: int
    storage: Tensor

    @property
    def layout(self) -> tuple[int, int, int, int]:
        return self.storage.shape[1], *self.record.strides(self.entries)

    def raw(self) -> Tensor:
        """Encoded rows [entries, nbytes]."""
        record, (row, first_scale, next_scale) = self.record, self.record.strides(self.entries)
        data = self.storage.as_strided((self.entries, record.data_bytes), (row, 1))
        scale = self.storage.as_strided((self.entries, record.scale_bytes), (next_scale, 1), first_scale)
        return torch.cat([data, scale], -1)


@kernel(do_not_specialize=("prior", "total", "entries", "out_scale_start"))
def _lay_kernel(
    ring_ptr, slots_ptr, rows_ptr, out_ptr, prior, total, entries,
    page_stride, data_stride, scale_start, scale_stride, out_stride, out_scale_start, out_scale_stride,
    DATA: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    c = tl.arange(0, BLOCK)[None, :]
    old, new = (row < prior)[:, None] & (c < ALL), ((row >= prior) & (row < total))[:, None] & (c < ALL)
    slot = tl.load(slots_ptr + row, mask=row < prior, other=0)
    page, offset = ((slot // entries) * page_stride)[:, None], (slot % entries)[:, None]
    at = page + tl.where(c < DATA, offset * data_stride + c, scale_start + offset * scale_stride + c - DATA)
    value = tl.load(ring_ptr + at, mask=old, other=0) | tl.load(
        rows_ptr + (row - prior)[:, None] * ALL + c, mask=new, other=0
    )
    row = row[:, None]
    at = tl.where(c < DATA, row * out_stride + c, out_scale_start + row * out_scale_stride + c - DATA)
    tl.store(out_ptr + at, value, mask=old | new)


def lay_page(ring: RecordPool, prior_slots: Tensor, step_rows: Tensor) -> Page:
    """Records of the ring at prior_slots [n], then step_rows (bytes [m, nbytes]), as one page of n + m entries."""
    record, total = ring.record, len(prior_slots) + len(step_rows)
    storage = torch.empty(1, record.page_bytes(total), dtype=torch.uint8, device=step_rows.device)
    page = Page(record, total, storage)
    sizes = (record.data_bytes, record.nbytes, *ring.layout, *page.layout[1:])
    whole = all(size % 8 == 0 for size in sizes)  # bytes move as words where everything lies on words
    word, step = (torch.int64, 8) if whole else (torch.uint8, 1)
    data, every, *strides = (size // step for size in sizes)
    if total:
        _lay_kernel[(ceil_div(total, 8),)](
            ring.storage.view(word), prior_slots, step_rows.contiguous().view(word), page.storage.view(word),
            len(prior_slots), total, ring.entries, *strides,
            DATA=data, ALL=every, BLOCK=power_of_2(every), ROWS=8, num_warps=4,
        )  # fmt: skip
    return page


def read_rows(pool: RecordPool | Page, slots: Tensor, out: Tensor) -> None:
    """Rows of slots [n] int64 (-1: zeros) into out [n, dim] (contiguous rows, any float dtype)."""
    record, width = pool.record, pool.record.dim
    nope = width - record.rope_dim if isinstance(record, Fp8DsMlaRecord) else width
    rows = max(1, 2048 // width)
    _read_kernel[(ceil_div(len(slots), rows),)](
        pool.storage, slots, out, len(slots), pool.entries, *pool.layout,
        KIND=KINDS[type(record)], WIDTH=width, NOPE=nope, ROWS=rows, num_warps=4,
    )  # fmt: skip
