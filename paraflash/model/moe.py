"""Mixture of experts: routed experts spread over all ranks, a shared expert split over TP (model.md 3.13).

Rows of all PCP ranks meet at the experts: hidden rows and their routing are gathered over PCP without pads, every
rank adds what its experts contribute, and the sum goes back by reduce-scatter over PCP and all-reduce over TP.
"""

from __future__ import annotations

from torch import Tensor

from paraflash.config.model import ModelConfig
from paraflash.kernels.interface import Expert, Kernels
from paraflash.model.weights import Numerics, Weights
from paraflash.parallel.exchange import RowGather, sum_over_tp
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

    def __call__(self, h: Tensor, rows: RowGather) -> tuple[Tensor, Tensor, Tensor]:
        """h [T, D] -> output [T, D] and, for probes, the local rows' expert ids and weights."""
        k, m, rounded = self.kernels, self.model, self.numerics.round_inputs
        ids, weights = k.route(
            h, self.gate, self.bias, m.experts_per_token, m.routed_scaling_factor, m.norm_topk_prob, m.gate_temp
        )
        a = k.swiglu(k.linear(h, self.w1, rounded), k.linear(h, self.w3, rounded), m.swiglu_limit)
        shared = k.linear(a, self.w2, rounded)
        everyone, all_ids, all_weights = rows.gather_packed(h, ids, weights)
        alone = rows.group.size == 1  # then nothing is between the experts and the shared one's share
        more = shared if alone else None
        routed = k.experts(everyone, all_ids, all_weights, self.experts, m.swiglu_limit, rounded, more)
        out = routed if alone else rows.reduce_scatter(routed) + shared
        return sum_over_tp(self.mesh.tp, out, rows, "experts"), ids, weights
