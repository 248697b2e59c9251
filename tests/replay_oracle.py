"""Slow oracle of bounded replay and prefix hits: model.md 5.1 and 5.2 taken at their word, chunk by chunk.

`ReplayOracle` is the slow oracle of the model with state that lives across chunks: a `Life` keeps every window latent
by position, every compressed entry and index key by number, in plain tensors that start as NaN. No pages, no rings, no
ranks, and no chunk's decoder rows are ever skipped: where the engine does that, the results must be equal all the same.
`Follower` runs it along the steps that an engine made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paraflash.engine.messages import StepInput, StepRequest
from tests.oracle import M, rms, rope, rope_freqs

BLOCK = 64


@dataclass
class Life:
    """One request from its first chunk on. Layer numbers are the keys.

    windows: [tokens, head_dim]. entries, keys: compressed entries and index keys of KV owners. rows: [tokens,
    2 * head_dim] what the compressors see of each token, [kv | score]. The entries of the first `hit` tokens are given,
    and the tokens from `replay_start` on are run.
    """

    hit: int
    replay_start: int
    end: int  # first position not yet run
    windows: dict[int, Tensor]
    entries: dict[int, Tensor]
    keys: dict[int, Tensor]
    rows: dict[int, Tensor]


class ReplayOracle(M):
    """Mode R0, fp32."""

    def begin(self, capacity: int, hit: int = 0, replay_start: int = 0) -> Life:
        """A request of up to `capacity` tokens. With a hit the caller fills in the entries."""
        dim, ratios = self.c["head_dim"], self.c["compress_ratios"]

        def unwritten(layers: list[int], width: int, compressed: bool = False) -> dict[int, Tensor]:
            return {i: torch.full((capacity // (ratios[i] if compressed else 1), width), math.nan) for i in layers}

        owners = self.c["kv_source_layer_ids"]
        return Life(
            hit,
            replay_start,
            replay_start,
            windows=unwritten(list(range(self.c["num_hidden_layers"])), dim),
            entries=unwritten(owners, dim, True),
            keys=unwritten(owners, self.c["index_head_dim"], True),
            rows=unwritten(owners, 2 * dim),
        )

    def chunk(
        self, life: Life, ids: Tensor, end: int, is_prefill: bool = True, drops: bool = True
    ) -> dict[int, Tensor]:
        """Runs the rows up to position `end`; logits [vocab] by position of every row that goes through all layers.

        ids: [>= end]. drops: whether 5.2 applies to this chunk.
        """
        c, w, eps = self.c, self.w, self.c["rms_norm_eps"]
        owner, window = max(c["kv_source_layer_ids"]), c["sliding_window"]
        dropped = drops and is_prefill and end - life.end > window
        position = torch.arange(life.end, end)
        life.end = end
        hashes = self.hashes(ids)
        streams, pre = self.start(ids[position])
        chosen: dict[str, Tensor] = {}
        low = life.replay_start
        collapse = lambda: torch.einsum("tk,tkd->td", pre, streams)  # noqa: E731
        for layer in range(c["num_hidden_layers"]):
            name = f"layers.{layer}."
            if layer in c["engram_layer_ids"]:
                streams = self.engram(layer, streams, hashes[position, c["engram_layer_ids"].index(layer)], {})
            h = rms(collapse(), w[name + "attn_norm.weight"], eps)
            self._write(layer, h, position, life)
            if dropped and layer == owner:  # all rows have written, the kept rows go on
                position, streams, pre, h = position[-window:], streams[-window:], pre[-window:], h[-window:]
            if dropped and layer == owner + 1:
                low = max(low, end - window)
            pre_attn, post, comb = self.mixes(streams, name + "hc_attn_")
            streams = _expand(self._attend(layer, h, position, low, life, chosen), streams, post, comb)
            pre = pre_attn
            pre_ffn, post, comb = self.mixes(streams, name + "hc_ffn_")
            h = rms(collapse(), w[name + "ffn_norm.weight"], eps)
            streams = _expand(self.moe(layer, h, {}), streams, post, comb)
            pre = pre_ffn
        return dict(zip(position.tolist(), self.tail(streams, pre, {}), strict=True))

    def _write(self, layer: int, h: Tensor, position: Tensor, life: Life) -> None:
        """Window latents of all rows; entries and index keys that these rows close, but none of the cached ones."""
        c, w, eps, name = self.c, self.w, self.c["rms_norm_eps"], f"layers.{layer}.attn."
        ratio, dim = c["compress_ratios"][layer], c["head_dim"]
        frequencies = rope_freqs(c, ratio)
        latent = rms(h @ w[name + "wkv.weight"].T, w[name + "kv_norm.weight"], eps)
        life.windows[layer][position] = rope(latent, position, frequencies)
        if layer not in c["kv_source_layer_ids"]:
            return
        rows = h @ w[name + "compressor.wkv.weight"].T
        if ratio == 2:
            rows = torch.cat([rows, h @ w[name + "compressor.wgate.weight"].T], 1)
        life.rows[layer][position, : rows.shape[1]] = rows
        closed = [p for p in position.tolist() if p >= life.hit and (p + 1) % ratio == 0]
        if not closed:
            return
        last, number = torch.tensor(closed), torch.tensor(closed) // ratio
        if ratio == 2:
            pair = torch.stack([life.rows[layer][last - 1], life.rows[layer][last]])
            pooled = (pair[:, :, dim:].softmax(0) * pair[:, :, :dim]).sum(0)
        else:
            pooled = life.rows[layer][last, :dim]
        entry = rms(pooled, w[name + "compressor.norm.weight"], eps)
        key = rms(entry @ w[name + "indexer.wk.weight"].T, w[name + "indexer.k_norm.weight"], eps)
        life.entries[layer][number] = rope(entry, number * ratio, frequencies)
        life.keys[layer][number] = rope(key, number * ratio, frequencies)

    def _attend(
        self, layer: int, h: Tensor, position: Tensor, low: int, life: Life, chosen: dict[str, Tensor]
    ) -> Tensor:
        """Attention of rows h over window latents [max(low, t-W+1), t] and the chosen entries."""
        c, w, eps, name = self.c, self.w, self.c["rms_norm_eps"], f"layers.{layer}.attn."
        ratio, heads, dim, count = c["compress_ratios"][layer], c["num_attention_heads"], c["head_dim"], len(h)
        frequencies = rope_freqs(c, ratio)
        qr = rms(h @ w[name + "wq_a.weight"].T, w[name + "q_norm.weight"], eps)
        q = rope((qr @ w[name + "wq_b.weight"].T).reshape(count, heads, dim), position, frequencies)
        end = int(position[-1]) + 1
        first = max(low, int(position[0]) - c["sliding_window"] + 1)
        at = torch.arange(first, end)
        seen = (at <= position[:, None]) & (at > position[:, None] - c["sliding_window"])
        keys = life.windows[layer][first:end]
        if ratio:
            owner = max(i for i in c["kv_source_layer_ids"] if i <= layer)
            entries = life.entries[owner][: end // ratio]
            if layer in c["index_source_layer_ids"]:
                chosen["entries"] = self._choose(layer, h, qr, position, life.keys[owner][: end // ratio], chosen)
            keys, seen = torch.cat([keys, entries]), torch.cat([seen, chosen["entries"]], 1)
        scores = (torch.einsum("thd,ed->the", q, keys) * dim**-0.5).masked_fill(~seen[:, None], -math.inf)
        sink = w[name + "attn_sink"].view(1, heads, 1).expand(count, heads, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        values = torch.einsum("the,ed->thd", weights, keys)
        o = rope(values, position, frequencies, inv=True).reshape(count, c["o_groups"], -1)
        wo_a = w[name + "wo_a.weight"].reshape(c["o_groups"], c["o_lora_rank"], -1)
        return torch.einsum("tgi,goi->tgo", o, wo_a).reshape(count, -1) @ w[name + "wo_b.weight"].T

    def _choose(
        self, layer: int, h: Tensor, qr: Tensor, position: Tensor, keys: Tensor, chosen: dict[str, Tensor]
    ) -> Tensor:
        """[rows, entries] bool: the entries that each row attends to; leaves the candidates of their source."""
        c, w, name = self.c, self.w, f"layers.{layer}.attn.indexer."
        ratio, heads, dim = c["compress_ratios"][layer], c["index_n_heads"], c["index_head_dim"]
        q = (qr @ w[name + "wq_b.weight"].T).reshape(len(h), heads, dim)
        q = rope(q, position, rope_freqs(c, ratio))
        weights = (h @ w[name + "weights_proj.weight"].T) * (dim**-0.5 * heads**-0.5)
        scores = (torch.einsum("thd,jd->thj", q, keys).relu() * weights[..., None]).sum(1)
        visible = (position + 1) // ratio
        scores = scores.masked_fill(torch.arange(len(keys)) >= visible[:, None], -math.inf)
        source = c["candidate_source_layer_id"]
        if layer == source:
            chosen["candidates"] = self._candidates(scores, visible)
        elif 0 <= source < layer:
            scores = scores.masked_fill(~chosen["candidates"], -math.inf)
        value, entry = _best(scores, c["index_topk"])
        taken = torch.zeros(len(h), len(keys) + 1, dtype=torch.bool)
        taken.scatter_(1, torch.where(value > -math.inf, entry, len(keys)), True)
        return taken[:, :-1]

    def _candidates(self, scores: Tensor, visible: Tensor) -> Tensor:
        size, (rows, count) = self.c["candidate_block_size"], scores.shape
        blocks = -(-count // size)
        best = torch.nn.functional.pad(scores, (0, blocks * size - count), value=-math.inf)
        best = best.reshape(rows, blocks, size).amax(-1)
        has = visible > 0
        best[torch.arange(rows)[has], (visible[has] - 1) // size] = math.inf
        value, block = _best(best.flip(-1), self.c["candidate_topk_blocks"])  # of equal blocks the newer
        block = blocks - 1 - block
        kept = torch.zeros(rows, blocks, dtype=torch.bool).scatter_(1, block, value > -math.inf)
        return kept.repeat_interleave(size, 1)[:, :count]


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of each row; of equal ones the first."""
    value, index = scores.sort(dim=-1, descending=True, stable=True)
    return value[:, :count], index[:, :count]


