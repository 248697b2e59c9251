"""Dense layers: cuBLAS on bf16 weights, the input rounding of model.md 2.4, SwiGLU.

Weights dequantise exactly to bf16 (e4m3 times a power of two), and so do inputs rounded per 32, so a bf16 product with
fp32 accumulation is the FP8 product of the reference up to the order of the sum.
"""

from __future__ import annotations

import weakref

import torch
import triton
import triton.language as tl
from torch import Tensor

from paraflash.kernels.cuda.formats import mxfp8_round_trip
from paraflash.kernels.cuda.launch import ceil_div, kernel
from paraflash.kernels.reference import hyper


@kernel
def _round_kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    x = tl.reshape(tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32), (1, BLOCK))
    x = tl.reshape(mxfp8_round_trip(x, 1, BLOCK // 32, 32), (BLOCK,))
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=mask)


def round_activation(x: Tensor) -> Tensor:
    """x [.., n] with 32 | n, contiguous -> the same shape, rounded to e4m3 per 32 channels."""
    out = torch.empty_like(x)
    _round_kernel[(ceil_div(x.numel(), 4096),)](x, out, x.numel(), BLOCK=4096, num_warps=8)
    return out


@kernel
def _round_rows_kernel(x_ptr, stride, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + c, mask=c < WIDTH, other=0.0)
    store_rounded(out_ptr + row * WIDTH + c, x, c < WIDTH, BLOCK)


def round_rows(o: Tensor) -> Tensor:
    """As `round_activation` for o [T, G, n] whose tokens may lie apart -> contiguous."""
    if o.is_contiguous():
        return round_activation(o)
    if o.stride(2) != 1 or o.stride(1) != o.shape[2]:
        return round_activation(o.contiguous())
    out = torch.empty(o.shape, dtype=o.dtype, device=o.device)
    width = o.shape[1] * o.shape[2]
    _round_rows_kernel[(o.shape[0], ceil_div(width, 2048))](o, o.stride(0), out, WIDTH=width, BLOCK=2048, num_warps=4)
    return out


class RoundedInputs:
    """Rounded copies of the last few inputs: one hidden row feeds several linears, and is rounded once.

    From the first use on, kernels that produce inputs of linears may leave the rounded copy here at once (`wanted`).
    """

    def __init__(self, keep: int = 2):
        self._keep = keep
        self._recent: list[tuple[weakref.ref[Tensor], Tensor]] = []
        self.wanted = False

    def of(self, x: Tensor) -> Tensor:
        self.wanted = True
        for source, rounded in self._recent:
            if source() is x:
                return rounded
        return self.put(x, round_activation(x.contiguous()))

    def put(self, x: Tensor, rounded: Tensor) -> Tensor:
        self._recent = [(weakref.ref(x), rounded), *self._recent[: self._keep - 1]]
        return rounded

    def room(self, x: Tensor) -> Tensor | None:
        """Where a producer of x writes its rounded copy; None if nobody wants one."""
        if not self.wanted or x.shape[-1] % 32:
            return None
        return self.put(x, torch.empty_like(x))


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 x @ weight^T. bf16 operands have exact fp32 products, so the tensor cores serve where both are bf16."""
    if x.dtype == weight.dtype == torch.bfloat16:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return hyper.linear_fp32(x, weight)


def grouped_product(o: Tensor, wo_a: Tensor) -> Tensor:
    """o [T, G, n] with wo_a [G, rank, n] -> [T, G * rank]; one batched product writes all columns in place."""
    rows, groups, rank = o.shape[0], wo_a.shape[0], wo_a.shape[1]
    out = torch.empty(rows, groups, rank, dtype=o.dtype, device=o.device)
    torch.bmm(o.transpose(0, 1), wo_a.transpose(1, 2), out=out.transpose(0, 1))
    return out.view(rows, groups * rank)


@kernel
def _swiglu_kernel(
    gate_ptr, up_ptr, out_ptr, rounded_ptr, count, limit, BLOCK: tl.constexpr, ROUND: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    g = tl.minimum(tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32), limit)
    u = tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.minimum(tl.maximum(u, -limit), limit)
    a = (g * tl.sigmoid(g) * u).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, a, mask=mask)
    if ROUND:
        store_rounded(rounded_ptr + at, a, mask, BLOCK)


@triton.jit
def store_rounded(pointers, x, mask, BLOCK: tl.constexpr):
    """Stores x [BLOCK] rounded to e4m3 per 32 channels."""
    wide = tl.reshape(mxfp8_round_trip(tl.reshape(x.to(tl.float32), (1, BLOCK)), 1, BLOCK // 32, 32), (BLOCK,))
    tl.store(pointers, wide.to(x.dtype), mask=mask)


def swiglu(gate: Tensor, up: Tensor, limit: float, inputs: RoundedInputs) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    rounded = inputs.room(out)
    count = gate.numel()
    _swiglu_kernel[(ceil_div(count, 2048),)](
        gate, up, out, out if rounded is None else rounded, count, limit,
        BLOCK=2048, ROUND=rounded is not None, num_warps=8,
    )  # fmt: skip
    return out
