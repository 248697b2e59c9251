"""Differentiable forward of the whole architecture over a batch of full sequences, dense and without caches.

Formulas as in model.md 3; shapes: ids [B, T] -> streams [B, T, K, hidden] -> logits [B, T, vocab]. Parameters are
stacked over the layers that own them ([layers, out, in]), so that rounding and the optimiser work on a few large
tensors. Compressed attention is masked, not gathered: every entry takes part in one masked softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paraflash.config.model import LayerSpec, ModelConfig
from paraflash.model.rope import frequencies
from training import rounding
from training.attention import Turns, attend, fused, largest, rotate
from training.sinkhorn import sinkhorn
from training.streams import collapse, expand
from training.tasks import DENSE, HARD, ROUTE_ANY, ROUTE_FILTERED, ROUTE_PAIRS
from training.weights import initial, parameter_shapes, rows_of, stored_as

CONTEXT_WEIGHT = 0.05  # of rows that answer nothing, in the indexer's loss


@dataclass(frozen=True)
class Mode:
    """How one forward runs. All off and fp32: mode R0 of model.md with every visible entry attended."""

    round_cache: bool = False  # trained rounding of latents and index vectors (mode R)
    round_weights: bool = False  # weights as the released format stores them
    sparse: bool = False  # the indexer chooses; else every visible compressed entry is attended
    hints: bool = False  # obey the hints: flags of the sequences, decoys; and gather the pointers' loss
    losses: bool = False  # also gather the indexer's loss and the route penalty
    hidden_ratio: int = 0  # entries of this ratio are not attended (to see what an answer needs)
    unlinked: bool = False  # the odd token of a ratio-2 group stands in for the even one (likewise)
    dtype: torch.dtype = torch.float32  # of matrix products


@dataclass
class Hints:
    """What training knows of a batch, see tasks.training_batch: routes [B, T] uint8, sources [B, T] and decoys [B]
    int64."""

    routes: Tensor
    sources: Tensor
    decoys: Tensor


@dataclass
class Extras:
    """By-products of a forward. loads: [layers, experts] share of tokens; losses are scalars; traces for tests."""

    index_loss: list[Tensor] = field(default_factory=list)
    point_loss: list[Tensor] = field(default_factory=list)
    route_loss: list[Tensor] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)
    chosen: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class _Shared:
    """What later layers read of earlier ones (model.md 3.11), and the indexers' running targets."""

    latents: Tensor | None = None  # [B, n, D] of the present KV owner
    keys: Tensor | None = None  # [B, n, Di]
    selected: Tensor | None = None  # [B, T, n] bool
    candidates: Tensor | None = None  # [B, T, n] bool
    scores: dict[int, Tensor] = field(default_factory=dict)  # index source -> scores with -inf where not visible
    targets: dict[int, Tensor] = field(default_factory=dict)  # index source -> attention mass [B, T, n]


def rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), w, eps)


