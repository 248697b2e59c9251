"""The compressor of a KV owner: normed hidden rows become compressed KV and index keys in the pools of all ranks.

h [T, D] -> latents [G, d] of the entries that close on this rank -> records, gathered over PCP as the bytes that are
stored and written at the same slots everywhere (model.md 3.7, 3.8).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paraflash.cache.store import KVCache
from paraflash.config.model import LayerSpec, ModelConfig
from paraflash.kernels.interface import Kernels
from paraflash.model.batch import Entries, Pairs
from paraflash.model.weights import Numerics, Weights
from paraflash.parallel.exchange import Outbox


class Compressor:
    def __init__(self, model: ModelConfig, layer: LayerSpec, weights: Weights, kernels: Kernels, numerics: Numerics):
        self.layer, self.eps, self.kernels, self.numerics = layer, model.rms_eps, kernels, numerics
        own, index = weights.under("compressor"), weights.under("indexer")
        self.wkv, self.norm = own["wkv"], own["norm"]
        self.wk, self.k_norm = index["wk"], index["k_norm"]
        self.wgate = own["wgate"] if layer.ratio == 2 else None

    def write(self, h: Tensor, entries: Entries, cache: KVCache, outbox: Outbox | None) -> Tensor:
        """Stores this step's entries of layer `self.layer`; returns the local latents before rope [G, d].

        With an outbox those of other ranks, which no local row may choose, are stored when they are delivered.
        """
        k, eps, trained = self.kernels, self.eps, self.numerics.trained_rounding
        if entries.pairs is None:
            pooled = k.linear(h[entries.rows], self.wkv)
        else:
            rows = torch.cat([k.linear_fp32(h, self.wkv), k.linear_fp32(h, self.wgate)], 1)
            pooled = self._pool(rows, entries.pairs, cache.open_rows[self.layer.index], outbox)
        # The pooled value stays fp32 into its norm (of the two published choices the finer one).
        latent = k.rms_norm(pooled, self.norm, eps).to(h.dtype)
        main = k.latent_rows(latent, entries.rotary, cache.format.latent, trained)
        index = k.index_rows(latent, self.wk, self.k_norm, eps, entries.rotary, cache.format.index, trained)

        def store(slots: Tensor, records: Sequence[Tensor]) -> None:
            cache.latents[self.layer.index].write(slots, records[0])
            cache.index_keys[self.layer.index].write(slots, records[1])

        if outbox is not None:
            store(entries.own_slots, (main, index))
            both, widths = torch.cat([main, index], 1), [main.shape[1], index.shape[1]]
            outbox.post(entries.gather, both, lambda rows: store(entries.slots, rows.split(widths, 1)))
        else:
            store(entries.slots, entries.gather.gather_packed(main, index))
        return latent

    def _pool(self, rows: Tensor, pairs: Pairs, open_rows: Tensor, outbox: Outbox | None) -> Tensor:
        """rows [T, 2d] = [kv | score]. Reads of open rows come before they are replaced."""
        sent = rows[:0]  # with an outbox both rows of a pair are local or open
        if outbox is None and pairs.gather.group.size > 1:
            sent = pairs.gather.gather(rows[pairs.send_rows])
        linked = torch.cat([open_rows[pairs.open_slots], rows, sent])

        def keep(step_rows: Tensor) -> None:
            open_rows[pairs.keep_slots] = step_rows[pairs.keep_rows]

        if outbox is not None:
            outbox.post(pairs.gather, rows[pairs.send_rows], lambda sent: keep(torch.cat([rows, sent])))
        else:
            keep(linked[len(pairs.open_slots) :])
        return self.kernels.pool_pairs(linked[pairs.first], linked[pairs.second])
