"""Router and experts, as model.md 3.13 writes them."""

from __future__ import annotations

import torch
from torch import Tensor

from paraflash.formats import round_activation
from paraflash.kernels.interface import Expert
from paraflash.kernels.reference.hyper import linear_fp32


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


def experts(h: Tensor, ids: Tensor, weights: Tensor, experts: Expert, limit: float, round_input: bool) -> Tensor:
    out = torch.zeros(h.shape, dtype=torch.float32, device=h.device)
    # Pair p is choice p % topk of row p // topk. Expert e gets its pairs at [e, 0], [e, 1], .. of one batch.
    own = torch.arange(experts.first, experts.first + experts.w1.shape[0], device=h.device)
    chosen = ids.flatten()[:, None] == own
    pair, expert = chosen.nonzero(as_tuple=True)
    if not len(pair):
        return out
    place = chosen.cumsum(0)[pair, expert] - 1
    row = pair // ids.shape[1]

    def batch(rows: Tensor) -> Tensor:
        spread = rows.new_zeros(len(own), int(place.max()) + 1, rows.shape[1])
        spread[expert, place] = round_activation(rows) if round_input else rows
        return spread

    x = batch(h[row])
    gate, up = (x @ experts.w1.mT)[expert, place], (x @ experts.w3.mT)[expert, place]
    # The routing weight goes in before w2: equal in exact arithmetic, but not once the input is rounded.
    a = swiglu(gate.float(), up.float(), limit) * weights.flatten()[pair, None]
    y = (batch(a.to(h.dtype)) @ experts.w2.mT)[expert, place]
    return out.index_add_(0, row, y.float())
