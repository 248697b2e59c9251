"""The text model: one flat loop over identical blocks of attention and experts (model.md 3.1).

State between layers is four residual streams [T, K, D] and the weights `pre` [T, K] that collapse them for the next
sublayer; those lag one sublayer behind. `probe` sees named intermediate values and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paraflash.cache.store import KVCache
from paraflash.config.model import LayerSpec, ModelConfig
from paraflash.kernels.interface import Kernels
from paraflash.model.attention import Attention
from paraflash.model.batch import LocalBatch, Trailing
from paraflash.model.indexer import Selection
from paraflash.model.moe import MoE
from paraflash.model.weights import Numerics, Weights
from paraflash.parallel.exchange import RowGather, sum_over_tp
from paraflash.parallel.mesh import Group, Mesh

Probe = Callable[[str, Any], None]


def no_probe(name: str, value: Any) -> None:
    return None


@dataclass
class State:
    streams: Tensor  # [T, K, D]
    pre: Tensor  # [T, K] fp32


class Block:
    """One layer."""

    def __init__(
        self,
        model: ModelConfig,
        layer: LayerSpec,
        weights: Weights,
        kernels: Kernels,
        numerics: Numerics,
        mesh: Mesh,
        first_expert: int,
    ):
        self.model, self.layer, self.kernels, self.numerics = model, layer, kernels, numerics
        self.weights = weights
        self.attention = Attention(model, layer, weights.under("attn"), kernels, numerics, mesh)
        self.moe = MoE(model, weights.under("ffn"), kernels, numerics, mesh, first_expert)
        self.engram = weights.under("engram") if layer.engram is not None else None

    def add_engram(self, streams: Tensor, rows: Tensor) -> Tensor:
        """rows [T, columns * width]: the looked-up table rows of each token (model.md 3.12)."""
        assert self.engram is not None
        u = self.kernels.linear(rows, self.engram["wkv"], self.numerics.round_inputs)
        return self.kernels.engram_write(
            streams, u, self.engram["q_weight"], self.engram["k_weight"], self.model.rms_eps
        )

    def mixes(self, streams: Tensor, site: str) -> tuple[Tensor, Tensor, Tensor]:
        w, m = self.weights, self.model
        fn, scale, base = w[f"hc_{site}_fn"], w[f"hc_{site}_scale"], w[f"hc_{site}_base"]
        return self.kernels.hc_mixes(streams, fn, scale, base, m.hc_sinkhorn_iters, m.hc_eps, m.rms_eps)

    def collapse(self, state: State, site: str) -> Tensor:
        return self.kernels.hc_collapse(state.streams, state.pre, self.weights[f"{site}_norm"], self.model.rms_eps)


class Transformer:
    def __init__(
        self,
        model: ModelConfig,
        tensors: MutableMapping[str, Any],
        kernels: Kernels,
        numerics: Numerics,
        mesh: Mesh,
        first_expert: int,
        first_token: int,
    ):
        """first_expert, first_token: where this rank's shares of the experts and of the vocabulary begin."""
        self.model, self.kernels, self.numerics, self.mesh = model, kernels, numerics, mesh
        root = Weights(tensors)
        self.embedding, self.head, self.norm = root["embed"], root["head"], root["norm"]
        self.blocks = [
            Block(model, layer, root.under(f"layers.{layer.index}"), kernels, numerics, mesh, first_expert)
            for layer in model.layers
        ]
        self.first_token = first_token
        self.probe: Probe = no_probe

    def embed(self, token_ids: Tensor, everyone: RowGather) -> Tensor:
        """[T] int64 -> [T, D]; the vocabulary is split over TP, so foreign tokens add zero."""
        if self.mesh.tp.size == 1:
            return self.embedding[token_ids]
        local = token_ids - self.first_token
        mine = (local >= 0) & (local < self.embedding.shape[0])
        rows = self.embedding[local.clamp(0, max(0, self.embedding.shape[0] - 1))]
        return sum_over_tp(self.mesh.tp, rows.masked_fill(~mine[:, None], 0), everyone, "embed")

    def forward(
        self,
        token_ids: Tensor,
        engram_rows: Callable[[int], Tensor],
        batch: LocalBatch,
        cache: KVCache,
        trailing: Trailing | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Normed final hidden rows [T', D] of the batch (of `trailing.batch` where given).

        token_ids [T] int64; engram_rows(n) gives the table rows [T, columns * width] of the n-th Engram layer.
        With `trailing` the layers behind the last KV owner, and that layer's own attention, run on its rows only.
        """
        model, k = self.model, self.kernels
        x = self.embed(token_ids, batch.all_rows)
        state = State(x[:, None].repeat(1, model.hc_mult, 1), x.new_zeros(len(x), model.hc_mult, dtype=torch.float32))
        state.pre[:, 0] = 1
        chosen = Selection()
        if trailing is not None:
            batch = replace(batch, outbox=None)  # rows go on at other ranks within this step
        for block in self.blocks:
            progress()
            if block.layer.engram is not None:
                state.streams = block.add_engram(state.streams, engram_rows(block.layer.engram))
            narrowing = trailing if block.layer.index == model.last_kv_owner else None
            if narrowing is not None and narrowing.batch.all_rows.total == 0:  # no row goes on, on any rank
                block.attention.write(block.collapse(state, "attn"), batch, narrowing.windows, cache)[0].wait()
                return x[:0]
            state, batch = self._attend(block, state, batch, cache, chosen, narrowing)
            progress()
            experts, ids, weights = block.moe.start(block.collapse(state, "ffn"), batch.all_rows)
            pre, post, comb = block.mixes(state.streams, "ffn")  # while the experts' sum is on its way
            y = experts()
            state = State(k.hc_expand(y, state.streams, post, comb), pre)
            self._show(
                block.layer, ffn_out=y, router_indices=ids, router_weights=weights, streams=state.streams, pre_mix=pre
            )
        if batch.outbox is not None:
            batch.outbox.send()
        return k.hc_collapse(state.streams, state.pre, self.norm, model.rms_eps)

    def _attend(
        self,
        block: Block,
        state: State,
        batch: LocalBatch,
        cache: KVCache,
        chosen: Selection,
        trailing: Trailing | None,
    ) -> tuple[State, LocalBatch]:
        """The attention sublayer; with `trailing` all rows write their keys and the trailing rows go on alone."""
        attention = block.attention
        windows = trailing.windows if trailing else batch.windows
        h = block.collapse(state, "attn")
        keys, latent = attention.write(h, batch, windows, cache)
        if trailing:
            sent = trailing.gather.gather_packed(state.streams[trailing.send_rows], state.pre[trailing.send_rows])
            state, batch = State(sent[0][trailing.take], sent[1][trailing.take]), trailing.batch
            h = block.collapse(state, "attn")
        pre, post, comb = block.mixes(state.streams, "attn")
        y = attention.read(h, keys, batch, windows, cache, chosen)
        self._show(block.layer, attn_out=y, latent_prerope=latent)
        if block.layer.owns_index:
            self._show(block.layer, topk=chosen.entries)
        if block.layer.publishes_candidates:
            self._show(block.layer, candidate_mask=chosen.candidates)
        return State(self.kernels.hc_expand(y, state.streams, post, comb), pre), batch

    def _show(self, layer: LayerSpec, **values: Any) -> None:
        if self.probe is not no_probe:
            for name, value in values.items():
                self.probe(f"layers.{layer.index}.{name}", value)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [n, vocab] of normed rows [n, D], which all ranks have and of which all ranks get all logits.

        The ranks of a PCP group share out the columns of their TP rank, so that none reads the whole head.
        """
        tp, pcp, vocab = self.mesh.tp, self.mesh.pcp, self.model.vocab_size
        width = -(-vocab // tp.size)  # of a TP rank, and below of each of its PCP ranks
        each = -(-width // pcp.size)
        part = self.kernels.linear_fp32(hidden, self.head[pcp.rank * each : (pcp.rank + 1) * each])
        return join_columns(tp, join_columns(pcp, part, each)[:, :width], width)[:, :vocab]


def join_columns(group: Group, part: Tensor, width: int) -> Tensor:
    """part [n, at most `width`] of each rank -> [n, size * width]; what a rank lacks is zero."""
    if group.size == 1:
        return part
    part = torch.nn.functional.pad(part, (0, width - part.shape[1]))
    gathered = group.all_gather_start(part, "logits").wait().unflatten(0, (group.size, -1))
    return gathered.transpose(0, 1).flatten(1)