class Miniature(nn.Module):
    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        self.parameters_by_name = {
            name: nn.Parameter(initial(config, name, shape, generator))
            for name, shape in parameter_shapes(config).items()
        }
        for name, parameter in self.parameters_by_name.items():
            self.register_parameter(name.replace(".", "__"), parameter)
        for kind, spec in (("window", config.window_rope), ("compress", config.compress_rope)):
            self.register_buffer(f"{kind}_frequencies", frequencies(spec, config.rope_dim), persistent=False)

    def _weights(self, mode: Mode) -> dict[str, Tensor | list[Tensor]]:
        """Parameters as this forward uses them; stacks are unbound into one tensor a layer."""
        out: dict[str, Tensor | list[Tensor]] = {}
        for name, parameter in self.parameters_by_name.items():
            form, matrix = stored_as(name)
            w: Tensor = parameter
            if mode.round_weights and form != "f32":
                w = {"fp8": rounding.blocks, "fp4": rounding.mxfp4, "engram": rounding.mxfp8, "bf16": rounding.bf16}[
                    form
                ](w)
            if matrix:
                w = w.to(mode.dtype)
            out[name] = list(w.unbind(0)) if rows_of(self.config, name) else w
        return out

    def forward(self, ids: Tensor, hashes: Tensor, mode: Mode, hints: Hints | None = None) -> tuple[Tensor, Extras]:
        """ids [B, T] int64, hashes [B, T, engram layers, columns] int64 -> logits fp32, extras."""
        c = self.config
        w = self._weights(mode)
        extras, shared = Extras(), _Shared()
        position = torch.arange(ids.shape[1], device=ids.device)
        turns = [_turns(position, self.window_frequencies), _turns(position, self.compress_frequencies)]
        x = F.embedding(ids, w["embed"]).float()
        streams = x[:, :, None].expand(-1, -1, c.hc_mult, -1)
        pre = (torch.arange(c.hc_mult, device=ids.device) == 0).float().expand(*ids.shape, -1)
        for layer in c.layers:
            at = layer.index
            if layer.engram is not None:
                streams = self._engram(w, layer.engram, streams, hashes[:, :, layer.engram], mode)
            pre_attn, post, comb = self._mixes(w, at, "attn", streams)
            h = rms(collapse(streams, pre), w["attn_norm"][at], c.rms_eps)
            y = self._attention(w, layer, h, shared, turns[int(layer.ratio > 0)], mode, hints, extras)
            streams = expand(y, streams, post, comb)
            pre, post, comb = self._mixes(w, at, "ffn", streams)
            h = rms(collapse(streams, pre_attn), w["ffn_norm"][at], c.rms_eps)
            streams = expand(self._moe(w, at, h, extras), streams, post, comb)
        if mode.losses:
            self._index_losses(shared, extras)
        y = rms(collapse(streams, pre), w["norm"], c.rms_eps)
        return (y.to(mode.dtype) @ w["head"].T).float(), extras

    def _mixes(self, w: dict, at: int, site: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre, post [B, T, K] and comb [B, T, K, K] (model.md 3.2)."""
        c = self.config
        k = c.hc_mult
        v = streams.flatten(2)
        m = F.rms_norm(v, (v.shape[-1],), None, c.rms_eps) @ w[f"hc_{site}_fn"][at].T
        scale, base = w[f"hc_{site}_scale"][at], w[f"hc_{site}_base"][at]
        pre = torch.sigmoid(m[..., :k] * scale[0] + base[:k]) + c.hc_eps
        post = 2 * torch.sigmoid(m[..., k : 2 * k] * scale[1] + base[k : 2 * k])
        comb = (m[..., 2 * k :] * scale[2] + base[2 * k :]).reshape(-1, k, k)
        return pre, post, sinkhorn(comb, c.hc_sinkhorn_iters, c.hc_eps).view(*m.shape[:2], k, k)

    def _engram(self, w: dict, number: int, streams: Tensor, rows: Tensor, mode: Mode) -> Tensor:
        """Adds the gated n-gram value to every stream (model.md 3.12)."""
        c = self.config
        k, width = c.hc_mult, c.hidden_size
        e = F.embedding(rows, w[f"engram.embed.{number}"]).flatten(2)
        u = (e @ w["engram.wkv"][number].T).float()
        key, value = u[..., : k * width].unflatten(-1, (k, width)), u[..., k * width :]
        dot = (streams * w["engram.q_weight"][number] * w["engram.k_weight"][number] * key).sum(-1)
        dot = (
            dot
            * torch.rsqrt(streams.square().mean(-1) + c.rms_eps)
            * torch.rsqrt(key.square().mean(-1) + c.rms_eps)
            * width**-0.5
        )
        gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
        return streams + gate[..., None] * value[:, :, None]

    def _moe(self, w: dict, at: int, h: Tensor, extras: Extras) -> Tensor:
        """Every expert on every token, gated to the chosen ones (model.md 3.13)."""
        c = self.config
        score = F.softplus(h.float() @ w["ffn.gate"][at].float().T).sqrt()
        chosen = (score.detach() + w["ffn.gate_bias"][at]).topk(c.experts_per_token, -1).indices
        mask = torch.zeros_like(score).scatter_(-1, chosen, 1.0)
        extras.loads.append(mask.detach().mean((0, 1)))
        gate = score * mask
        gate = gate / (gate.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        dtype = w["ffn.w1"][at].dtype
        x = h.to(dtype)
        experts = self._glu(x, w["ffn.w1"][at].flatten(0, 1), w["ffn.w3"][at].flatten(0, 1), gate)
        routed = experts @ w["ffn.w2"][at].transpose(1, 2).flatten(0, 1)
        one = torch.ones_like(gate[..., :1])
        shared = self._glu(x, w["ffn.shared_w1"][at], w["ffn.shared_w3"][at], one) @ w["ffn.shared_w2"][at].T
        return routed.float() + shared.float()

    def _glu(self, x: Tensor, w1: Tensor, w3: Tensor, gate: Tensor) -> Tensor:
        """Gated units of E experts side by side: w1, w3 [E * I, hidden], gate fp32 [B, T, E] -> [B, T, E * I]."""
        limit = self.config.swiglu_limit
        up = (gate.shape[-1], len(w1) // gate.shape[-1])
        g, u = (x @ w1.T).unflatten(-1, up), (x @ w3.T).unflatten(-1, up)
        if fused(x):
            from training.fused import Gated

            return Gated.apply(g, u, gate, limit).flatten(-2)
        return (F.silu(g.clamp(max=limit)) * u.clamp(-limit, limit) * gate[..., None].to(g.dtype)).flatten(-2)

    def _attention(
        self,
        w: dict,
        layer: LayerSpec,
        h: Tensor,
        shared: _Shared,
        turn: Turns,
        mode: Mode,
        hints: Hints | None,
        extras: Extras,
    ) -> Tensor:
        """Window and compressed attention with sinks, then the grouped output projection (model.md 3.5-3.10)."""
        c, at, eps = self.config, layer.index, self.config.rms_eps
        heads, dim = c.num_heads, c.head_dim
        x = h.to(mode.dtype)
        qr = rms(x @ w["attn.wq_a"][at].T, w["attn.q_norm"][at], eps)
        q = rotate((qr.to(mode.dtype) @ w["attn.wq_b"][at].T).unflatten(-1, (heads, dim)), turn) * dim**-0.5
        kv = rotate(rms(x @ w["attn.wkv"][at].T, w["attn.kv_norm"][at], eps), turn)
        kv = (rounding.mxfp8(kv) if mode.round_cache else kv).to(mode.dtype)
        hints = hints if mode.hints else None
        if layer.owns_kv:
            self._compress(w, layer, h, shared, turn, mode, hints)
        if layer.owns_index and (mode.sparse or mode.losses):
            self._index(w, layer, h, qr, shared, turn, mode, hints)
            if shared.selected is not None:
                extras.chosen[at] = shared.selected
        allowed = None
        if layer.ratio:
            allowed = (
                self._visible(h.shape[1], layer.ratio, h.device)[None] if shared.selected is None else shared.selected
            )
            if hints is not None:
                soft = (hints.routes & HARD) == 0
                allowed = allowed & (soft | _may_read(self.config, layer, hints.routes))[..., None]
            if layer.ratio == mode.hidden_ratio:
                allowed = torch.zeros_like(allowed)
        out, far = attend(q, kv, shared.latents if layer.ratio else None, allowed, w["attn.sink"][at], c.window)
        if far is not None and hints is not None:
            self._point(layer, far[0], hints, extras)
            if mode.losses:
                self._note_attention(layer, *far, hints.routes, shared, extras)
        out = rotate(out, turn, -1.0).unflatten(2, (c.o_groups, -1)).flatten(3)
        z = torch.einsum("btgi,goi->btgo", out, w["attn.wo_a"][at].unflatten(0, (c.o_groups, -1)))
        return (z.flatten(2) @ w["attn.wo_b"][at].T).float()

    def _compress(
        self, w: dict, layer: LayerSpec, h: Tensor, shared: _Shared, turn: Turns, mode: Mode, hints: Hints | None
    ) -> None:
        """Sets the shared latents and index keys (model.md 3.7, 3.8)."""
        c, r = self.config, layer.ratio
        owner = [o.index for o in c.kv_owners].index(layer.index)
        x = h.to(mode.dtype)
        k = (x @ w["compressor.wkv"][owner].T).float()
        n = h.shape[1] // r
        if r == 2:
            twos = [o.index for o in c.kv_owners if o.ratio == 2]
            g = (x @ w["compressor.wgate"][twos.index(layer.index)].T).float()
            g, k = (x[:, : 2 * n].unflatten(1, (n, 2)) for x in (g, k))
            if mode.unlinked:
                g, k = (x[:, :, 1:].expand_as(x) for x in (g, k))
            k = (g.softmax(2) * k).sum(2)
        latent = rms(k, w["compressor.norm"][owner], c.rms_eps)
        at_first = (turn[0][: n * r : r].contiguous(), turn[1][: n * r : r].contiguous())
        key = rms(latent.detach().to(mode.dtype) @ w["indexer.wk"][owner].T, w["indexer.k_norm"][owner], c.rms_eps)
        key, latent = rotate(key, at_first), rotate(latent, at_first)
        if mode.round_cache:
            key, latent = rounding.mxfp4(key), rounding.nvfp4(latent)
        if hints is not None and r == 1:
            key, latent = key[hints.decoys], latent[hints.decoys]
        shared.keys, shared.latents = key, latent.to(mode.dtype)

    def _index(
        self,
        w: dict,
        layer: LayerSpec,
        h: Tensor,
        qr: Tensor,
        shared: _Shared,
        turn: Turns,
        mode: Mode,
        hints: Hints | None,
    ) -> None:
        """Scores all entries and, in sparse mode, chooses (model.md 3.9). The indexer learns from its own loss only."""
        c = self.config
        source = [s.index for s in c.layers if s.owns_index].index(layer.index)
        q = (qr.detach().to(mode.dtype) @ w["indexer.wq_b"][source].T).unflatten(-1, (c.index_heads, c.index_head_dim))
        q = rotate(q.float(), turn)
        q = rounding.mxfp4(q) if mode.round_cache else q
        weight = (h.detach().to(mode.dtype) @ w["indexer.weights_proj"][source].T).float() * (
            c.index_head_dim * c.index_heads
        ) ** -0.5
        dots = q.flatten(1, 2) @ shared.keys.transpose(1, 2)  # [B, T * heads, n]
        visible = self._visible(h.shape[1], layer.ratio, h.device)[None]
        if fused(dots):
            from training.fused import Scores

            score = Scores.apply(dots, weight, layer.ratio)
        else:
            score = (dots.relu().unflatten(1, (-1, c.index_heads)) * weight[..., None]).sum(2)
            score = score.masked_fill(~visible, -math.inf)
        shared.scores[layer.index] = score
        shared.selected = None
        if not mode.sparse or not score.shape[-1]:
            return
        with torch.no_grad():
            if layer.publishes_candidates:
                shared.candidates = self._candidates(score)
            if layer.applies_candidates:
                score = score.masked_fill(~shared.candidates, -math.inf)
            chosen = largest(score, c.index_topk)
            if hints is not None:
                chosen = chosen | (visible & ((hints.routes & DENSE) > 0)[..., None])
            shared.selected = chosen

    def _candidates(self, score: Tensor) -> Tensor:
        """[B, T, n] scores -> entries of the kept blocks (model.md 3.9, candidate level)."""
        c, n = self.config, score.shape[-1]
        count = -(-n // c.candidate_block_size)
        padded = F.pad(score, (0, count * c.candidate_block_size - n), value=-math.inf)
        block = padded.unflatten(-1, (count, -1)).amax(-1)
        ratio = next(layer.ratio for layer in c.layers if layer.publishes_candidates)
        newest = ((torch.arange(score.shape[1], device=score.device) + 1) // ratio - 1).div(
            c.candidate_block_size, rounding_mode="floor"
        )
        block = block.masked_fill(torch.arange(count, device=score.device) == newest[:, None], math.inf)
        kept = largest(block.flip(-1), c.candidate_topk_blocks).flip(-1)  # of equal blocks the newer one
        return kept.repeat_interleave(c.candidate_block_size, -1)[..., :n]

    @staticmethod
    def _visible(length: int, ratio: int, device: torch.device) -> Tensor:
        """[T, n]: entry j is visible to token t once j < floor((t + 1) / r)."""
        position = torch.arange(length, device=device)
        return torch.arange(length // ratio, device=device) < ((position + 1) // ratio)[:, None]

    def _point(self, layer: LayerSpec, far: Tensor, hints: Hints, extras: Extras) -> None:
        """Cross entropy of half of the heads' compressed attention far [B, T, H, n] with the entry of the source, in
        the one layer of each route that is taught to look there."""
        route = pointers(self.config).get(layer.index)
        if route is None:
            return
        rows = (hints.sources >= 0) & ((hints.routes & ROUTE_ANY) == route)
        entry = hints.sources.clamp_min(0).div(layer.ratio, rounding_mode="floor").clamp_max(far.shape[-1] - 1)
        half = far[:, :, : far.shape[2] // 2]
        found = half.gather(-1, entry[..., None, None].expand(-1, -1, half.shape[2], 1)).float().mean((2, 3))
        extras.point_loss.append(-((found + 1e-4).log() * rows).sum() / (rows.sum() + 1.0))

    def _note_attention(
        self, layer: LayerSpec, far: Tensor, mass: Tensor, routes: Tensor, shared: _Shared, extras: Extras
    ) -> None:
        """Adds compressed attention far [B, T, H, n] to the indexers' targets and its mass [B, T, H] to the penalty."""
        wrong = ~_may_read(self.config, layer, routes)
        extras.route_loss.append((mass.mean(-1) * wrong).sum() / (wrong.sum() + 1.0))
        answers = (routes & ROUTE_ANY) != ROUTE_ANY
        # What the context's own tokens look up is diffuse and would drown the few rows that must find an entry.
        found = far.detach().mean(2, dtype=torch.float32) * torch.where(answers, 1.0, CONTEXT_WEIGHT)[..., None]
        sources = [layer.index_owner]
        spec = self.config.layers[layer.index_owner]
        if spec.applies_candidates:  # the blocks its source publishes must hold what this layer reads
            sources += [s.index for s in self.config.layers if s.publishes_candidates]
        for source in sources:
            shared.targets[source] = shared.targets[source] + found if source in shared.targets else found

    def _index_losses(self, shared: _Shared, extras: Extras) -> None:
        """Cross entropy of the scores' softmax with the attention they should predict, rows weighted by its mass."""
        for source, target in shared.targets.items():
            score = shared.scores[source]
            weight = target.sum(-1)
            share = target / (weight[..., None] + 1e-6)
            hidden = score == -math.inf
            empty = hidden.all(-1, keepdim=True)
            predicted = score.masked_fill(empty, 0.0).log_softmax(-1).masked_fill(hidden, 0.0)
            extras.index_loss.append(-((share * predicted).sum(-1) * weight).sum() / (weight.sum() + 1e-6))


def _turns(position: Tensor, frequency: Tensor) -> Turns:
    angle = position.float()[:, None] * frequency
    return angle.cos(), angle.sin()


def pointers(config: ModelConfig) -> dict[int, int]:
    """Layer -> route whose answers look for their source there: the last index layer of each ratio."""
    last = {layer.ratio: layer.index for layer in config.layers if layer.owns_index}
    return {last[2]: ROUTE_PAIRS, last[1]: ROUTE_FILTERED}


def _may_read(config: ModelConfig, layer: LayerSpec, routes: Tensor) -> Tensor:
    """[B, T] bool: may the answer at this position read this layer's compressed entries (see tasks.py)."""
    if layer.ratio == 2:
        return (routes & 1) > 0
    owner = config.layers[layer.index_owner] if layer.index_owner is not None else layer
    return (routes & 2) > 0 if owner.applies_candidates else (routes & ROUTE_ANY) == ROUTE_ANY
