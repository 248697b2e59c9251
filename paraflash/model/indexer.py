"""The indexer: which compressed entries a row attends to, chosen by a small scoring head (model.md 3.9).

The choice of an index layer is used by the layers after it until the next one; the candidate source also leaves a
per-row set of entry blocks inside which later index layers choose. Both live for one step only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paraflash.cache.pool import RecordPool
from paraflash.config.model import LayerSpec, ModelConfig
from paraflash.kernels.interface import IndexRows, Kernels, Rotary
from paraflash.model.weights import Numerics, Weights


@dataclass
class Selection:
    """State shared between layers of one step: entries and pool slots [T, topk] (-1: none), candidate blocks."""

    entries: Tensor | None = None
    slots: Tensor | None = None
    candidates: Any = None


class Indexer:
    def __init__(self, model: ModelConfig, layer: LayerSpec, weights: Weights, kernels: Kernels, numerics: Numerics):
        self.model, self.layer, self.kernels, self.numerics = model, layer, kernels, numerics
        self.wq_b, self.weights_proj = weights["wq_b"], weights["weights_proj"]
        self.scale = model.index_head_dim**-0.5 * model.index_heads**-0.5

    def select(
        self, h: Tensor, qr: Tensor, rotary: Rotary, rows: IndexRows, pool: RecordPool, chosen: Selection
    ) -> None:
        """Replaces the step's selection by this layer's choice; h [T, D], qr [T, q_lora]."""
        m, k = self.model, self.kernels
        q = k.linear(qr, self.wq_b, self.numerics.round_inputs).unflatten(1, (m.index_heads, m.index_head_dim))
        q = k.index_queries(q, rotary, self.numerics.trained_rounding)
        publishes = self.layer.publishes_candidates
        chosen.entries, published = k.select_entries(
            q,
            k.linear_fp32(h, self.weights_proj),
            pool,
            rows,
            m.index_topk,
            self.scale,
            candidates=chosen.candidates if self.layer.applies_candidates else None,
            publish=(m.candidate_topk_blocks, m.candidate_block_size) if publishes else None,
        )
        if publishes:
            chosen.candidates = published
        chosen.slots = slots_of(chosen.entries, rows)


def slots_of(entries: Tensor, rows: IndexRows) -> Tensor:
    """Pool slots [T, k] of entries [T, k]; -1 stays -1."""
    block = rows.block_tables[rows.row_request[:, None], (entries // rows.entries).clamp_min(0)]
    return torch.where(entries < 0, -1, block * rows.entries + entries % rows.entries)
