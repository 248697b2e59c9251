"""Byte layouts of what the KV caches store, one class per record (model.md 4.2, 4.3).

`encode` turns rows [n, dim] into bytes [n, nbytes]; `decode` turns them back into fp32. A record whose own rounding
is the one the model was trained with says so (`trained`), so that rounding is applied exactly once. `split` records
keep all data parts of a page before all scale parts, the others keep each row's scales behind its data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paraflash import formats as rounding


@dataclass(frozen=True)
class Record:
    """Base of all layouts. dim: channels of a row; data_bytes + scale_bytes = bytes of a row."""

    dim: int
    data_bytes: int
    scale_bytes: int
    split: bool = False
    page_multiple: int = 1  # a page's bytes are padded to this
    trained: bool = False

    @property
    def nbytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    def page_bytes(self, entries: int) -> int:
        return -(-entries * self.nbytes // self.page_multiple) * self.page_multiple

    def strides(self, entries: int) -> tuple[int, int, int]:
        """In a page of so many rows: bytes from row to row, from the page to its first scales, from scales to scales.

        The one place that knows how a page lies; FlashMLA's paged kernel demands this layout of `Fp8DsMlaRecord`.
        """
        if self.split:
            return self.data_bytes, self.data_bytes * entries, self.scale_bytes
        return self.nbytes, self.data_bytes, self.nbytes

    def encode(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def decode(self, raw: Tensor) -> Tensor:
        raise NotImplementedError


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Even channel in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _unpack_nibbles(raw: Tensor) -> Tensor:
    return torch.stack([raw & 15, raw >> 4], -1).flatten(-2)


@dataclass(frozen=True)
class PlainRecord(Record):
    """Rows in a float dtype."""

    dtype: torch.dtype = torch.float32

    def encode(self, x: Tensor) -> Tensor:
        return _bytes(x.to(self.dtype))

    def decode(self, raw: Tensor) -> Tensor:
        return raw.contiguous().view(self.dtype).float()


@dataclass(frozen=True)
class Mxfp8Record(Record):
    """528 bytes at dim 512: e4m3 codes, a UE8M0 byte per 32 channels. What windows were trained with."""

    def encode(self, x: Tensor) -> Tensor:
        codes, scale = rounding.encode_mxfp8(x)
        return torch.cat([_bytes(codes), scale], -1)

    def decode(self, raw: Tensor) -> Tensor:
        codes = raw[..., : self.dim].contiguous().view(torch.float8_e4m3fn)
        return rounding.decode_mxfp8(codes, raw[..., self.dim :])


@dataclass(frozen=True)
class Nvfp4Record(Record):
    """288 bytes at dim 512: e2m1 codes, an e4m3 scale per 16 channels. What compressed latents were trained with."""

    def encode(self, x: Tensor) -> Tensor:
        codes, scale = rounding.encode_nvfp4(x)
        return torch.cat([_pack_nibbles(codes), _bytes(scale)], -1)

    def decode(self, raw: Tensor) -> Tensor:
        scale = raw[..., self.data_bytes :].contiguous().view(torch.float8_e4m3fn)
        return rounding.decode_nvfp4(_unpack_nibbles(raw[..., : self.data_bytes]), scale)


@dataclass(frozen=True)
class Mxfp4Record(Record):
    """68 bytes at dim 128: e2m1 codes, a UE8M0 byte per 32 channels. What index keys were trained with."""

    def encode(self, x: Tensor) -> Tensor:
        codes, scale = rounding.encode_mxfp4(x)
        return torch.cat([_pack_nibbles(codes), scale], -1)

    def decode(self, raw: Tensor) -> Tensor:
        return rounding.decode_mxfp4(_unpack_nibbles(raw[..., : self.data_bytes]), raw[..., self.data_bytes :])


@dataclass(frozen=True)
class Fp8IndexRecord(Record):
    """132 bytes at dim 128: e4m3 codes and one fp32 power-of-two scale over the whole row."""

    def encode(self, x: Tensor) -> Tensor:
        codes, exponent = rounding.encode_mxfp8(x, group=self.dim)
        return torch.cat([_bytes(codes), _bytes(rounding.exp2_int(exponent.to(torch.int32) - 127))], -1)

    def decode(self, raw: Tensor) -> Tensor:
        codes = raw[..., : self.dim].contiguous().view(torch.float8_e4m3fn).float()
        return codes * raw[..., self.dim :].contiguous().view(torch.float32)


@dataclass(frozen=True)
class Fp8DsMlaRecord(Record):
    """584 bytes at dim 512, rope 64: e4m3 codes of the first 448 channels in groups of 64, the rope channels in
    bf16, then 7 UE8M0 bytes and padding. The published Hopper record; finer than the training for latents."""

    rope_dim: int = 64

    @property
    def _nope(self) -> int:
        return self.dim - self.rope_dim

    def encode(self, x: Tensor) -> Tensor:
        nope = self._nope
        padded = torch.nn.functional.pad(x[..., :nope], (0, -nope % 64))
        codes, scale = rounding.encode_mxfp8(padded, group=64)
        scale = torch.nn.functional.pad(scale, (0, self.scale_bytes - scale.shape[-1]))
        return torch.cat([_bytes(codes[..., :nope]), _bytes(x[..., nope:].to(torch.bfloat16)), scale], -1)

    def decode(self, raw: Tensor) -> Tensor:
        nope = self._nope
        codes = torch.nn.functional.pad(raw[..., :nope], (0, -nope % 64)).view(torch.float8_e4m3fn)
        values = rounding.decode_mxfp8(codes, raw[..., self.data_bytes : self.data_bytes + codes.shape[-1] // 64])
        rope = raw[..., nope : self.data_bytes].contiguous().view(torch.bfloat16).float()
        return torch.cat([values[..., :nope], rope], -1)


@dataclass(frozen=True)
class KVFormat:
    """The three records that one `--kv-cache-dtype` stands for."""

    name: str
    window: Record
    latent: Record
    index: Record


def kv_format(name: str, head_dim: int, rope_dim: int, index_dim: int) -> KVFormat:
    """Records of a KV cache dtype. Raises ValueError if the model's widths do not fit the record's groups."""
    if name in ("float32", "bfloat16"):
        dtype = torch.float32 if name == "float32" else torch.bfloat16
        size = dtype.itemsize
        row = PlainRecord(head_dim, head_dim * size, 0, dtype=dtype)
        return KVFormat(name, row, row, PlainRecord(index_dim, index_dim * size, 0, dtype=dtype))
    if head_dim % 32 or index_dim % 32:
        raise ValueError(
            f"kv_cache_dtype {name} needs head_dim and index_head_dim in multiples of 32, "
            f"not {head_dim} and {index_dim}; use bfloat16"
        )
    if name == "nvfp4_ds_mla":
        return KVFormat(
            name,
            Mxfp8Record(head_dim, head_dim, head_dim // 32, trained=True),
            Nvfp4Record(head_dim, head_dim // 2, head_dim // 16, trained=True),
            Mxfp4Record(index_dim, index_dim // 2, index_dim // 32, split=True, trained=True),
        )
    if name == "fp8_ds_mla":
        if head_dim == rope_dim:
            raise ValueError(
                f"kv_cache_dtype fp8_ds_mla rounds the channels before the rope ones, but head_dim and "
                f"qk_rope_head_dim are both {head_dim}; use bfloat16"
            )
        data = head_dim - rope_dim + 2 * rope_dim
        scales = -(-(head_dim - rope_dim) // 64)
        row8 = Fp8DsMlaRecord(head_dim, data, -(-scales // 8) * 8, split=True, page_multiple=data, rope_dim=rope_dim)
        return KVFormat(name, row8, row8, Fp8IndexRecord(index_dim, index_dim, 4, split=True))
    raise ValueError(f"kv_cache_dtype is {name!r}; fp8_ds_mla, nvfp4_ds_mla, bfloat16 or float32 is needed")
