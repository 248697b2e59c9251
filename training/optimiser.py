"""Muon for the matrices and Adam for everything else, as plain tensor arithmetic that a CUDA graph can capture.

The learning rate is a tensor on the device, so that a captured step follows the schedule.
"""

from __future__ import annotations

import torch
from torch import Tensor

MUON_MOMENTUM, ADAM_BETAS, ADAM_EPS, CLIP = 0.95, (0.9, 0.98), 1e-10, 1.0


def orthogonalise(g: Tensor, dtype: torch.dtype) -> Tensor:
    """Newton-Schulz iteration (quintic, five steps) on the last two dimensions; singular values end close to one."""
    x = g.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.transpose(-1, -2) if tall else x


class Optimiser:
    """`rate` scales every group's own learning rate; groups: name -> (kind, learning rate); `decay` is Muon's."""

    def __init__(
        self, parameters: dict[str, Tensor], groups: dict[str, tuple[str, float]], dtype: torch.dtype, decay: float
    ):
        self.parameters, self.groups, self.dtype, self.decay = parameters, groups, dtype, decay
        device = next(iter(parameters.values())).device
        self.rate = torch.zeros((), device=device)
        self.first = {n: torch.zeros_like(p) for n, p in parameters.items()}
        self.second = {n: torch.zeros_like(p) for n, p in parameters.items() if groups[n][0] == "adam"}
        self.steps = torch.zeros((), device=device)
        for p in parameters.values():
            p.grad = torch.zeros_like(p)

    def zero(self) -> None:
        torch._foreach_zero_([p.grad for p in self.parameters.values()])

    @torch.no_grad()
    def step(self) -> None:
        grads = [p.grad for p in self.parameters.values()]
        total = torch.stack(torch._foreach_norm(grads)).norm()
        torch._foreach_mul_(grads, (CLIP / (total + 1e-6)).clamp_max(1.0))
        self.steps += 1
        b1, b2 = ADAM_BETAS
        correct1, correct2 = 1 - b1**self.steps, 1 - b2**self.steps
        for name, p in self.parameters.items():
            kind, rate = self.groups[name]
            g, m = p.grad, self.first[name]
            if kind == "muon":
                m.lerp_(g, 1 - MUON_MOMENTUM)
                update = orthogonalise(g.lerp(m, MUON_MOMENTUM), self.dtype).float()
                update = update * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5 + self.decay * p
            else:
                v = self.second[name]
                m.lerp_(g, 1 - b1)
                v.lerp_(g.square(), 1 - b2)
                update = (m / correct1) / ((v / correct2).sqrt() + ADAM_EPS)
            p.sub_(update * (self.rate * rate))
