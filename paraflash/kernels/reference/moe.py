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


def experts(h: Tensor, ids: Tensor, weights: Tensor, experts: Expert, limit: float, round_input: bool) -> Tensor:
    out = torch.zeros(h.shape, dtype=torch.float32, device=h.device)
    for local in range(experts.w1.shape[0]):
        row, choice = (ids == experts.first + local).nonzero(as_tuple=True)
        if len(row):
            x = h[row]
            gate, up = linear(x, experts.w1[local], round_input), linear(x, experts.w3[local], round_input)
            # The routing weight goes in before w2: equal in exact arithmetic, but not once the input is rounded.
            a = (swiglu(gate.float(), up.float(), limit) * weights[row, choice, None]).to(h.dtype)
            out.index_add_(0, row, linear(a, experts.w2[local], round_input).float())
    return out