def _expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return post[..., None] * y[:, None] + torch.einsum("tjk,tjd->tkd", comb, streams)


class Follower:
    """Runs the oracle along an engine's steps: what every row of them must give, by their own definition.

    Which entries a prefix hit finds follows from the physical blocks: whoever wrote a block last has filled it.
    """

    def __init__(self, oracle: ReplayOracle, capacity: int, drops: bool):
        self.oracle, self.capacity, self.drops = oracle, capacity, drops
        self.lives: dict[str, Life] = {}
        self.tokens: dict[str, Tensor] = {}
        self.blocks: dict[int, tuple[Life, Tensor, int]] = {}  # block -> who wrote it, the tokens, its place in them

    def follow(self, step: StepInput) -> dict[tuple[str, int], Tensor]:
        """Logits by (request, position) of the rows that the definition runs through all layers."""
        expected = {}
        # A request that starts finds what earlier steps left, whatever this one writes.
        for r in step.requests:
            life = self.lives.get(r.request_id)
            if life is None or life.end != r.num_computed or r.num_computed == r.window_start:
                self._start(r)
            self._adopt(r)
        for r in step.requests:
            life, end = self.lives[r.request_id], r.num_computed + r.num_tokens
            ids = self.tokens[r.request_id]
            ids[life.end : end] = torch.from_numpy(r.token_ids)
            rows = self.oracle.chunk(life, ids[:end], end, r.is_prefill, self.drops and r.prompt_logprobs is None)
            expected.update({(r.request_id, position): row for position, row in rows.items()})
            for place in range(r.kv_write_start // BLOCK, len(r.block_ids)):
                self.blocks[int(r.block_ids[place])] = (life, ids, place)
        return expected

    def _start(self, r: StepRequest) -> None:
        assert r.kv_write_start % BLOCK == 0 and r.num_computed == r.window_start
        self.lives[r.request_id] = self.oracle.begin(self.capacity, r.kv_write_start, r.window_start)
        self.tokens[r.request_id] = torch.full((self.capacity,), -1)

    def _adopt(self, r: StepRequest) -> None:
        """Takes over the entries of the hit's blocks that this step's table shows; it covers the step's rows only."""
        life, ids, per = self.lives[r.request_id], self.tokens[r.request_id], self.oracle.c["compress_ratios"]
        for place in range(len(r.block_ids[: life.hit // BLOCK])):
            other, other_ids, other_place = self.blocks[int(r.block_ids[place])]
            assert other_place == place and other.end >= (place + 1) * BLOCK
            for owner in life.entries:
                part = slice(place * BLOCK // per[owner], (place + 1) * BLOCK // per[owner])
                life.entries[owner][part] = other.entries[owner][part]
                life.keys[owner][part] = other.keys[owner][part]
            ids[place * BLOCK : (place + 1) * BLOCK] = other_ids[place * BLOCK : (place + 1) * BLOCK]
        first, known = r.num_computed, min(max(life.hit - r.num_computed, 0), r.num_tokens)
        assert (ids[first : first + known] == torch.from_numpy(r.token_ids[:known])).all(), "another's blocks"
        assert (ids[max(0, first - len(r.lookback)) : first] == torch.from_numpy(r.lookback)).all()
