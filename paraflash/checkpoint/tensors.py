"""The one table of text tensors: name, shape, stored dtype, scale, and how each is shared out (model.md 2.1).

The loader, the synthetic writer, dummy weights, `checkpoint inspect` and the docs all read it. Shapes are [out, in] and
count values, not bytes: a packed FP4 tensor [O, K] is stored as int8 [O, K/2].
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paraflash.config.model import ConfigError, LayerSpec, ModelConfig

BLOCK = 32  # values that share one UE8M0 scale, along a row; FP8 weights also share it over 32 rows
SKIPPED = re.compile(r"(vision|aligner|mtp)\.|image_(start|end|newline)$")  # not part of the text model (model.md 2.2)

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Split:
    """How a tensor is split.

    replicate: every rank holds it. rows, cols: over TP in whole units of `unit` rows or columns (a head, an output
    group, one row). expert: whole, on the rank that owns the expert. engram: stays in its file, mapped into memory.
    """

    kind: str
    unit: int = 1
    by: str = ""  # what a unit is, for people
    experts: int = 0  # kind expert: routed experts of the layer

    def __str__(self) -> str:
        return {"rows": f"rows by {self.by}", "cols": f"columns by {self.by}"}.get(self.kind, self.kind)


@dataclass(frozen=True)
class Shard:
    """The part of a model that a rank holds: tensors are split over TP, whole experts go to all ranks (EP)."""

    rank: int = 0  # pcp_rank * tp_size + tp_rank
    tp_size: int = 1
    world: int = 1

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    def experts(self, total: int) -> tuple[int, int]:
        """[first, end) of a layer's routed experts: counts differ by at most one, rank 0 has the most."""
        base, extra = divmod(total, self.world)
        first = self.rank * base + min(self.rank, extra)
        return first, first + base + (self.rank < extra)


REPLICATE, ENGRAM = Split("replicate"), Split("engram")


