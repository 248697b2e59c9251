"""Mixture of experts: routed experts spread over all ranks, a shared expert split over TP (model.md 3.13).

Rows of all PCP ranks meet at the experts: hidden rows and their routing are gathered over PCP without pads, every
rank adds what its experts contribute, and the sum goes back by reduce-scatter over PCP and all-reduce over TP.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paraflash.config.model import ModelConfig
from paraflash.kernels.interface import Expert, Kernels
from paraflash.model.weights import Numerics, Weights
from paraflash.parallel.exchange import RowGather, Trip, sum_over_tp
from paraflash.parallel.mesh import Mesh


class MoE:
    def __init__(
        self, model: ModelConfig, weights: Weights, kernels: Kernels, numerics: Numerics, mesh: Mesh, first_expert: int
    ):
        self.model, self.kernels, self.numerics, self.mesh = model, kernels, numerics, mesh
        self.gate, self.bias = weights["gate"], weights["gate.bias"]
        e = weights.under("experts")
        own = Expert(e.take("w1"), e.take("w2"), e.take("w3"), first_expert, model.num_experts)
        self.experts = kernels.pack_experts(own)
        shared = weights.under("shared_experts")
        self.w1, self.w2, self.w3 = shared["w1"], shared["w2"], shared["w3"]

    def route(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [T, k] and weights."""
        m = self.model
        return self.kernels.route(
            h, self.gate, self.bias, m.experts_per_token, m.routed_scaling_factor, m.norm_topk_prob, m.gate_temp
        )

    def start(self, h: Tensor, rows: RowGather) -> tuple[Callable[[], Tensor], Tensor, Tensor]:
        """h [T, D] -> what gives the output [T, D]; and, for probes, the local rows' expert ids and weights.

        The exchange runs beside products that need nothing of it: the gather beside the shared expert's gate and up,
        the scatter beside whatever the caller does before it asks for the output and then the shared expert's down.
        """
        k, m, rounded, alone = self.kernels, self.model, self.numerics.round_inputs, rows.group.size == 1
        # Of few rows every rank routes all; many are sent routed, and as the linears take them.
        routed_here = not alone and rows.large(h)
        parts = [k.rounded(h) if rounded else h, *self.route(h)] if routed_here else [h]
        trip = Trip(rows, parts)
        gate, up = k.linear(h, self.w1, rounded), k.linear(h, self.w3, rounded)

        def shared() -> Tensor:
            return k.linear(k.swiglu(gate, up, m.swiglu_limit), self.w2, rounded)

        everyone, *routing = trip.out.wait()
        ids, weights = routing or self.route(everyone)
        more = shared() if alone else None  # then nothing is between the experts and the shared one's share
        shares = k.experts(everyone, ids, weights, self.experts, m.swiglu_limit, rounded, more, rounded and routed_here)
        back = trip.back_start(shares)

        def finish() -> Tensor:
            own = [] if alone else [shared()]
            return sum_over_tp(self.mesh.tp, k.total([*back.wait(), *own]), rows, "experts")

        return finish, rows.own(ids), rows.own(weights)
