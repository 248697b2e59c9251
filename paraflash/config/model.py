"""The model as a value: a released `config.json` becomes a `ModelConfig` whose layers have explicit roles.

The released file nests the text fields under `text_config` and keeps `quantization_config` and the token ids at the
top. What a layer *does* is spread over five lists there (`compress_ratios`, `kv_source_layer_ids`, ...); here it is
one `LayerSpec` per layer, so that nothing downstream has to look a role up again (model.md 1.3).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paraflash.config.fields import ConfigError, Fields


@dataclass(frozen=True)
class LayerSpec:
    """What one layer owns and whose state it reads.

    ratio 0 sees only the sliding window; ratio 1 and 2 also see compressed entries of `kv_owner`.
    """

    index: int
    ratio: int
    owns_kv: bool
    kv_owner: int | None  # layer whose compressed KV (and index keys) this layer reads
    owns_index: bool
    index_owner: int | None  # layer whose top-k set this layer reads
    publishes_candidates: bool
    applies_candidates: bool
    engram: int | None  # ordinal among the Engram layers, or None


@dataclass(frozen=True)
class RopeSpec:
    """One rotary frequency rule; `factor` 1 means plain theta (model.md 3.4)."""

    theta: float
    factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_positions: int = 0


@dataclass(frozen=True)
class QuantSpec:
    """How the checkpoint stores its linears (model.md 2.3): FP8 in blocks of 32x32 with a UE8M0 scale each."""

    fp4_experts: bool  # routed experts as packed e2m1 with a UE8M0 scale per 32 inputs


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    rms_eps: float
    swiglu_limit: float
    max_position_embeddings: int
    window: int
    moe_intermediate_size: int
    num_experts: int
    experts_per_token: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    gate_temp: float
    index_heads: int
    index_head_dim: int
    index_topk: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layers: tuple[int, ...]
    engram_rows: tuple[int, ...]
    engram_vocab_size: int
    engram_max_ngram: int
    engram_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    window_rope: RopeSpec  # layers of ratio 0
    compress_rope: RopeSpec  # layers of ratio 1 and 2
    layers: tuple[LayerSpec, ...]
    quant: QuantSpec | None
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    dtype: str

    @property
    def kv_owners(self) -> tuple[LayerSpec, ...]:
        """Layers that write compressed KV and index keys, in order."""
        return tuple(layer for layer in self.layers if layer.owns_kv)

    @property
    def last_kv_owner(self) -> int:
        """Index of the last layer that owns compressed KV; -1 if none does."""
        return max((layer.index for layer in self.kv_owners), default=-1)

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.o_groups

    @property
    def engram_columns(self) -> int:
        """Hash columns (table rows read) per token and Engram layer."""
        return (self.engram_max_ngram - 1) * self.engram_heads


def _owner(sources: list[int], layer: int) -> int | None:
    """The largest source id that is not after `layer` (model.md 1.3)."""
    return max((s for s in sources if s <= layer), default=None)


def _check_sources(name: str, sources: list[int], ratios: list[int]) -> None:
    if sources != sorted(set(sources)):
        raise ConfigError(f"text_config.{name} is {sources}; the ids must ascend without repeats")
    for s in sources:
        if not 0 <= s < len(ratios) or ratios[s] == 0:
            raise ConfigError(f"text_config.{name} names layer {s}, which is no layer with compress ratio 1 or 2")


def _layer_specs(text: Fields, num_layers: int, engram_layers: list[int]) -> tuple[LayerSpec, ...]:
    ratios = text.integers("compress_ratios")
    if len(ratios) < num_layers:
        raise ConfigError(f"text_config.compress_ratios has {len(ratios)} entries for {num_layers} layers")
    ratios = ratios[:num_layers]  # entries past the backbone belong to the draft head
    if any(r not in (0, 1, 2) for r in ratios):
        raise ConfigError(f"text_config.compress_ratios is {ratios}; each entry must be 0, 1 or 2")
    kv_sources, index_sources = text.integers("kv_source_layer_ids"), text.integers("index_source_layer_ids")
    _check_sources("kv_source_layer_ids", kv_sources, ratios)
    _check_sources("index_source_layer_ids", index_sources, ratios)
    candidate = text.get("candidate_source_layer_id", -1)
    if isinstance(candidate, bool) or not isinstance(candidate, int):
        raise ConfigError(f"text_config.candidate_source_layer_id is {candidate!r}; an integer is needed")
    if candidate >= 0 and candidate not in index_sources:
        raise ConfigError(
            f"text_config.candidate_source_layer_id is {candidate}, which is not in index_source_layer_ids"
        )

    specs = []
    for i, ratio in enumerate(ratios):
        kv_owner = _owner(kv_sources, i) if ratio else None
        index_owner = _owner(index_sources, i) if ratio else None
        if ratio and (kv_owner is None or index_owner is None):
            raise ConfigError(
                f"text_config.kv_source_layer_ids and index_source_layer_ids leave layer {i} without a source"
            )
        if kv_owner is not None and index_owner is not None:
            if ratios[kv_owner] != ratio:
                raise ConfigError(
                    f"text_config.compress_ratios: layer {i} has ratio {ratio} but reads layer {kv_owner} "
                    f"of ratio {ratios[kv_owner]}"
                )
            if index_owner < kv_owner:
                raise ConfigError(
                    f"text_config.index_source_layer_ids: layer {i} would use layer {index_owner}'s choice "
                    f"over layer {kv_owner}'s KV"
                )
        applies = candidate >= 0 and i > candidate and i in index_sources and kv_owner == _owner(kv_sources, candidate)
        specs.append(
            LayerSpec(
                index=i,
                ratio=ratio,
                owns_kv=i in kv_sources,
                kv_owner=kv_owner,
                owns_index=i in index_sources,
                index_owner=index_owner,
                publishes_candidates=i == candidate,
                applies_candidates=applies,
                engram=engram_layers.index(i) if i in engram_layers else None,
            )
        )
    return tuple(specs)


def _eos_tokens(text: Fields, vocab_size: int) -> tuple[int, ...]:
    """One id or a list of them."""
    if not isinstance(text.data.get("eos_token_id"), list):
        return (text.token("eos_token_id", 1, vocab_size),)
    ids = text.integers("eos_token_id")
    if any(not 0 <= i < vocab_size for i in ids):
        raise ConfigError(f"{text.where}.eos_token_id is {ids}; ids below vocab_size {vocab_size} are needed")
    return tuple(ids)


def _quant_spec(data: dict[str, Any]) -> QuantSpec | None:
    raw = data.get("quantization_config")
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise ConfigError(f"quantization_config is {raw!r}; an object is needed")
    q = Fields(raw, "quantization_config")
    q.only("quant_method", ("fp8",))
    q.only("scale_fmt", ("ue8m0",), "ue8m0")
    block = q.integers("weight_block_size")
    if block != [32, 32]:
        raise ConfigError(f"quantization_config.weight_block_size is {block}; this model uses [32, 32]")
    return QuantSpec(fp4_experts=q.only("expert_dtype", ("fp4", "fp8"), "fp4") == "fp4")


def _compress_rope(text: Fields) -> RopeSpec:
    theta = text.number("compress_rope_theta", above=1)
    raw = text.data.get("rope_scaling")
    if raw is None:
        return RopeSpec(theta)
    if not isinstance(raw, dict):
        raise ConfigError(f"text_config.rope_scaling is {raw!r}; an object is needed")
    # Some copies spell the key "type".
    scaling = Fields({**raw, "rope_type": raw.get("rope_type", raw.get("type"))}, "text_config.rope_scaling")
    scaling.only("rope_type", ("yarn",))
    return RopeSpec(
        theta=theta,
        factor=scaling.number("factor", above=0),
        beta_fast=scaling.number("beta_fast", 32.0, above=0),
        beta_slow=scaling.number("beta_slow", 1.0, above=0),
        original_positions=scaling.integer("original_max_position_embeddings", low=1),
    )


def parse_config(data: dict[str, Any]) -> ModelConfig:
    """Turns a decoded config.json into a `ModelConfig`; raises `ConfigError` naming the first bad field."""
    if not isinstance(data, dict):
        raise ConfigError("config.json must hold one JSON object")
    top = Fields(data, "config.json")
    top.only("model_type", ("deepseek_v41", "deepseek_v41_text"))
    if "text_config" in data and not isinstance(data["text_config"], dict):
        raise ConfigError("config.json.text_config must be an object")
    # Token ids and dtype stand at the top in the release; a flattened file has everything there.
    merged = {
        **data.get("text_config", {}),
        **{k: v for k, v in data.items() if k not in ("text_config", "model_type")},
    }
    text = Fields(merged, "text_config")

    num_layers = text.integer("num_hidden_layers", low=1)
    engram_layers = text.integers("engram_layer_ids", [])
    engram_rows = text.integers("engram_num_embeddings", [])
    if len(engram_rows) != len(engram_layers):
        raise ConfigError(
            f"text_config.engram_num_embeddings has {len(engram_rows)} entries for "
            f"{len(engram_layers)} engram_layer_ids"
        )
    if engram_layers != sorted(set(engram_layers)) or any(not 0 <= i < num_layers for i in engram_layers):
        raise ConfigError(
            f"text_config.engram_layer_ids is {engram_layers}; ascending layer ids below {num_layers} are needed"
        )
    text.only("hidden_act", ("silu",), "silu")
    text.only("scoring_func", ("sqrtsoftplus",), "sqrtsoftplus")
    text.only("topk_method", ("noaux_tc",), "noaux_tc")
    text.only("num_key_value_heads", (1,), 1)
    text.only("attention_bias", (False,), False)
    text.only("tie_word_embeddings", (False,), False)
    text.only("n_shared_experts", (1,), 1)
    vocab_size = text.integer("vocab_size", low=1)
    num_heads, o_groups = text.integer("num_attention_heads", low=1), text.integer("o_groups", low=1)
    head_dim, rope_dim = text.integer("head_dim", low=2), text.integer("qk_rope_head_dim", low=2)
    if num_heads % o_groups:
        raise ConfigError(f"text_config.o_groups is {o_groups}, which does not divide num_attention_heads {num_heads}")
    if rope_dim % 2 or rope_dim > head_dim:
        raise ConfigError(
            f"text_config.qk_rope_head_dim is {rope_dim}; an even number of at most head_dim {head_dim} is needed"
        )
    num_experts, per_token = text.integer("n_routed_experts", low=1), text.integer("num_experts_per_tok", low=1)
    if per_token > num_experts:
        raise ConfigError(f"text_config.num_experts_per_tok is {per_token}, more than n_routed_experts {num_experts}")

    layers = _layer_specs(text, num_layers, engram_layers)
    # Sizes of what no layer has need not be given.
    no_engram, no_candidates = not engram_layers, not any(layer.publishes_candidates for layer in layers)

    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=text.integer("hidden_size", low=1),
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_lora_rank=text.integer("q_lora_rank", low=1),
        o_groups=o_groups,
        o_lora_rank=text.integer("o_lora_rank", low=1),
        rms_eps=text.number("rms_norm_eps"),
        swiglu_limit=text.number("swiglu_limit", above=0),
        max_position_embeddings=text.integer("max_position_embeddings", low=1),
        window=text.integer("sliding_window", low=1),
        moe_intermediate_size=text.integer("moe_intermediate_size", low=1),
        num_experts=num_experts,
        experts_per_token=per_token,
        routed_scaling_factor=text.number("routed_scaling_factor"),
        norm_topk_prob=text.flag("norm_topk_prob", True),
        gate_temp=text.number("gate_temp", 1.0, above=0),
        index_heads=text.integer("index_n_heads", low=1),
        index_head_dim=text.integer("index_head_dim", low=rope_dim),
        index_topk=text.integer("index_topk", low=1),
        candidate_topk_blocks=text.integer("candidate_topk_blocks", 1 if no_candidates else None, low=1),
        candidate_block_size=text.integer("candidate_block_size", 1 if no_candidates else None, low=1),
        hc_mult=text.integer("hc_mult", low=1),
        hc_sinkhorn_iters=text.integer("hc_sinkhorn_iters", low=1),
        hc_eps=text.number("hc_eps"),
        engram_layers=tuple(engram_layers),
        engram_rows=tuple(engram_rows),
        engram_vocab_size=text.integer("engram_vocab_size", 2 if no_engram else None, low=2),
        engram_max_ngram=text.integer("engram_max_ngram_size", 2 if no_engram else None, low=2),
        engram_heads=text.integer("engram_n_heads", 1 if no_engram else None, low=1),
        engram_head_dim=text.integer("engram_head_dim", 1 if no_engram else None, low=1),
        engram_pad_token_id=text.token("engram_pad_token_id", 2, vocab_size),
        engram_compressed_vocab_size=text.integer("engram_compressed_vocab_size", 1 if no_engram else None, low=1),
        window_rope=RopeSpec(text.number("rope_theta", above=1)),
        compress_rope=_compress_rope(text),
        layers=layers,
        quant=_quant_spec(data),
        bos_token_id=text.token("bos_token_id", 0, vocab_size),
        eos_token_ids=_eos_tokens(text, vocab_size),
        pad_token_id=text.token("pad_token_id", 2, vocab_size),
        dtype=text.only("dtype", ("bfloat16", "float32"), merged.get("torch_dtype", "bfloat16")),
    )


def load_raw_config(folder: str | Path, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """Reads `folder/config.json`; `overrides` (from --hf-overrides) are merged in, objects key by key."""
    path = Path(folder) / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path} does not exist; a model is a local folder that has one") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold one JSON object")
    if not isinstance(overrides, (dict, type(None))):
        raise ConfigError(f"hf_overrides is {overrides!r}; an object is needed")
    overrides = dict(overrides or {})
    if "text_config" not in data and isinstance(overrides.get("text_config"), dict):  # a flattened file
        overrides |= overrides.pop("text_config")
    return _merge(data, overrides)


def _merge(base: Any, extra: Any) -> Any:
    if isinstance(base, dict) and isinstance(extra, dict):
        return {**base, **{k: _merge(base.get(k), v) for k, v in extra.items()}}
    return extra


def load_config(folder: str | Path, overrides: dict[str, Any] | None = None) -> ModelConfig:
    """Reads and checks `folder/config.json`. Raises `ConfigError`."""
    return parse_config(load_raw_config(folder, overrides))
