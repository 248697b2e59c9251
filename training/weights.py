"""Names, shapes, stored formats and first values of the stacked parameters, and their way to and from checkpoint names.

A parameter is stacked over the layers that own it: all layers, KV owners, index sources or Engram layers. The
checkpoint's own table (paraflash.checkpoint.tensors) stays the judge of names and shapes when a checkpoint is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paraflash.config.model import ModelConfig

# parameter -> (stack, checkpoint name after "layers.N.", format, is a matrix operand)
_TABLE: dict[str, tuple[str, str, str, bool]] = {
    "attn_norm": ("all", "attn_norm.weight", "bf16", False),
    "ffn_norm": ("all", "ffn_norm.weight", "bf16", False),
    "attn.wq_a": ("all", "attn.wq_a.weight", "fp8", True),
    "attn.q_norm": ("all", "attn.q_norm.weight", "bf16", False),
    "attn.wq_b": ("all", "attn.wq_b.weight", "fp8", True),
    "attn.wkv": ("all", "attn.wkv.weight", "fp8", True),
    "attn.kv_norm": ("all", "attn.kv_norm.weight", "bf16", False),
    "attn.sink": ("all", "attn.attn_sink", "f32", False),
    "attn.wo_a": ("all", "attn.wo_a.weight", "fp8", True),
    "attn.wo_b": ("all", "attn.wo_b.weight", "fp8", True),
    "hc_attn_fn": ("all", "hc_attn_fn", "f32", False),
    "hc_attn_base": ("all", "hc_attn_base", "f32", False),
    "hc_attn_scale": ("all", "hc_attn_scale", "f32", False),
    "hc_ffn_fn": ("all", "hc_ffn_fn", "f32", False),
    "hc_ffn_base": ("all", "hc_ffn_base", "f32", False),
    "hc_ffn_scale": ("all", "hc_ffn_scale", "f32", False),
    "ffn.gate": ("all", "ffn.gate.weight", "bf16", False),
    "ffn.gate_bias": ("all", "ffn.gate.bias", "f32", False),
    "ffn.w1": ("all", "ffn.experts.*.w1.weight", "fp4", True),
    "ffn.w3": ("all", "ffn.experts.*.w3.weight", "fp4", True),
    "ffn.w2": ("all", "ffn.experts.*.w2.weight", "fp4", True),
    "ffn.shared_w1": ("all", "ffn.shared_experts.w1.weight", "fp8", True),
    "ffn.shared_w3": ("all", "ffn.shared_experts.w3.weight", "fp8", True),
    "ffn.shared_w2": ("all", "ffn.shared_experts.w2.weight", "fp8", True),
    "compressor.wkv": ("owners", "attn.compressor.wkv.weight", "bf16", True),
    "compressor.wgate": ("pairs", "attn.compressor.wgate.weight", "bf16", True),
    "compressor.norm": ("owners", "attn.compressor.norm.weight", "bf16", False),
    "indexer.wk": ("owners", "attn.indexer.wk.weight", "bf16", True),
    "indexer.k_norm": ("owners", "attn.indexer.k_norm.weight", "bf16", False),
    "indexer.wq_b": ("indexers", "attn.indexer.wq_b.weight", "fp8", True),
    "indexer.weights_proj": ("indexers", "attn.indexer.weights_proj.weight", "bf16", True),
    "engram.wkv": ("engrams", "engram.wkv.weight", "fp8", True),
    "engram.q_weight": ("engrams", "engram.q_weight", "bf16", False),
    "engram.k_weight": ("engrams", "engram.k_weight", "bf16", False),
}
_TOP = {"embed": ("embed.weight", True), "head": ("head.weight", True), "norm": ("norm.weight", False)}


def stored_as(name: str) -> tuple[str, bool]:
    """Stored format (fp8, fp4, engram, bf16, f32) of a parameter and whether it is an operand of a matrix product."""
    if name.startswith("engram.embed."):
        return "engram", True
    return _TABLE[name][2:] if name in _TABLE else ("bf16", _TOP[name][1])


def rows_of(config: ModelConfig, name: str) -> tuple[int, ...]:
    """The layers a parameter is stacked over; empty for one that is not stacked."""
    if name not in _TABLE:
        return ()
    chosen = {
        "all": lambda s: True,
        "owners": lambda s: s.owns_kv,
        "pairs": lambda s: s.owns_kv and s.ratio == 2,
        "indexers": lambda s: s.owns_index,
        "engrams": lambda s: s.engram is not None,
    }[_TABLE[name][0]]
    return tuple(s.index for s in config.layers if chosen(s))


def parameter_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter and its shape, stacks first."""
    hidden, dim, k = c.hidden_size, c.head_dim, c.hc_mult
    mixes, inner, experts = k * (2 + k), c.moe_intermediate_size, c.num_experts
    width = c.num_heads * dim
    one = {
        "attn_norm": (hidden,),
        "ffn_norm": (hidden,),
        "attn.wq_a": (c.q_lora_rank, hidden),
        "attn.q_norm": (c.q_lora_rank,),
        "attn.wq_b": (width, c.q_lora_rank),
        "attn.wkv": (dim, hidden),
        "attn.kv_norm": (dim,),
        "attn.sink": (c.num_heads,),
        "attn.wo_a": (c.o_groups * c.o_lora_rank, width // c.o_groups),
        "attn.wo_b": (hidden, c.o_groups * c.o_lora_rank),
        "hc_attn_fn": (mixes, k * hidden),
        "hc_attn_base": (mixes,),
        "hc_attn_scale": (3,),
        "hc_ffn_fn": (mixes, k * hidden),
        "hc_ffn_base": (mixes,),
        "hc_ffn_scale": (3,),
        "ffn.gate": (experts, hidden),
        "ffn.gate_bias": (experts,),
        "ffn.w1": (experts, inner, hidden),
        "ffn.w3": (experts, inner, hidden),
        "ffn.w2": (experts, hidden, inner),
        "ffn.shared_w1": (inner, hidden),
        "ffn.shared_w3": (inner, hidden),
        "ffn.shared_w2": (hidden, inner),
        "compressor.wkv": (dim, hidden),
        "compressor.wgate": (dim, hidden),
        "compressor.norm": (dim,),
        "indexer.wk": (c.index_head_dim, dim),
        "indexer.k_norm": (c.index_head_dim,),
        "indexer.wq_b": (c.index_heads * c.index_head_dim, c.q_lora_rank),
        "indexer.weights_proj": (c.index_heads, hidden),
        "engram.wkv": ((k + 1) * hidden, c.engram_columns * c.engram_head_dim),
        "engram.q_weight": (k, hidden),
        "engram.k_weight": (k, hidden),
    }
    out: dict[str, tuple[int, ...]] = {}
    for name, shape in one.items():
        if rows := rows_of(c, name):
            out[name] = (len(rows), *shape)
    for number, rows_in_table in enumerate(c.engram_rows):
        out[f"engram.embed.{number}"] = (rows_in_table, c.engram_head_dim)
    return {**out, "embed": (c.vocab_size, hidden), "head": (c.vocab_size, hidden), "norm": (hidden,)}


def initial(c: ModelConfig, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """First values: norms one, matrices of unit gain, hyper-connections close to a plain residual stream."""
    short = name.rsplit(".", 1)[-1]
    if short in ("norm", "attn_norm", "ffn_norm", "q_norm", "kv_norm", "k_norm", "q_weight", "k_weight"):
        return torch.ones(shape)
    if short in ("sink", "gate_bias"):
        return torch.zeros(shape)
    if short.endswith("_scale"):
        return torch.full(shape, 0.1)
    if short.endswith("_base"):
        return _hyper_base(c, short, shape)
    if short == "head":
        return torch.randn(shape, generator=generator) * 0.3 * shape[-1] ** -0.5
    if short == "embed" or name.startswith("engram.embed"):
        return torch.randn(shape, generator=generator) * (1.0 if short == "embed" else 0.3)
    gain = {"wo_b": 0.3, "w2": 0.3, "shared_w2": 0.3, "wkv": 0.3 if name == "engram.wkv" else 1.0}.get(short, 1.0)
    return torch.randn(shape, generator=generator) * gain * shape[-1] ** -0.5


def _hyper_base(c: ModelConfig, short: str, shape: tuple[int, ...]) -> Tensor:
    """pre favours one stream in turn, post writes to all alike, comb keeps each stream."""
    k = c.hc_mult
    base = torch.zeros(shape)
    for layer in range(shape[0]):
        favoured = (2 * layer + (short == "hc_ffn_base")) % k
        base[layer, :k] = -1.5
        base[layer, favoured] = 1.5
        base[layer, 2 * k :] = (torch.eye(k) * 4 - 2).flatten()
    return base


def to_checkpoint(c: ModelConfig, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Checkpoint name -> fp32 values, one entry a layer and expert."""
    out: dict[str, Tensor] = {}
    for name, value in parameters.items():
        value = value.detach().float().cpu()
        for place, layer in enumerate(rows_of(c, name)):
            stored = f"layers.{layer}.{_TABLE[name][1]}"
            if "*" in stored:
                out.update({stored.replace("*", str(e)): value[place, e] for e in range(c.num_experts)})
            else:
                out[stored] = value[place]
            if name == "ffn.gate_bias":
                out[f"layers.{layer}.ffn.gate.bias_vl"] = value[place]
        if name.startswith("engram.embed."):
            out[f"layers.{c.engram_layers[int(name.rsplit('.', 1)[1])]}.engram.embed.weight"] = value
        elif name in _TOP:
            out[_TOP[name][0]] = value
    return out


def from_checkpoint(c: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_checkpoint`: dequantised tensors by checkpoint name -> stacked parameters."""
    out: dict[str, Tensor] = {}
    for name in parameter_shapes(c):
        if name.startswith("engram.embed."):
            out[name] = tensors[f"layers.{c.engram_layers[int(name.rsplit('.', 1)[1])]}.engram.embed.weight"].float()
        elif name in _TOP:
            out[name] = tensors[_TOP[name][0]].float()
        else:
            stored = [f"layers.{layer}.{_TABLE[name][1]}" for layer in rows_of(c, name)]
            if "*" in stored[0]:
                each = [torch.stack([tensors[s.replace("*", str(e))] for e in range(c.num_experts)]) for s in stored]
            else:
                each = [tensors[s] for s in stored]
            out[name] = torch.stack(each).float()
    return out
