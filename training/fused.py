"""Fused GPU kernels of the trainer, one a direction: attention softmax, rotary turn, index scores and the gated unit.

Each has a plain twin in model.py that the CPU uses; on a GPU these save most of a step's memory traffic. Rows are
(token, head) in row-major order; a program handles one row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def _block(n: int) -> dict[str, int]:
    width = max(16, triton.next_power_of_2(n))
    return {"BLOCK": width, "num_warps": 1 if width <= 256 else 4 if width <= 2048 else 8}


@triton.jit
def _softmax(
    near_ptr, far_ptr, allow_ptr, sink_ptr, pn_ptr, pf_ptr, ps_ptr, pm_ptr,
    T, n, allow_stride, W: tl.constexpr, H: tl.constexpr, FAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = row % H
    t = (row // H) % T
    b = row // H // T
    i = t % W
    j = tl.arange(0, 2 * W) - W
    open_near = (j <= i) & (j > i - W) & ((j >= 0) | (t >= W))
    near = tl.load(near_ptr + row * 2 * W + tl.arange(0, 2 * W)).to(tl.float32)
    near = tl.where(open_near, near, float("-inf"))
    sink = tl.load(sink_ptr + h)
    top = tl.maximum(tl.max(near, 0), sink)
    if FAR:
        k = tl.arange(0, BLOCK)
        allowed = tl.load(allow_ptr + b * allow_stride + t * n + k, mask=k < n, other=0) != 0
        far = tl.load(far_ptr + row * n + k, mask=k < n, other=0.0).to(tl.float32)
        far = tl.where(allowed, far, float("-inf"))
        top = tl.maximum(top, tl.max(far, 0))
        pf = tl.exp(far - top)
        far_sum = tl.sum(pf, 0)
    pn = tl.exp(near - top)
    ps = tl.exp(sink - top)
    total = tl.sum(pn, 0) + ps
    if FAR:
        total += far_sum
        tl.store(pf_ptr + row * n + k, (pf / total).to(pf_ptr.dtype.element_ty), mask=k < n)
        tl.store(pm_ptr + row, far_sum / total)
    tl.store(pn_ptr + row * 2 * W + tl.arange(0, 2 * W), (pn / total).to(pn_ptr.dtype.element_ty))
    tl.store(ps_ptr + row, ps / total)


@triton.jit
def _softmax_backward(
    pn_ptr, pf_ptr, ps_ptr, gn_ptr, gf_ptr, gm_ptr, dn_ptr, df_ptr, ds_ptr,
    n, W: tl.constexpr, FAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    j = row * 2 * W + tl.arange(0, 2 * W)
    pn = tl.load(pn_ptr + j).to(tl.float32)
    gn = tl.load(gn_ptr + j).to(tl.float32)
    dot = tl.sum(pn * gn, 0)
    if FAR:
        k = tl.arange(0, BLOCK)
        pf = tl.load(pf_ptr + row * n + k, mask=k < n, other=0.0).to(tl.float32)
        gf = tl.load(gf_ptr + row * n + k, mask=k < n, other=0.0).to(tl.float32) + tl.load(gm_ptr + row)
        dot += tl.sum(pf * gf, 0)
        tl.store(df_ptr + row * n + k, (pf * (gf - dot)).to(df_ptr.dtype.element_ty), mask=k < n)
    tl.store(dn_ptr + j, (pn * (gn - dot)).to(dn_ptr.dtype.element_ty))
    tl.store(ds_ptr + row, -tl.load(ps_ptr + row) * dot)


class Softmax(torch.autograd.Function):
    """near [B, T, H, 2W] and far [B, T, H, n] logits, allowed [B|1, T, n], sink [H] -> near and far probabilities and
    the far mass of every row [B, T, H] in fp32. T must be a multiple of the window W."""

    @staticmethod
    def forward(ctx: Any, near: Tensor, far: Tensor | None, allowed: Tensor | None, sink: Tensor) -> tuple:
        b, t, heads, width = near.shape
        rows, n = b * t * heads, far.shape[-1] if far is not None else 0
        near = near.contiguous()
        pn, ps = torch.empty_like(near), torch.empty(rows, device=near.device)
        pf = torch.empty_like(far, memory_format=torch.contiguous_format) if far is not None else near.new_empty(0)
        mass = torch.empty(b, t, heads, device=near.device)
        if far is not None:
            far, allowed = far.contiguous(), allowed.contiguous().view(torch.uint8)
            stride = t * n if allowed.shape[0] > 1 else 0
        else:
            far = allowed = near
            stride = 0
        _softmax[(rows,)](
            near, far, allowed, sink, pn, pf, ps, mass, t, n, stride,
            W=width // 2, H=heads, FAR=n > 0, **_block(max(n, width)),
        )  # fmt: skip
        ctx.save_for_backward(pn, pf, ps)
        ctx.shape, ctx.n = near.shape, n
        return pn, pf, mass

    @staticmethod
    def backward(ctx: Any, gn: Tensor, gf: Tensor, gm: Tensor) -> tuple:
        pn, pf, ps = ctx.saved_tensors
        b, t, heads, width = ctx.shape
        dn, df, ds = torch.empty_like(pn), torch.empty_like(pf), torch.empty_like(ps)
        _softmax_backward[(len(ps),)](
            pn, pf, ps, gn.contiguous(), gf.contiguous(), gm.contiguous(), dn, df, ds, ctx.n,
            W=width // 2, FAR=ctx.n > 0, **_block(max(ctx.n, width)),
        )  # fmt: skip
        return dn, df if ctx.n else None, None, ds.view(b * t, heads).sum(0)


@triton.jit
def _turn(x_ptr, out_ptr, cos_ptr, sin_ptr, T, sign, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    t = (row // H) % T
    d = tl.arange(0, D)
    x = tl.load(x_ptr + row * D + d).to(tl.float32)
    partner = tl.load(x_ptr + row * D + (d ^ 1)).to(tl.float32)
    at = t * (R // 2) + (d - (D - R)) // 2
    turned = d >= D - R
    c = tl.load(cos_ptr + at, mask=turned, other=1.0)
    s = tl.load(sin_ptr + at, mask=turned, other=0.0) * sign
    out = x * c + partner * tl.where(d % 2 == 0, -s, s)
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty))


class Turn(torch.autograd.Function):
    """Interleaved RoPE on the last channels of x [B, T, .., D], D a power of two; cos and sin [T, rope/2]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.sign = sign
        return Turn._apply(x, cos, sin, sign)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        return Turn._apply(g, *ctx.saved_tensors, -ctx.sign), None, None, None

    @staticmethod
    def _apply(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
        x = x.contiguous()
        out, dim, t = torch.empty_like(x), x.shape[-1], x.shape[1]
        heads = x[0, 0].numel() // dim
        _turn[(x.numel() // dim,)](x, out, cos, sin, t, sign, H=heads, D=dim, R=2 * cos.shape[-1], num_warps=1)
        return out


@triton.jit
def _scores(dots_ptr, w_ptr, out_ptr, T, n, ratio, H: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for h in tl.static_range(H):
        dot = tl.load(dots_ptr + (row * H + h) * n + k, mask=k < n, other=0.0)
        total += tl.maximum(dot, 0.0) * tl.load(w_ptr + row * H + h)
    visible = k < (row % T + 1) // ratio
    tl.store(out_ptr + row * n + k, tl.where(visible, total, float("-inf")), mask=k < n)


@triton.jit
def _scores_backward(dots_ptr, w_ptr, g_ptr, dd_ptr, dw_ptr, T, n, ratio, H: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    g = tl.load(g_ptr + row * n + k, mask=k < n, other=0.0)
    g = tl.where(k < (row % T + 1) // ratio, g, 0.0)
    for h in tl.static_range(H):
        dot = tl.load(dots_ptr + (row * H + h) * n + k, mask=k < n, other=0.0)
        tl.store(dw_ptr + row * H + h, tl.sum(g * tl.maximum(dot, 0.0), 0))
        dd = tl.where(dot > 0, g * tl.load(w_ptr + row * H + h), 0.0)
        tl.store(dd_ptr + (row * H + h) * n + k, dd, mask=k < n)


class Scores(torch.autograd.Function):
    """dots fp32 [B, T * H, n], weight fp32 [B, T, H] -> index scores [B, T, n], -inf where an entry is not visible."""

    @staticmethod
    def forward(ctx: Any, dots: Tensor, weight: Tensor, ratio: int) -> Tensor:
        b, t, heads = weight.shape
        dots, weight, n = dots.contiguous(), weight.contiguous(), dots.shape[-1]
        out = torch.empty(b, t, n, device=dots.device)
        _scores[(b * t,)](dots, weight, out, t, n, ratio, H=heads, **_block(n))
        ctx.save_for_backward(dots, weight)
        ctx.ratio = ratio
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        dots, weight = ctx.saved_tensors
        b, t, heads = weight.shape
        dd, dw, n = torch.empty_like(dots), torch.empty_like(weight), dots.shape[-1]
        _scores_backward[(b * t,)](dots, weight, g.contiguous(), dd, dw, t, n, ctx.ratio, H=heads, **_block(n))
        return dd, dw, None


@triton.jit
def _gated(g_ptr, u_ptr, w_ptr, out_ptr, limit, I: tl.constexpr):  # noqa: E741
    row = tl.program_id(0).to(tl.int64)
    i = row * I + tl.arange(0, I)
    g = tl.minimum(tl.load(g_ptr + i).to(tl.float32), limit)
    u = tl.minimum(tl.maximum(tl.load(u_ptr + i).to(tl.float32), -limit), limit)
    out = g / (1 + tl.exp(-g)) * u * tl.load(w_ptr + row)
    tl.store(out_ptr + i, out.to(out_ptr.dtype.element_ty))


@triton.jit
def _gated_backward(g_ptr, u_ptr, w_ptr, d_ptr, dg_ptr, du_ptr, dw_ptr, limit, I: tl.constexpr):  # noqa: E741
    row = tl.program_id(0).to(tl.int64)
    i = row * I + tl.arange(0, I)
    raw_g, raw_u = tl.load(g_ptr + i).to(tl.float32), tl.load(u_ptr + i).to(tl.float32)
    g = tl.minimum(raw_g, limit)
    u = tl.minimum(tl.maximum(raw_u, -limit), limit)
    d, w = tl.load(d_ptr + i).to(tl.float32), tl.load(w_ptr + row)
    s = 1 / (1 + tl.exp(-g))
    tl.store(dw_ptr + row, tl.sum(d * g * s * u, 0))
    dg = tl.where(raw_g <= limit, d * w * u * (s + g * s * (1 - s)), 0.0)
    du = tl.where((raw_u <= limit) & (raw_u >= -limit), d * w * g * s, 0.0)
    tl.store(dg_ptr + i, dg.to(dg_ptr.dtype.element_ty))
    tl.store(du_ptr + i, du.to(du_ptr.dtype.element_ty))


class Gated(torch.autograd.Function):
    """silu(min(g, limit)) * clamp(u, -limit, limit) * weight: g, u [.., E, I] (a power of two), weight fp32 [.., E]."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, u: Tensor, weight: Tensor, limit: float) -> Tensor:
        g, u, weight = g.contiguous(), u.contiguous(), weight.contiguous()
        out = torch.empty_like(g)
        _gated[(weight.numel(),)](g, u, weight, out, limit, I=g.shape[-1], num_warps=1)
        ctx.save_for_backward(g, u, weight)
        ctx.limit = limit
        return out

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        g, u, weight = ctx.saved_tensors
        dg, du, dw = torch.empty_like(g), torch.empty_like(u), torch.empty_like(weight)
        grid = (weight.numel(),)
        _gated_backward[grid](g, u, weight, d.contiguous(), dg, du, dw, ctx.limit, I=g.shape[-1], num_warps=1)
        return dg, du, dw, None
