"""The number formats that the model was trained with: e4m3 and e2m1 codes with power-of-two or e4m3 scales.

Every function works on the last dimension in groups and returns codes and scales; the round trips (what attention
sees) are decode(encode(x)). Exact on fp32 inputs: scales come from an integer rule on the bits, never from log2f.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

E4M3_MAX = 448.0
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Borders between neighbouring e2m1 values; ties go to the even code: down at 0.25 1.25 2.5 5, up at 0.75 1.75 3.5.
_E2M1_BORDERS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def pow2_ceil_exponent(x: Tensor) -> Tensor:
    """ceil(log2(x)) for positive fp32 x as int32, by the bits: exponent plus 1 if the mantissa is not zero."""
    bits = x.float().contiguous().view(torch.int32)
    return ((bits >> 23) & 255) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def exp2_int(exponent: Tensor) -> Tensor:
    """2**exponent as fp32 for int exponents in [-126, 127]."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def _groups(x: Tensor, size: int) -> Tensor:
    return x.float().unflatten(-1, (x.shape[-1] // size, size))


def encode_mxfp8(x: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """[.., n] -> e4m3 codes [.., n] and scale bytes uint8 [.., n/group] (model.md 3.6; UE8M0)."""
    g = _groups(x, group)
    amax = g.abs().amax(-1).clamp_min(1e-4)
    exponent = pow2_ceil_exponent(amax * torch.tensor(1 / E4M3_MAX, dtype=torch.float32))
    codes = (g / exp2_int(exponent)[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2), (exponent + 127).to(torch.uint8)


def decode_mxfp8(codes: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `encode_mxfp8`, fp32."""
    group = codes.shape[-1] // scale.shape[-1]
    return (_groups(codes, group) * exp2_int(scale.to(torch.int32) - 127)[..., None]).flatten(-2)


def e2m1_codes(x: Tensor) -> Tensor:
    """fp32 in [-6, 6] -> 4-bit codes (uint8): bit 3 sign, ties to the even code (model.md 3.7)."""
    magnitude = x.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for border, up in _E2M1_BORDERS:
        code += (magnitude >= border) if up else (magnitude > border)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


@lru_cache
def _e2m1_table(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor([*_E2M1_VALUES, *(-v for v in _E2M1_VALUES)], device=device)


def e2m1_values(codes: Tensor) -> Tensor:
    """4-bit codes -> fp32."""
    return _e2m1_table(codes.device)[codes.long()]


def encode_nvfp4(x: Tensor, group: int = 16) -> tuple[Tensor, Tensor]:
    """[.., n] -> e2m1 codes uint8 [.., n] and e4m3 scales [.., n/group] (model.md 3.7; not a power of two)."""
    g = _groups(x, group)
    scale = (g.abs().amax(-1).clamp_min(6 * 2.0**-9) / 6).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    return e2m1_codes((g / scale.float()[..., None]).clamp(-6, 6)).flatten(-2), scale


def decode_nvfp4(codes: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `encode_nvfp4`, fp32."""
    group = codes.shape[-1] // scale.shape[-1]
    return (e2m1_values(codes).unflatten(-1, (-1, group)) * scale.float()[..., None]).flatten(-2)


def encode_mxfp4(x: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """[.., n] -> e2m1 codes uint8 [.., n] and scale bytes uint8 [.., n/group] (model.md 3.8; UE8M0)."""
    g = _groups(x, group)
    amax = g.abs().amax(-1).clamp_min(6 * 2.0**-126)
    exponent = pow2_ceil_exponent(amax * torch.tensor(1 / 6, dtype=torch.float32))
    return e2m1_codes((g / exp2_int(exponent)[..., None]).clamp(-6, 6)).flatten(-2), (exponent + 127).to(torch.uint8)


def decode_mxfp4(codes: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `encode_mxfp4`, fp32."""
    group = codes.shape[-1] // scale.shape[-1]
    return (e2m1_values(codes).unflatten(-1, (-1, group)) * exp2_int(scale.to(torch.int32) - 127)[..., None]).flatten(
        -2
    )


def round_window(x: Tensor) -> Tensor:
    """Trained rounding of window latents: e4m3 per 32 channels (model.md 3.6). Keeps dtype."""
    return decode_mxfp8(*encode_mxfp8(x)).to(x.dtype)


def round_latent(x: Tensor) -> Tensor:
    """Trained rounding of compressed latents: e2m1 per 16 channels (model.md 3.7). Keeps dtype."""
    return decode_nvfp4(*encode_nvfp4(x)).to(x.dtype)


def round_index(x: Tensor) -> Tensor:
    """Trained rounding of index queries and keys: e2m1 per 32 channels (model.md 3.8, 3.9). Keeps dtype."""
    return decode_mxfp4(*encode_mxfp4(x)).to(x.dtype)


def round_activation(x: Tensor) -> Tensor:
    """Rounding of the input of an FP8 or FP4 linear: e4m3 per 32 channels (model.md 2.4). Keeps dtype.

    Widths that 32 does not divide (tiny test models) are padded with zeros, which changes no scale.
    """
    width = x.shape[-1]
    if width % 32:
        return round_activation(torch.nn.functional.pad(x, (0, -width % 32)))[..., :width]
    return decode_mxfp8(*encode_mxfp8(x)).to(x.dtype)
