"""Collapse and expand of the four residual streams (model.md 3.1) as one kernel a direction on a GPU.

S [N, K, D], pre and post [N, K], comb [N, K, K], y [N, D], all fp32. A program handles one token; on a CPU the same
functions are einsums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU training needs none
    triton = None


if triton is not None:

    @triton.jit
    def _collapse(s_ptr, pre_ptr, out_ptr, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
        n = tl.program_id(0).to(tl.int64)
        d = tl.arange(0, BLOCK)
        inside = d < D
        total = tl.zeros((BLOCK,), tl.float32)
        for k in tl.static_range(K):
            total += tl.load(pre_ptr + n * K + k) * tl.load(s_ptr + (n * K + k) * D + d, mask=inside, other=0.0)
        tl.store(out_ptr + n * D + d, total, mask=inside)

    @triton.jit
    def _collapse_backward(
        s_ptr, pre_ptr, g_ptr, ds_ptr, dpre_ptr, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
    ):
        n = tl.program_id(0).to(tl.int64)
        d = tl.arange(0, BLOCK)
        inside = d < D
        g = tl.load(g_ptr + n * D + d, mask=inside, other=0.0)
        for k in tl.static_range(K):
            s = tl.load(s_ptr + (n * K + k) * D + d, mask=inside, other=0.0)
            tl.store(dpre_ptr + n * K + k, tl.sum(g * s, 0))
            tl.store(ds_ptr + (n * K + k) * D + d, tl.load(pre_ptr + n * K + k) * g, mask=inside)

    @triton.jit
    def _expand(s_ptr, y_ptr, post_ptr, comb_ptr, out_ptr, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
        n = tl.program_id(0).to(tl.int64)
        d = tl.arange(0, BLOCK)
        inside = d < D
        y = tl.load(y_ptr + n * D + d, mask=inside, other=0.0)
        for k in tl.static_range(K):
            total = tl.load(post_ptr + n * K + k) * y
            for j in tl.static_range(K):
                s = tl.load(s_ptr + (n * K + j) * D + d, mask=inside, other=0.0)
                total += tl.load(comb_ptr + (n * K + j) * K + k) * s
            tl.store(out_ptr + (n * K + k) * D + d, total, mask=inside)

    @triton.jit
    def _expand_backward(
        s_ptr, y_ptr, post_ptr, comb_ptr, g_ptr, ds_ptr, dy_ptr, dpost_ptr, dcomb_ptr,
        D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        n = tl.program_id(0).to(tl.int64)
        d = tl.arange(0, BLOCK)
        inside = d < D
        y = tl.load(y_ptr + n * D + d, mask=inside, other=0.0)
        dy = tl.zeros((BLOCK,), tl.float32)
        for k in tl.static_range(K):
            g = tl.load(g_ptr + (n * K + k) * D + d, mask=inside, other=0.0)
            tl.store(dpost_ptr + n * K + k, tl.sum(g * y, 0))
            dy += tl.load(post_ptr + n * K + k) * g
        tl.store(dy_ptr + n * D + d, dy, mask=inside)
        for j in tl.static_range(K):
            s = tl.load(s_ptr + (n * K + j) * D + d, mask=inside, other=0.0)
            ds = tl.zeros((BLOCK,), tl.float32)
            for k in tl.static_range(K):
                g = tl.load(g_ptr + (n * K + k) * D + d, mask=inside, other=0.0)
                tl.store(dcomb_ptr + (n * K + j) * K + k, tl.sum(s * g, 0))
                ds += tl.load(comb_ptr + (n * K + j) * K + k) * g
            tl.store(ds_ptr + (n * K + j) * D + d, ds, mask=inside)


def _sizes(s: Tensor) -> dict[str, int]:
    k, d = s.shape[-2:]
    return {"D": d, "K": k, "BLOCK": triton.next_power_of_2(d), "num_warps": 2}


class _Collapse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, s: Tensor, pre: Tensor) -> Tensor:
        s, pre = s.contiguous(), pre.contiguous()
        out = s.new_empty(*s.shape[:-2], s.shape[-1])
        _collapse[(pre.numel() // pre.shape[-1],)](s, pre, out, **_sizes(s))
        ctx.save_for_backward(s, pre)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        s, pre = ctx.saved_tensors
        ds, dpre = torch.empty_like(s), torch.empty_like(pre)
        _collapse_backward[(pre.numel() // pre.shape[-1],)](s, pre, g.contiguous(), ds, dpre, **_sizes(s))
        return ds, dpre


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, s: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        y, s, post, comb = y.contiguous(), s.contiguous(), post.contiguous(), comb.contiguous()
        out = torch.empty_like(s)
        _expand[(post.numel() // post.shape[-1],)](s, y, post, comb, out, **_sizes(s))
        ctx.save_for_backward(y, s, post, comb)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y, s, post, comb = ctx.saved_tensors
        ds, dy, dpost, dcomb = (torch.empty_like(t) for t in (s, y, post, comb))
        grid = (post.numel() // post.shape[-1],)
        _expand_backward[grid](s, y, post, comb, g.contiguous(), ds, dy, dpost, dcomb, **_sizes(s))
        return dy, ds, dpost, dcomb


def collapse(s: Tensor, pre: Tensor) -> Tensor:
    """[.., K, D], [.., K] -> [.., D]: the streams weighted by pre."""
    if s.is_cuda:
        return _Collapse.apply(s, pre)
    return (pre[..., None, :] @ s).squeeze(-2)


def expand(y: Tensor, s: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Writes y into every stream by post and mixes the streams by comb (summed over its first index)."""
    if s.is_cuda:
        return _Expand.apply(y, s, post, comb)
    return post[..., None] * y[..., None, :] + comb.transpose(-1, -2) @ s
