"""Sinkhorn normalisation of the hyper-connections' comb matrices, with a cheap backward.

Forward is exactly model.md 3.2 (softmax over rows, one column step, then row and column steps). Backward does not
unroll the steps: the result is diag(r) exp(x) diag(c) with row and column sums of one, so its gradient is
P * (G - u - v), where u and v solve u + P v = rowsum(P*G), P^T u + v = colsum(P*G). On a GPU each direction is one
kernel.
x, C: [N, K, K].
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


def forward_reference(x: Tensor, iterations: int, eps: float) -> Tensor:
    c = x.softmax(-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def backward_reference(c: Tensor, grad: Tensor, iterations: int) -> Tensor:
    weighted = c * grad
    rows, cols = weighted.sum(-1, keepdim=True), weighted.sum(-2, keepdim=True)
    v = torch.zeros_like(cols)
    u = rows
    for _ in range(iterations):
        u = rows - (c * v).sum(-1, keepdim=True)
        v = cols - (c * u).sum(-2, keepdim=True)
    return weighted - c * (u + v)


if triton is not None:

    @triton.jit
    def _forward_kernel(x_ptr, out_ptr, count, iterations, eps, K: tl.constexpr, BLOCK: tl.constexpr):
        n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        j, k = tl.arange(0, K), tl.arange(0, K)
        at = n[:, None, None] * (K * K) + j[None, :, None] * K + k[None, None, :]
        inside = at < count * K * K
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
        e = tl.exp(x - tl.max(x, axis=2)[:, :, None])
        c = e / tl.sum(e, axis=2)[:, :, None] + eps
        c = c / (tl.sum(c, axis=1)[:, None, :] + eps)
        for _ in range(iterations - 1):
            c = c / (tl.sum(c, axis=2)[:, :, None] + eps)
            c = c / (tl.sum(c, axis=1)[:, None, :] + eps)
        tl.store(out_ptr + at, c, mask=inside)

    @triton.jit
    def _backward_kernel(c_ptr, g_ptr, out_ptr, count, iterations, K: tl.constexpr, BLOCK: tl.constexpr):
        n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        j, k = tl.arange(0, K), tl.arange(0, K)
        at = n[:, None, None] * (K * K) + j[None, :, None] * K + k[None, None, :]
        inside = at < count * K * K
        c = tl.load(c_ptr + at, mask=inside, other=0.0)
        weighted = c * tl.load(g_ptr + at, mask=inside, other=0.0)
        rows, cols = tl.sum(weighted, axis=2), tl.sum(weighted, axis=1)
        u, v = rows, tl.zeros_like(cols)
        for _ in range(iterations):
            u = rows - tl.sum(c * v[:, None, :], axis=2)
            v = cols - tl.sum(c * u[:, :, None], axis=1)
        tl.store(out_ptr + at, weighted - c * (u[:, :, None] + v[:, None, :]), mask=inside)


_BLOCK = 64


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, iterations: int, eps: float) -> Tensor:
        if x.is_cuda:
            x = x.contiguous()
            out = torch.empty_like(x)
            grid = (triton.cdiv(x.shape[0], _BLOCK),)
            _forward_kernel[grid](x, out, x.shape[0], iterations, eps, K=x.shape[-1], BLOCK=_BLOCK)
        else:
            out = forward_reference(x, iterations, eps)
        ctx.save_for_backward(out)
        ctx.iterations = iterations
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (c,) = ctx.saved_tensors
        if not c.is_cuda:
            return backward_reference(c, grad, ctx.iterations), None, None
        grad, out = grad.contiguous(), torch.empty_like(c)
        grid = (triton.cdiv(c.shape[0], _BLOCK),)
        _backward_kernel[grid](c, grad, out, c.shape[0], ctx.iterations, K=c.shape[-1], BLOCK=_BLOCK)
        return out, None, None


def sinkhorn(x: Tensor, iterations: int, eps: float) -> Tensor:
    """[N, K, K] fp32 logits -> doubly stochastic [N, K, K]."""
    return _Sinkhorn.apply(x, iterations, eps)
