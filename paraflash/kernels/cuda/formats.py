"""Number formats inside Triton kernels: the same rules as reference/rounding.py, on fp32 blocks in registers.

e4m3 is rounded by arithmetic on the fp32 bits and not by a hardware conversion, so that every GPU and the interpreter
agree with the reference. Kernels do not specialise on numbers of rows, which would compile them anew for every step.
A block is [rows, groups, group size]; scales are one per [rows, groups].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pow2_ceil_exponent(x):
    """ceil(log2(x)) of positive fp32 x, by the bits."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits >> 23) & 255) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def exp2_int(exponent):
    """2**exponent as fp32 for exponents in [-126, 127]."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def round_e4m3(x):
    """fp32 in [-448, 448] -> the nearest e4m3 value, ties to even, as fp32."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    magnitude = tl.abs(x)
    # Below 2^-6 the grid is 2^-9: adding 2^14 makes the fp32 addition round to it.
    tiny = (magnitude + 16384.0) - 16384.0
    return tl.where(magnitude < 0.015625, tl.where(x < 0, -tiny, tiny), normal)


@triton.jit
def round_e2m1(x):
    """fp32 in [-6, 6] -> the nearest e2m1 value, ties to the even code, as fp32."""
    m = tl.abs(x)
    value = tl.where(m > 0.25, 0.5, 0.0)
    value = tl.where(m >= 0.75, 1.0, value)
    value = tl.where(m > 1.25, 1.5, value)
    value = tl.where(m >= 1.75, 2.0, value)
    value = tl.where(m > 2.5, 3.0, value)
    value = tl.where(m >= 3.5, 4.0, value)
    value = tl.where(m > 5.0, 6.0, value)
    return tl.where(x < 0, -value, value)


@triton.jit
def mxfp8_round_trip(x, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """e4m3 with a power-of-two scale per SIZE channels (model.md 3.6, 2.4): [ROWS, GROUPS * SIZE] -> the same."""
    g = tl.reshape(x, (ROWS, GROUPS, SIZE))
    amax = tl.maximum(tl.max(tl.abs(g), axis=2), 1e-4)
    exponent = pow2_ceil_exponent(amax * 0.002232142857142857)  # fp32(1 / 448)
    codes = round_e4m3(tl.minimum(tl.maximum(g * exp2_int(-exponent)[:, :, None], -448.0), 448.0))
    return tl.reshape(codes * exp2_int(exponent)[:, :, None], (ROWS, GROUPS * SIZE))


@triton.jit
def e4m3_row(x):
    """fp32 [n] -> e4m3 values [n] as fp32, and the power of two that they are to be multiplied by.

    What `mxfp8_round_trip` gave stays what it is, but for values under 2^-13 of the row's largest: they may lose bits.
    """
    exponent = pow2_ceil_exponent(tl.maximum(tl.max(tl.abs(x), axis=0), 1e-30) * 0.002232142857142857)
    return round_e4m3(x * exp2_int(-exponent)), exp2_int(exponent)


@triton.jit
def mxfp4_round_trip(x, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """e2m1 with a power-of-two scale per SIZE channels (model.md 3.8): [ROWS, GROUPS * SIZE] -> the same."""
    g = tl.reshape(x, (ROWS, GROUPS, SIZE))
    amax = tl.maximum(tl.max(tl.abs(g), axis=2), 7.052966104933725e-38)  # 6 * 2^-126
    exponent = pow2_ceil_exponent(amax * 0.16666666666666666)
    codes = round_e2m1(tl.minimum(tl.maximum(g * exp2_int(-exponent)[:, :, None], -6.0), 6.0))
    return tl.reshape(codes * exp2_int(exponent)[:, :, None], (ROWS, GROUPS * SIZE))


@triton.jit
def nvfp4_round_trip(x, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """e2m1 with an e4m3 scale per SIZE channels (model.md 3.7), true division: [ROWS, GROUPS * SIZE] -> the same."""
    g = tl.reshape(x, (ROWS, GROUPS, SIZE))
    amax = tl.maximum(tl.max(tl.abs(g), axis=2), 0.01171875)  # 6 * 2^-9
    scale = round_e4m3(tl.minimum(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)), 448.0))
    wide = tl.broadcast_to(scale[:, :, None], (ROWS, GROUPS, SIZE))
    codes = round_e2m1(tl.minimum(tl.maximum(tl.div_rn(g, wide), -6.0), 6.0))
    return tl.reshape(codes * wide, (ROWS, GROUPS * SIZE))


@triton.jit
def rope_tail(x, cos, sin, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """Rotates adjacent pairs of the last ROPE channels of x [ROWS, WIDTH]; cos, sin [ROWS, WIDTH / 2] hold 1 and 0
    for the pairs before them (model.md 3.4)."""
    a, b = tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2)))
    return tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (ROWS, WIDTH))


@triton.jit
def load_angles(cos_ptr, sin_ptr, rows, mask, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """cos, sin [rows, WIDTH / 2] for `rope_tail` from tables [n, ROPE / 2]."""
    pair = tl.arange(0, WIDTH // 2) - (WIDTH - ROPE) // 2
    at = rows[:, None] * (ROPE // 2) + pair[None, :]
    inside = mask[:, None] & (pair >= 0)[None, :]
    return tl.load(cos_ptr + at, mask=inside, other=1.0), tl.load(sin_ptr + at, mask=inside, other=0.0)