@dataclass(frozen=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]  # logical: values
    dtype: str  # bf16, f32, fp8 (e4m3, 32x32 scales), fp4 (packed e2m1, 1x32 scales), engram (e4m3, 1x32 scales)
    split: Split = REPLICATE
    layer: int | None = None
    expert: int | None = None
    optional: bool = False  # may be absent; text generation never reads it
    grouped: bool = False  # multiplied group by group, not as one linear

    @property
    def scale_name(self) -> str | None:
        return self.name.removesuffix("weight") + "scale" if self.dtype in ("fp8", "fp4", "engram") else None

    @property
    def scale_shape(self) -> tuple[int, ...]:
        if self.dtype == "fp8":
            return (-(-self.shape[0] // BLOCK), -(-self.shape[1] // BLOCK))
        return (self.shape[0], self.shape[1] // BLOCK) if self.scale_name else ()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        return (self.shape[0], self.shape[1] // 2) if self.dtype == "fp4" else self.shape

    @property
    def stored_dtype(self) -> str:
        """safetensors' name of the stored dtype."""
        return {"bf16": "BF16", "f32": "F32", "fp8": "F8_E4M3", "fp4": "I8", "engram": "F8_E4M3"}[self.dtype]

    @property
    def stack(self) -> str | None:
        """For an expert's tensor: the key under which a rank's experts are stacked, else None."""
        if self.expert is None:
            return None
        return f"layers.{self.layer}.ffn.experts.{self.name.split('.')[-2]}"


def tensor_table(model: ModelConfig) -> list[TensorSpec]:
    """Every text tensor of the checkpoint, in model order.

    Without `model.quant` the linears and Engram tables are BF16 and have no scale. Raises ConfigError where a size
    cannot be stored in the format that the config asks for.
    """
    quant = model.quant
    fp8 = "fp8" if quant else "bf16"
    specs = [TensorSpec("embed.weight", (model.vocab_size, model.hidden_size), "bf16", Split("rows", 1, "token"))]
    for layer in model.layers:
        specs += _layer_tensors(model, layer, fp8)
    specs.append(TensorSpec("norm.weight", (model.hidden_size,), "bf16"))
    specs.append(TensorSpec("head.weight", (model.vocab_size, model.hidden_size), "bf16", Split("rows", 1, "token")))
    for spec in specs:
        if spec.dtype in ("fp4", "engram") and spec.shape[1] % BLOCK:
            raise ConfigError(
                f"{spec.name} has rows of {spec.shape[1]} values; stored as {spec.dtype} it needs a multiple of {BLOCK}"
            )
    return specs


def _layer_tensors(model: ModelConfig, layer: LayerSpec, fp8: str) -> list[TensorSpec]:
    at, hidden = layer.index, model.hidden_size
    prefix = f"layers.{at}."
    specs: list[TensorSpec] = []

    def add(name: str, shape: tuple[int, ...], dtype: str = "bf16", split: Split = REPLICATE, **more: bool) -> None:
        specs.append(TensorSpec(prefix + name, shape, dtype, split, at, **more))

    if layer.engram is not None:
        rows, width = model.engram_rows[layer.engram], model.engram_head_dim
        add("engram.embed.weight", (rows, width), "engram" if model.quant else "bf16", ENGRAM)
        add("engram.wkv.weight", ((model.hc_mult + 1) * hidden, model.engram_columns * width), fp8)
        add("engram.q_weight", (model.hc_mult, hidden))
        add("engram.k_weight", (model.hc_mult, hidden))

    mixes = model.hc_mult * (2 + model.hc_mult)
    for site in ("attn", "ffn"):
        add(f"hc_{site}_fn", (mixes, model.hc_mult * hidden), "f32")
        add(f"hc_{site}_base", (mixes,), "f32")
        add(f"hc_{site}_scale", (3,), "f32")

    # Heads are split by whole output groups, so that wq_b, the sinks and wo_a of a rank always belong together.
    group_width = model.heads_per_group * model.head_dim
    groups, rank = model.o_groups, model.o_lora_rank
    by_heads, by_group = "group of heads", "group"
    add("attn_norm.weight", (hidden,))
    add("attn.wq_a.weight", (model.q_lora_rank, hidden), fp8)
    add("attn.q_norm.weight", (model.q_lora_rank,))
    add("attn.wq_b.weight", (groups * group_width, model.q_lora_rank), fp8, Split("rows", group_width, by_heads))
    add("attn.wkv.weight", (model.head_dim, hidden), fp8)
    add("attn.kv_norm.weight", (model.head_dim,))
    add("attn.attn_sink", (model.num_heads,), "f32", Split("rows", model.heads_per_group, by_heads))
    add("attn.wo_a.weight", (groups * rank, group_width), fp8, Split("rows", rank, by_group), grouped=True)
    add("attn.wo_b.weight", (hidden, groups * rank), fp8, Split("cols", rank, by_group))
    if layer.owns_kv:
        add("attn.compressor.wkv.weight", (model.head_dim, hidden))
        if layer.ratio == 2:
            add("attn.compressor.wgate.weight", (model.head_dim, hidden))
        add("attn.compressor.norm.weight", (model.head_dim,))
    if layer.owns_index:
        add("attn.indexer.wq_b.weight", (model.index_heads * model.index_head_dim, model.q_lora_rank), fp8)
        add("attn.indexer.weights_proj.weight", (model.index_heads, hidden))
    if layer.owns_kv:
        add("attn.indexer.wk.weight", (model.index_head_dim, model.head_dim))
        add("attn.indexer.k_norm.weight", (model.index_head_dim,))

    inner = model.moe_intermediate_size
    add("ffn_norm.weight", (hidden,))
    add("ffn.gate.weight", (model.num_experts, hidden))
    add("ffn.gate.bias", (model.num_experts,), "f32")
    add("ffn.gate.bias_vl", (model.num_experts,), "f32", optional=True)
    add("ffn.shared_experts.w1.weight", (inner, hidden), fp8, Split("rows", 1, "channel"))
    add("ffn.shared_experts.w3.weight", (inner, hidden), fp8, Split("rows", 1, "channel"))
    add("ffn.shared_experts.w2.weight", (hidden, inner), fp8, Split("cols", 1, "channel"))
    whole_expert = Split("expert", experts=model.num_experts)
    expert_dtype = "fp4" if model.quant and model.quant.fp4_experts else fp8
    for expert in range(model.num_experts):
        for name, shape in (("w1", (inner, hidden)), ("w3", (inner, hidden)), ("w2", (hidden, inner))):
            full = f"{prefix}ffn.experts.{expert}.{name}.weight"
            specs.append(TensorSpec(full, shape, expert_dtype, whole_expert, at, expert))
    return specs


def split_range(total: int, rank: int, size: int) -> tuple[int, int]:
    """[start, end) of `rank` when `total` units are cut into `size` runs of ceil(total / size)."""
    step = -(-total // size)
    return min(rank * step, total), min((rank + 1) * step, total)


def shard_slices(spec: TensorSpec, shard: Shard) -> Slices | None:
    """The part of a tensor that a rank holds, in values; None for another rank's expert and for Engram tables."""
    whole = tuple(slice(0, n) for n in spec.shape)
    if spec.split.kind == "engram":
        return None
    if spec.split.kind == "expert":
        first, end = shard.experts(spec.split.experts)
        return whole if spec.expert is not None and first <= spec.expert < end else None
    if spec.split.kind == "replicate":
        return whole
    dim = 0 if spec.split.kind == "rows" else 1
    start, end = split_range(spec.shape[dim] // spec.split.unit, shard.tp_rank, shard.tp_size)
    part = slice(start * spec.split.unit, end * spec.split.unit)
    return (*whole[:dim], part, *whole[dim + 1 :])
