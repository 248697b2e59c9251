"""Random small models in many shapes, and a cache-free yardstick that says where its own decisions are near ties.

A model is a released config with random sizes and a random layer schedule, written as a BF16 checkpoint of random
weights. `Yardstick` extends the oracle to what it leaves out: no YaRN, no renormalisation, router temperature, and a
candidate filter that ends with the next KV owner.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paraflash.checkpoint.synthetic import synthetic_config, write_synthetic
from tests import oracle

Trace = dict[str, Tensor]
TIE = 2e-5  # decisions closer than this may differ between two right implementations


def random_schedule(r: random.Random) -> dict[str, Any]:
    """Layers in runs: some window-only ones, then KV owners each with readers, re-indexers and window-only layers."""
    ratios: list[int] = [0] * r.choice([0, 0, 1, 2])
    owners: list[int] = []
    index: list[int] = []
    for _ in range(r.choice([0, 1, 1, 2, 2, 3])):
        ratio = r.choice([1, 2])
        owners.append(len(ratios))
        index.append(len(ratios))
        ratios.append(ratio)
        for _ in range(r.choice([0, 1, 2])):
            kind = r.choice(["reuse", "reindex", "reindex", "window"])
            if kind == "reindex":
                index.append(len(ratios))
            ratios.append(0 if kind == "window" else ratio)
    ratios = ratios or [0]
    candidate = r.choice(index) if index and r.random() < 0.7 else r.choice([-1, None])  # None: the field is absent
    count = r.choice([0, 1, 1, 2])
    engram = sorted(r.sample(range(len(ratios)), min(count, len(ratios))))
    return {
        "num_hidden_layers": len(ratios),
        "compress_ratios": ratios,
        "kv_source_layer_ids": owners,
        "index_source_layer_ids": index,
        "engram_layer_ids": engram,
        "candidate_source_layer_id": candidate,
    }


def random_text_config(seed: int, tp: int = 1, pcp: int = 1) -> dict[str, Any]:
    """Fields of text_config that `tp` x `pcp` ranks can split; None: the field is absent."""
    r = random.Random(seed)
    groups = tp * r.choice([1, 2])
    head_dim = r.choice([32, 64])
    rope = r.choice([2, 8, 16, 32])
    experts = r.choice([n for n in (1, 2, 3, 5, 6, 8) if n >= tp * pcp])
    return {
        **random_schedule(r),
        "vocab_size": r.choice([274, 301, 320]),
        "hidden_size": r.choice([24, 33, 48, 64]),
        "num_attention_heads": groups * r.choice([1, 2, 3]),
        "head_dim": head_dim,
        "qk_rope_head_dim": rope,
        "q_lora_rank": r.choice([17, 32, 40]),
        "o_groups": groups,
        "o_lora_rank": r.choice([8, 13, 16]),
        "swiglu_limit": r.choice([0.7, 1.5, 10.0]),
        "moe_intermediate_size": tp * r.choice([9, 16, 20]),
        "n_routed_experts": experts,
        "num_experts_per_tok": r.randint(1, min(3, experts)),
        "max_position_embeddings": 4096,
        "rope_theta": r.choice([100, 10000]),
        "compress_rope_theta": r.choice([1000, 160000]),
        "rope_scaling": r.choice([None, _yarn(4, 64), _yarn(16, 20), _yarn(40, 4096)]),
        "sliding_window": r.choice([1, 2, 3, 5, 8, 16, 31, 40]),
        "candidate_topk_blocks": r.choice([1, 2, 3, 6]),
        "candidate_block_size": r.randint(1, 8),
        "index_n_heads": r.choice([1, 3, 4, 8]),
        "index_head_dim": r.choice([32, 64]),
        "index_topk": r.choice([1, 2, 5, 8, 16, 64]),
        "norm_topk_prob": r.random() < 0.7,
        "gate_temp": r.choice([1.0, 1.0, 0.7, 2.5]),
        "routed_scaling_factor": r.choice([1.0, 1.5, 2.5]),
        "hc_mult": r.randint(1, 4),
        "hc_sinkhorn_iters": r.choice([1, 2, 20]),
        "engram_max_ngram_size": r.randint(2, 5),
        "engram_n_heads": r.choice([1, 2, 4]),
        "engram_head_dim": r.choice([8, 32]),
        "engram_vocab_size": r.choice([2, 29, 61]),
    }


def _yarn(factor: float, original: int) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": original,
    }


def write_model(folder: Path, text: dict[str, Any], seed: int, quantise: bool = False) -> dict[str, Any]:
    """Writes the checkpoint; returns its config.json."""
    given = {name: -1 if value is None and "candidate" in name else value for name, value in text.items()}
    config = synthetic_config("tiny", {f"text_config.{k}": v for k, v in given.items()}, quantise=quantise)
    for name in [n for n, value in text.items() if value is None]:
        del config["text_config"][name]
    write_synthetic(folder, config, seed, shards=1, extra_tensors=False)
    return config


class Yardstick(oracle.M):
    """`forward(ids, R, tr)` -> logits [T, vocab]; afterwards `sure[t]` tells whether row t met no near tie.

    A near tie at a row leaves later rows in doubt too, since they read what it wrote: see `sure_rows`. Rounding of the
    caches (R) has borders of its own; see `stable_rows`.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32):
        super().__init__(str(folder), dtype)
        text = self.c
        text.setdefault("candidate_source_layer_id", -1)
        text.setdefault(
            "rope_scaling", {"factor": 1, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64}
        )
        self.sources = text["kv_source_layer_ids"]

    def sure_rows(self) -> int:
        """Rows before the first one in doubt."""
        return int((~self.sure).nonzero()[0]) if not self.sure.all() else len(self.sure)

    def stable_rows(self, ids: list[int]) -> tuple[Tensor, int]:
        """Mode R logits, and how many leading rows do not move by 1e-3 in fp64 and with weights moved by 5e-7."""
        logits, weights = self.forward(ids, R=True), self.w
        moved = torch.zeros(len(ids))
        for trial in range(3):
            noise = torch.Generator().manual_seed(trial)
            if trial:
                change = {k: 1 + 5e-7 * torch.randn(v.shape, generator=noise) for k, v in weights.items()}
                self.w = {k: v * change[k] for k, v in weights.items()}
            else:
                self.w, self.dt = {k: v.double() for k, v in weights.items()}, torch.float64
            moved = torch.maximum(moved, (self.forward(ids, R=True) - logits).abs().amax(1).float())
            self.w, self.dt = weights, torch.float32
        doubt = (moved > 1e-3).nonzero()
        return logits, int(doubt[0]) if len(doubt) else len(ids)

    def forward(self, ids: list[int], R: bool = False, tr: Trace | None = None) -> Tensor:
        self.sure = torch.ones(len(ids), dtype=torch.bool)
        if self.c["engram_layer_ids"]:
            return super().forward(torch.tensor(ids), R, tr)
        trace, state = ({} if tr is None else tr), {}
        streams, pre = self.start(torch.tensor(ids))
        for layer in range(self.c["num_hidden_layers"]):
            streams, pre = self.layer(layer, streams, pre, state, R, trace, torch.tensor(ids))
        return self.tail(streams, pre, trace)

    def attn(self, layer: int, h: Tensor, st: dict[str, Tensor], R: bool, tr: Trace, given: Any = None) -> Tensor:
        c, w, p, ratio = self.c, self.w, f"layers.{layer}.attn.", self.c["compress_ratios"][layer]
        rows, heads, width = len(h), c["num_attention_heads"], c["head_dim"]
        eps, pos, freqs = c["rms_norm_eps"], torch.arange(len(h)), oracle.rope_freqs(c, ratio)
        qr = oracle.rms(h @ w[p + "wq_a.weight"].T, w[p + "q_norm.weight"], eps)
        q = oracle.rope((qr @ w[p + "wq_b.weight"].T).reshape(rows, heads, width), pos, freqs)
        kv = oracle.rope(oracle.rms(h @ w[p + "wkv.weight"].T, w[p + "kv_norm.weight"], eps), pos, freqs)
        keys = oracle.q_window(kv) if R else kv
        allowed = (pos[None] <= pos[:, None]) & (pos[None] > pos[:, None] - c["sliding_window"])
        if ratio:
            if layer in self.sources:
                self._compress(layer, h, st, R, tr, freqs)
            if layer in c["index_source_layer_ids"]:
                self._choose(layer, h, qr, st, R, tr, freqs)
            allowed, keys = torch.cat([allowed, st["sel"]], 1), torch.cat([keys, st["ckv"]])
        logits = torch.einsum("thd,ed->the", q, keys) * width**-0.5
        logits = logits.masked_fill(~allowed[:, None], -math.inf)
        sink = w[p + "attn_sink"].view(1, heads, 1).expand(rows, heads, 1)
        probs = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
        o = oracle.rope(torch.einsum("the,ed->thd", probs, keys), pos, freqs, inv=True)
        o = o.reshape(rows, c["o_groups"], -1)
        z = torch.einsum("tgi,goi->tgo", o, w[p + "wo_a.weight"].reshape(c["o_groups"], c["o_lora_rank"], -1))
        return z.reshape(rows, -1) @ w[p + "wo_b.weight"].T

    def _compress(self, layer: int, h: Tensor, st: dict[str, Tensor], R: bool, tr: Trace, freqs: Tensor) -> None:
        w, p, eps, ratio = self.w, f"layers.{layer}.attn.", self.c["rms_norm_eps"], self.c["compress_ratios"][layer]
        pooled = h @ w[p + "compressor.wkv.weight"].T
        count = len(h) // ratio
        if ratio == 2:
            gate = (h @ w[p + "compressor.wgate.weight"].T)[: 2 * count].unflatten(0, (count, 2)).softmax(1)
            pooled = (gate * pooled[: 2 * count].unflatten(0, (count, 2))).sum(1)
        latent = oracle.rms(pooled, w[p + "compressor.norm.weight"], eps)
        at = torch.arange(count) * ratio
        main = oracle.rope(latent, at, freqs)
        index = oracle.rms(latent @ w[p + "indexer.wk.weight"].T, w[p + "indexer.k_norm.weight"], eps)
        index = oracle.rope(index, at, freqs)
        st["ckv"], st["ik"] = (oracle.q_latent(main), oracle.q_index(index)) if R else (main, index)

    def _choose(
        self, layer: int, h: Tensor, qr: Tensor, st: dict[str, Tensor], R: bool, tr: Trace, freqs: Tensor
    ) -> None:
        c, w, p, ratio = self.c, self.w, f"layers.{layer}.attn.indexer.", self.c["compress_ratios"][layer]
        heads, width, rows, count = c["index_n_heads"], c["index_head_dim"], len(h), len(st["ik"])
        q = oracle.rope((qr @ w[p + "wq_b.weight"].T).reshape(rows, heads, width), torch.arange(rows), freqs)
        q = oracle.q_index(q) if R else q
        weights = (h @ w[p + "weights_proj.weight"].T) * (width**-0.5 * heads**-0.5)
        scores = (torch.einsum("thd,jd->thj", q, st["ik"]).relu() * weights[..., None]).sum(1)
        visible = (torch.arange(rows) + 1) // ratio
        scores = scores.masked_fill(torch.arange(count)[None] >= visible[:, None], -math.inf)
        candidate = c["candidate_source_layer_id"]
        if layer == candidate:
            st["cand"] = self._candidates(scores, visible)
        elif 0 <= candidate < layer and not any(candidate < s <= layer for s in self.sources):
            scores = scores.masked_fill(~st["cand"], -math.inf)
        tr[f"layers.{layer}.index_scores"] = scores
        st["sel"] = self._top(scores, c["index_topk"])

    def _candidates(self, scores: Tensor, visible: Tensor) -> Tensor:
        size, (rows, count) = self.c["candidate_block_size"], scores.shape
        blocks = -(-count // size)
        if not blocks:
            return torch.zeros(rows, 0, dtype=torch.bool)
        best = torch.nn.functional.pad(scores, (0, blocks * size - count), value=-math.inf)
        best = best.unflatten(1, (blocks, size)).amax(-1)
        some = visible > 0
        best[torch.arange(rows)[some], (visible[some] - 1) // size] = math.inf
        # Among equal blocks the newer one is kept: flipped, so that the first of equals wins.
        kept = self._top(best.flip(1), self.c["candidate_topk_blocks"]).flip(1)
        return kept.repeat_interleave(size, 1)[:, :count]

    def _top(self, scores: Tensor, k: int) -> Tensor:
        """Mask of the k best of each row, the first of equals, never -inf; notes rows where the choice was close."""
        value, place = scores.sort(dim=1, descending=True, stable=True)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, place[:, :k], True) & (scores > -math.inf)
        if scores.shape[1] > k:
            last, next_ = value[:, k - 1], value[:, k]
            # An exact zero on both sides is no accident: no index head of either entry was active.
            close = (last - next_ < TIE) & ~((last == 0) & (next_ == 0)) & (next_ > -math.inf)
            self.sure &= ~close
        return chosen

    def moe(self, layer: int, h: Tensor, tr: Trace) -> Tensor:
        c, w, p = self.c, self.w, f"layers.{layer}.ffn."
        k = c["num_experts_per_tok"]
        scores = torch.nn.functional.softplus(h @ w[p + "gate.weight"].T / c.get("gate_temp", 1.0)).sqrt()
        order = (scores + w[p + "gate.bias"]).sort(1, descending=True)
        if c["n_routed_experts"] > k:
            self.sure &= order.values[:, k - 1] - order.values[:, k] > TIE
        ids = order.indices[:, :k]
        weights = scores.gather(1, ids)
        if c.get("norm_topk_prob", True):
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * c["routed_scaling_factor"]
        out = self.expert(p + "shared_experts.", h)
        for e in range(c["n_routed_experts"]):
            row, choice = (ids == e).nonzero(as_tuple=True)
            out[row] += self.expert(p + f"experts.{e}.", h[row], weights[row, choice])
        return out
