"""Attention of one layer, in two halves: `write` stores what the step's rows leave for other rows, `read` attends.

The halves are one call apart in an ordinary layer. In the last KV owner under bounded replay all rows write and only
the trailing ones read (model.md 5.2). Shapes: h [T, D] -> keys (opaque) -> [T, D], summed over TP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paraflash.cache.pool import RecordPool
from paraflash.cache.store import KVCache
from paraflash.config.model import LayerSpec, ModelConfig
from paraflash.kernels.interface import Kernels
from paraflash.model.batch import LocalBatch, Windows, rope_of
from paraflash.model.compressor import Compressor
from paraflash.model.indexer import Indexer, Selection
from paraflash.model.weights import Numerics, Weights
from paraflash.parallel.exchange import Outbox, sum_over_tp
from paraflash.parallel.mesh import Mesh, Started, done


class Attention:
    def __init__(
        self, model: ModelConfig, layer: LayerSpec, weights: Weights, kernels: Kernels, numerics: Numerics, mesh: Mesh
    ):
        self.model, self.layer, self.kernels, self.numerics, self.mesh = model, layer, kernels, numerics, mesh
        self.wq_a, self.q_norm, self.wq_b = weights["wq_a"], weights["q_norm"], weights["wq_b"]
        self.wkv, self.kv_norm = weights["wkv"], weights["kv_norm"]
        self.wo_a, self.wo_b, self.sink = weights["wo_a"], weights["wo_b"], weights["attn_sink"]
        self.heads = model.num_heads // mesh.tp.size
        self.groups = model.o_groups // mesh.tp.size
        self.compressor = Compressor(model, layer, weights, kernels, numerics) if layer.owns_kv else None
        self.indexer = Indexer(model, layer, weights.under("indexer"), kernels, numerics) if layer.owns_index else None

    def write(
        self, h: Tensor, batch: LocalBatch, windows: Windows, cache: KVCache
    ) -> tuple[Started[Any], Tensor | None]:
        """Window keys for the layer's queries, to be waited for, and, of a KV owner, the local latents (for probes)."""
        k, m = self.kernels, self.model
        kv = k.linear(h, self.wkv, self.numerics.round_inputs)
        rotary = rope_of(batch, self.layer.ratio)
        rows = k.window_rows(kv, self.kv_norm, m.rms_eps, rotary, cache.format.window, self.numerics.trained_rounding)
        keys = exchange_window(k, rows, windows, cache.rings[self.layer.index], batch.outbox)
        if self.compressor is None:
            return keys, None
        return keys, self.compressor.write(h, batch.entries[self.layer.ratio], cache, batch.outbox)

    def read(
        self, h: Tensor, keys: Started[Any], batch: LocalBatch, windows: Windows, cache: KVCache, chosen: Selection
    ) -> Tensor:
        """Attention output [T, D] of the batch's rows. Window rows are on their way while queries are made."""
        k, m, layer, rounded = self.kernels, self.model, self.layer, self.numerics.round_inputs
        rotary = rope_of(batch, layer.ratio)
        qr = k.rms_norm(k.linear(h, self.wq_a, rounded), self.q_norm, m.rms_eps)
        if self.indexer:
            assert layer.kv_owner is not None
            self.indexer.select(h, qr, rotary, batch.index_rows[layer.ratio], cache.index_keys[layer.kv_owner], chosen)
        q = k.rope(k.linear(qr, self.wq_b, rounded).unflatten(1, (self.heads, m.head_dim)), rotary)
        pool = cache.latents[layer.kv_owner] if layer.kv_owner is not None else None
        slots = chosen.slots if layer.ratio else None
        o = k.attend(q, keys.wait(), windows.index, pool, slots, self.sink, m.head_dim**-0.5)
        o = k.rope(o, rotary, inverse=True).unflatten(1, (self.groups, -1)).flatten(2)
        z = k.grouped_output(o, self.wo_a.view(self.groups, m.o_lora_rank, -1), rounded)
        return sum_over_tp(self.mesh.tp, k.linear(z, self.wo_b, rounded), batch.all_rows, "attention")


def exchange_window(
    k: Kernels, rows: Tensor, windows: Windows, ring: RecordPool, outbox: Outbox | None
) -> Started[Any]:
    """Keys of the step: earlier rows from the ring, local rows, rows of other ranks; then the ring moves on.

    With an outbox the keys hold no rows of other ranks, and the ring moves on when the step's rows are delivered.
    """

    def move_on(step_rows: Tensor) -> None:
        ring.write(windows.tail_slots, step_rows[windows.tail_rows])

    def arrived(halo: Tensor) -> Any:
        step_rows = torch.cat([rows, halo]) if len(halo) else rows
        keys = k.window_keys(ring, windows.prior_slots, step_rows)
        move_on(step_rows)
        return keys

    if outbox is not None:
        outbox.post(windows.gather, rows[windows.send_rows], lambda halo: move_on(torch.cat([rows, halo])))
        return done(k.window_keys(ring, windows.prior_slots, rows))
    if windows.gather.group.size == 1:
        return done(arrived(rows[:0]))
    return windows.gather.gather_start(rows[windows.send_rows]).then(arrived)
