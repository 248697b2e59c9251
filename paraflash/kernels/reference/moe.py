"""Router and experts, as model.md 3.13 writes them."""

from __future__ import annotations

import torch
from torch import Tensor

from paraflash.kernels.interface import Expert
from paraflash.kernels.reference.hyper import linear, linear_fp32


def route(
    h: Tensor, gate: Tensor, bias: Tensor, topk: int, factor: float, renormalise: bool, temperature: float
) -> tuple[Tensor, Tensor]:
    scores = torch.nn.functional.softplus(linear_fp32(h, gate) / temperature).sqrt()
    ids = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * factor


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    g, u = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
    return (torch.nn.functional.silu(g) * u).to(gate.dtype)


def pack_experts(experts: Expert) -> Expert:
    return experts


def experts(
    h: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Expert,
    limit: float,
    round_input: bool,
    more: Tensor | None = None,
    rounded: bool = False,
) -> Tensor:
    # Pair p is choice p % topk of row p // topk. Local pairs are taken in the order of their experts.
    own = torch.arange(experts.first, experts.first + experts.w1.shape[0], device=h.device)
    expert, pair = (own[:, None] == ids.flatten()).nonzero(as_tuple=True)
    counts = torch.bincount(expert, minlength=len(own)).tolist()
    row = pair // ids.shape[1]

    def each(x: Tensor, w: Tensor, round_input: bool) -> Tensor:
        """Every expert's rows of x times its own matrix."""
        parts = zip(counts, x.split(counts), w.unbind(), strict=True)
        return torch.cat([linear(part, matrix, round_input) for count, part, matrix in parts if count])

    if not len(row):
        return torch.zeros_like(h) if more is None else more.clone()
    x = h[row]
    # The routing weight goes in before w2: equal in exact arithmetic, but not once the input is rounded.
    first = round_input and not rounded
    gate, up = each(x, experts.w1, first).float(), each(x, experts.w3, first).float()
    a = swiglu(gate, up, limit) * weights.flatten()[pair, None]
    # A place for every choice: adding to the rows directly would on a GPU sum them in any order.
    parts = torch.zeros(ids.numel(), h.shape[1], dtype=torch.float32, device=h.device)
    parts[pair] = each(a.to(h.dtype), experts.w2, round_input).float()
    out = parts.view(*ids.shape, -1).sum(1)
    return (out if more is None else out + more).to(h.dtype)
