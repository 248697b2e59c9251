"""A small random checkpoint in exactly the released format: config, tokenizer, quantised shards and their index.

It has every kind of layer of the real model and the names that a text engine must skip, and is the same for the same
preset, overrides, seed and shard count.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paraflash.checkpoint.random_weights import deviates, random_tensor, tensor_seed
from paraflash.checkpoint.tensors import tensor_table
from paraflash.checkpoint.tokenizer import IMAGE, build_tokenizer, save_tokenizer
from paraflash.checkpoint.writer import write_checkpoint
from paraflash.config.model import ConfigError, ModelConfig, parse_config
from paraflash.model.engram_hash import table_rows, token_map

_DRAFT_LAYERS = 3

_RELEASED: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 0,  # filled from the tokenizer
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "deepseek_v41_text",
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_max_ngram_size": 4,
        "engram_pad_token_id": 2,
        "num_nextn_predict_layers": _DRAFT_LAYERS,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 2,
        "dspark_markov_rank": 16,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "vision_config": {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 64,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
}


def _yarn(factor: int, original: int) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": original,
    }


PRESETS: dict[str, dict[str, Any]] = {
    # Every kind of layer, in seconds on one core.
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_groups": 4,
        "o_lora_rank": 32,
        "swiglu_limit": 1.5,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 8192,
        "rope_scaling": _yarn(16, 512),
        "sliding_window": 16,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1],
        "kv_source_layer_ids": [2, 4, 5],
        "index_source_layer_ids": [2, 4, 5, 7],
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 8,
        "candidate_block_size": 4,
        "index_n_heads": 8,
        "index_head_dim": 64,
        "index_topk": 16,
        "engram_layer_ids": [1, 4],
        "engram_n_heads": 4,
        "engram_head_dim": 64,
        "engram_vocab_size": 101,
    },
    # Wider and longer, still quick on a CPU; Engram rows with 8 scales as released.
    "small": {
        "vocab_size": 512,
        "hidden_size": 256,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "head_dim": 128,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 128,
        "o_groups": 8,
        "o_lora_rank": 64,
        "swiglu_limit": 10.0,
        "moe_intermediate_size": 128,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 65536,
        "rope_scaling": _yarn(16, 4096),
        "sliding_window": 128,
        "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1],
        "kv_source_layer_ids": [2, 4, 6],
        "index_source_layer_ids": [2, 4, 6, 8, 10],
        "candidate_source_layer_id": 6,
        "candidate_topk_blocks": 32,
        "candidate_block_size": 8,
        "index_n_heads": 8,
        "index_head_dim": 64,
        "index_topk": 64,
        "engram_layer_ids": [1, 4],
        "engram_n_heads": 4,
        "engram_head_dim": 256,
        "engram_vocab_size": 499,
    },
    # The released head, index, window and top-k sizes, for kernels that are made for them.
    "wide512": {
        "vocab_size": 512,
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 256,
        "o_groups": 8,
        "o_lora_rank": 128,
        "swiglu_limit": 10.0,
        "moe_intermediate_size": 256,
        "n_routed_experts": 32,
        "num_experts_per_tok": 6,
        "max_position_embeddings": 1048576,
        "rope_scaling": _yarn(16, 65536),
        "sliding_window": 128,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1],
        "kv_source_layer_ids": [2, 4, 5],
        "index_source_layer_ids": [2, 4, 5, 7],
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "engram_layer_ids": [1, 4],
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_vocab_size": 2003,
    },
}


def synthetic_config(preset: str, overrides: dict[str, Any] | None = None, quantise: bool = True) -> dict[str, Any]:
    """A config.json in the released layout. `overrides` maps dotted paths (text_config.hidden_size) to values.

    Derived fields (draft entries of compress_ratios, draft target layers, Engram rows and classes) follow from the
    rest. Raises ConfigError naming the field that does not fit.
    """
    if preset not in PRESETS:
        raise ConfigError(f"preset is {preset!r}; paraflash has {', '.join(PRESETS)}")
    config = copy.deepcopy(_RELEASED)
    text = config["text_config"]
    text.update(copy.deepcopy(PRESETS[preset]))
    for path, value in (overrides or {}).items():
        _set(config, path, value)
    if not quantise:
        config.pop("quantization_config", None)
    if isinstance(text.get("compress_ratios"), list) and len(text["compress_ratios"]) == text.get("num_hidden_layers"):
        text["compress_ratios"] = text["compress_ratios"] + [0] * _DRAFT_LAYERS
    _fill_derived(config)
    return config


def _set(config: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        config = config.setdefault(key, {})
        if not isinstance(config, dict):
            raise ConfigError(f"{path} cannot be set: {key} is no object")
    config[last] = value


def _fill_derived(config: dict[str, Any]) -> None:
    """The fields that the tokenizer, the hash columns and the depth determine."""
    text = config["text_config"]
    layers = text.get("engram_layer_ids")
    rows = [1] * len(layers) if isinstance(layers, list) else []
    draft = {**text, "engram_num_embeddings": rows, "engram_compressed_vocab_size": 1}
    model = parse_config({**config, "text_config": draft})
    try:
        tokenizer = build_tokenizer(model.vocab_size)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    config["image_token_id"] = tokenizer.token_to_id(IMAGE)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "tokenizer.json"
        tokenizer.save(str(path))
        _, classes = token_map(path)
    text["engram_compressed_vocab_size"] = classes
    text["engram_num_embeddings"] = table_rows(replace(model, engram_compressed_vocab_size=classes)).tolist()
    text["dspark_target_layer_ids"] = list(range(model.num_layers))[-_DRAFT_LAYERS:]
    parse_config(config)


def _text_tensors(model: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    for spec in tensor_table(model):
        yield spec.name, random_tensor(spec, model, seed)


def _skipped_tensors(model: ModelConfig, seed: int) -> dict[str, Tensor]:
    """A few draft, vision and image tensors under the released names."""
    shapes = {
        "mtp.0.main_norm.weight": (model.hidden_size,),
        "mtp.0.attn_norm.weight": (model.hidden_size,),
        "mtp.2.norm.weight": (model.hidden_size,),
        "vision.patch_embed.weight": (32, 588),
        "aligner.w1.weight": (model.hidden_size, 32),
        "image_start": (model.hidden_size,),
        "image_end": (model.hidden_size,),
        "image_newline": (model.hidden_size,),
    }
    result = {}
    for name, shape in shapes.items():
        values = deviates(tensor_seed(seed, name), torch.arange(torch.Size(shape).numel()))
        result[name] = values.view(shape)
    return result


def write_synthetic(
    folder: str | Path, config: dict[str, Any], seed: int = 0, shards: int = 4, extra_tensors: bool = True
) -> None:
    """Writes the checkpoint of a `synthetic_config` into `folder`, replacing weights that are there."""
    folder = Path(folder)
    model = parse_config(config)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors"):
        old.unlink()
    save_tokenizer(folder, model.vocab_size)
    extra = _skipped_tensors(model, seed) if extra_tensors else None
    write_checkpoint(folder, config, _text_tensors(model, seed), shards, extra)
