"""Stored weights to values and back: FP8 in 32x32 blocks, FP4 experts, FP8 Engram rows (model.md 2.3).

Decoding is exact in fp32. Scales are raw UE8M0 bytes (uint8) everywhere: a numeric cast of the e8m0 dtype would round.
Codes of FP8 are float8_e4m3fn, codes of FP4 are uint8 with the even column in the low nibble.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paraflash.checkpoint.tensors import BLOCK
from paraflash.formats import (
    E4M3_MAX,
    e2m1_values,
    encode_mxfp4,
    encode_mxfp8,
    exp2_int,
    pow2_ceil_exponent,
)

E8M0_NAN = 255


@dataclass
class QuantTensor:
    """A weight kept in its stored codes, for backends that multiply with them.

    kind "fp8": data e4m3 [.., out, in], scale uint8 [.., blocks, blocks] of 32x32 values.
    kind "fp4": data uint8 [.., out, in/2], scale uint8 [.., out, in/32].
    A leading dimension, where there is one, stacks experts. row0 and col0 are where the first value lies inside the
    first scale block (0 unless a shard cuts a block).
    """

    kind: str
    data: Tensor
    scale: Tensor
    row0: int = 0
    col0: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [.., out, in]."""
        width = self.data.shape[-1] * (2 if self.kind == "fp4" else 1)
        return (*self.data.shape[:-1], width)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Values [.., out, in] in `dtype`."""
        if self.kind == "fp4":
            return fp4_dequant(self.data, self.scale).to(dtype)
        return fp8_block_dequant(self.data, self.scale, self.row0, self.col0).to(dtype)


def e8m0_to_float(scale: Tensor) -> Tensor:
    """UE8M0 bytes -> fp32: 2^(byte - 127); 0 is the subnormal 2^-127 and 255 is NaN."""
    bits = scale.view(torch.uint8).to(torch.int32) << 23
    bits = torch.where(bits == 0, 1 << 22, bits)
    return torch.where(bits == E8M0_NAN << 23, 0x7FC00000, bits).view(torch.float32)


def fp8_block_dequant(weight: Tensor, scale: Tensor, row0: int = 0, col0: int = 0) -> Tensor:
    """e4m3 [.., o, i] with scales uint8 [.., >= blocks, >= blocks] -> fp32 [.., o, i].

    The scales start with the block that covers the first value, which lies at (row0, col0) inside it.
    """
    rows, cols = weight.shape[-2:]
    factor = e8m0_to_float(scale).repeat_interleave(BLOCK, -2)[..., row0 : row0 + rows, :]
    factor = factor.repeat_interleave(BLOCK, -1)[..., col0 : col0 + cols]
    return weight.float().mul_(factor)


def fp4_dequant(packed: Tensor, scale: Tensor) -> Tensor:
    """Packed e2m1 uint8 [.., o, i/2] with scales uint8 [.., o, i/32] -> fp32 [.., o, i]."""
    byte = torch.arange(256, dtype=torch.uint8, device=packed.device)
    pairs = e2m1_values(torch.stack([byte & 15, byte >> 4], -1))  # [256, 2]: low nibble first
    values = pairs[packed.view(torch.uint8).int()].flatten(-2)
    return values.unflatten(-1, (-1, BLOCK)).mul_(e8m0_to_float(scale)[..., None]).flatten(-2)


def row_dequant(codes: Tensor, scale: Tensor) -> Tensor:
    """Engram rows: e4m3 [n, d] with scales uint8 [n, d/32] -> fp32 [n, d]."""
    return (codes.float().unflatten(-1, (-1, BLOCK)) * e8m0_to_float(scale)[..., None]).flatten(-2)


def fp8_block_quant(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[o, i] -> e4m3 [o, i] and scales uint8 [ceil(o/32), ceil(i/32)], by the rule of model.md 2.4 over a block."""
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [o/32, 32, i/32, 32]
    amax = blocks.abs().amax((1, 3)).clamp_min(1e-4)
    exponent = pow2_ceil_exponent(amax * torch.tensor(1 / E4M3_MAX, dtype=torch.float32))
    scaled = (blocks / exp2_int(exponent)[:, None, :, None]).flatten(2).flatten(0, 1)
    codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes[:rows, :cols].contiguous(), (exponent + 127).to(torch.uint8)


def fp4_quant(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[o, i] -> packed e2m1 uint8 [o, i/2] and scales uint8 [o, i/32]; i must be a multiple of 32."""
    codes, scale = encode_mxfp4(weight, BLOCK)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale


def row_quant(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Engram rows [n, d] -> e4m3 [n, d] and scales uint8 [n, d/32]; d must be a multiple of 32."""
    return encode_mxfp8(rows, BLOCK)
