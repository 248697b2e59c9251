"""The compressor of a KV owner: normed hidden rows become compressed KV and index keys in the pools of all ranks.

h [T, D] -> latents [G, d] of the entries that close on this rank -> records, gathered over PCP as the bytes that are
stored and written at the same slots everywhere (model.md 3.7, 3.8).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paraflash.cache.store import KVCache
from paraflash.config.model import LayerSpec, ModelConfig
from paraflash.kernels.interface import Kernels
from paraflash.model.batch import Entries, Pairs
from paraflash.model.weights import Numerics, Weights


class Compressor:
    def __init__(self, model: ModelConfig, layer: LayerSpec, weights: Weights, kernels: Kernels, numerics: Numerics):
        self.layer, self.eps, self.kernels, self.numerics = layer, model.rms_eps, kernels, numerics
        own, index = weights.under("compressor"), weights.under("indexer")
        self.wkv, self.norm = own["wkv"], own["norm"]
        self.wk, self.k_norm = index["wk"], index["k_norm"]
        self.wgate = own["wgate"] if layer.ratio == 2 else None

    def write(self, h: Tensor, entries: Entries, cache: KVCache) -> Tensor:
        """Stores this step's entries of layer `self.layer`; returns the local latents before rope [G, d]."""
        k, eps, trained = self.kernels, self.eps, self.numerics.trained_rounding
        if entries.pairs is None:
            pooled = k.linear(h[entries.rows], self.wkv)
        else:
            rows = torch.cat([k.linear_fp32(h, self.wkv), k.linear_fp32(h, self.wgate)], 1)
            pooled = self._pool(rows, entries.pairs, cache.open_rows[self.layer.index])
        # The pooled value stays fp32 into its norm (of the two published choices the finer one).
        latent = k.rms_norm(pooled, self.norm, eps).to(h.dtype)
        main = k.latent_rows(latent, entries.rotary, cache.format.latent, trained)
        index = k.index_rows(latent, self.wk, self.k_norm, eps, entries.rotary, cache.format.index, trained)
        main, index = entries.gather.gather_packed(main, index)
        cache.latents[self.layer.index].write(entries.slots, main)
        cache.index_keys[self.layer.index].write(entries.slots, index)
        return latent

    def _pool(self, rows: Tensor, pairs: Pairs, open_rows: Tensor) -> Tensor:
        """rows [T, 2d] = [kv | score]. Reads of open rows come before they are replaced."""
        sent = pairs.gather.gather(rows[pairs.send_rows]) if pairs.gather.group.size > 1 else rows[:0]
        linked = torch.cat([open_rows[pairs.open_slots], rows, sent])
        open_rows[pairs.keep_slots] = linked[pairs.keep_rows + len(pairs.open_slots)]
        return self.kernels.pool_pairs(linked[pairs.first], linked[pairs.second])
