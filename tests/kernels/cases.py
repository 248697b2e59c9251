"""Fresh random inputs for every operation of the kernel interface, and how far a kernel may be from the reference.

The same cases run at small sizes in Triton's interpreter (fp32, no GPU) and at the model's widths on a GPU (bf16).
`error` is ||a - b|| / ||b||. Values that pass a rounding to few bits may land on the next code where the two sums
differ in their last bits: such cases compare what share of values differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paraflash import formats
from paraflash.cache.pool import RecordPool
from paraflash.cache.records import PlainRecord
from paraflash.checkpoint.quant import QuantTensor
from paraflash.config.model import RopeSpec
from paraflash.kernels.interface import Expert, IndexRows, Rotary
from paraflash.model.rope import rotary


@dataclass
class Sizes:
    rows: int
    hidden: int
    streams: int = 4
    head_dim: int = 512
    rope: int = 64
    heads: int = 64
    index_heads: int = 32
    index_dim: int = 128
    experts: int = 384
    topk: int = 6
    inner: int = 2304
    window: int = 128
    chosen: int = 512


class Maker:
    """Random tensors of one dtype on one device."""

    def __init__(self, seed: int, device: str, dtype: torch.dtype):
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device, self.dtype = device, dtype

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, device=self.device) * scale
        return x.to(dtype or self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def rotary(self, n: int, dim: int, high: int = 100_000) -> Rotary:
        spec = RopeSpec(160000.0, 16.0, 32.0, 1.0, 65536)
        return rotary(self.integers(0, high, n), spec, dim)

    def fp4_weight(self, *shape: int) -> QuantTensor:
        flat = self.normal(int(np.prod(shape[:-1])), shape[-1], scale=0.03, dtype=torch.float32)
        codes, scale = formats.encode_mxfp4(flat)
        packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
        return QuantTensor("fp4", packed.view(*shape[:-1], -1), scale.view(*shape[:-1], -1))


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype, (
        found.shape,
        found.dtype,
        wanted.shape,
        wanted.dtype,
    )
    assert not found.isnan().any()
    wanted = wanted.double()
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


def near(found: Tensor, wanted: Tensor, limit: float) -> None:
    measured = error(found, wanted)
    assert measured < limit, f"error {measured:.2e}, allowed {limit:.2e}"


def differing(found: Tensor, wanted: Tensor, tolerance: float = 1e-2) -> float:
    """Share of values off by more than `tolerance` of themselves."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    a, b = found.double(), wanted.double()
    return float(((a - b).abs() > tolerance * b.abs() + 1e-9).double().mean())


def plain_pool(m: Maker, pages: int, entries: int, width: int, rounded: bool = False) -> RecordPool:
    pool = RecordPool(PlainRecord(width, width * m.dtype.itemsize, 0, dtype=m.dtype), pages, entries, m.device)
    x = m.normal(pages * entries, width)
    pool.storage.copy_((formats.round_index(x) if rounded else x).view(torch.uint8).view(pages, -1))
    return pool


def index_rows(m: Maker, lengths: list[int], counts: list[int], entries: int, pages: int, more: int = 0) -> IndexRows:
    """Requests of counts[i] rows each, the last of which sees lengths[i] entries; pages in random order.

    `more`: by how much the bounds of the entries are too large.
    """
    blocks = [-(-n // entries) for n in lengths]
    order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(len(lengths)))[: sum(blocks)] + 1
    table = np.zeros((len(lengths), max(blocks)), np.int64)
    visible, segments, taken, row = [], [], 0, 0
    for i, (length, count, need) in enumerate(zip(lengths, counts, blocks, strict=True)):
        table[i, :need] = order[taken : taken + need]
        taken += need
        visible.append(np.maximum(0, length - np.arange(count)[::-1]))
        segments.append((row, row + count, i))
        row += count
    host = np.concatenate(visible).astype(np.int64)
    request = np.repeat(np.arange(len(counts)), counts)
    d = m.device
    seen = np.array(lengths, np.int64)
    return IndexRows(
        tuple(segments),
        torch.tensor(host, device=d),
        host,
        torch.tensor(request, device=d),
        torch.tensor(table, device=d),
        entries,
        torch.tensor(seen, device=d),
        torch.tensor(np.cumsum(seen) - seen, device=d),
        int(seen.max()) + more,
        int(seen.sum()) + more,
    )


def experts(m: Maker, s: Sizes, count: int, first: int) -> Expert:
    """FP4 experts as stored."""
    up = (count, s.inner, s.hidden)
    return Expert(m.fp4_weight(*up), m.fp4_weight(count, s.hidden, s.inner), m.fp4_weight(*up), first, s.experts)


def values_of(e: Expert, dtype: torch.dtype) -> Expert:
    return Expert(e.w1.dequantise(dtype), e.w2.dequantise(dtype), e.w3.dequantise(dtype), e.first, e.total)
