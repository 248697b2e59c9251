"""The miniature's config.json, and a smaller setting of the same roles that learns on a CPU."""

from __future__ import annotations

from typing import Any


def raw_config(classes: int, vocab_size: int, small: bool = False) -> dict[str, Any]:
    """A released-layout config; `classes` and `vocab_size` come from the tokenizer, Engram rows from the primes."""
    from paraflash.config.model import parse_config
    from paraflash.model.engram_hash import table_rows

    text: dict[str, Any] = {
        "model_type": "deepseek_v41_text",
        "vocab_size": vocab_size,
        "hidden_size": 64 if small else 192,
        "num_hidden_layers": 9,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64 if small else 128,
        "qk_rope_head_dim": 16 if small else 32,
        "q_lora_rank": 64 if small else 128,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "max_position_embeddings": 8192,
        "sliding_window": 128,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1],
        "kv_source_layer_ids": [2, 4, 5],
        "index_source_layer_ids": [2, 4, 5, 7],
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 16,
        "candidate_block_size": 8,
        "index_n_heads": 4,
        "index_head_dim": 64 if small else 128,
        "index_topk": 64,
        "o_groups": 4,
        "o_lora_rank": 32 if small else 64,
        "moe_intermediate_size": 64 if small else 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "gate_temp": 1.0,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "topk_method": "noaux_tc",
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 4],
        "engram_vocab_size": 4001,
        "engram_max_ngram_size": 4,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": classes,
        "engram_num_embeddings": [1, 1],
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
    }
    raw: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
    }
    text["engram_num_embeddings"] = table_rows(parse_config(raw)).tolist()
    return raw
