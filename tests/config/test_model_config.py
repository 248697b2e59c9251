"""config.json -> ModelConfig: the released schedule, the spellings it comes in, and an error that names a bad field."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from paraflash.config import model as module
from paraflash.config.model import ConfigError, LayerSpec, RopeSpec, load_config, parse_config

RELEASED = json.loads((Path(__file__).parents[1] / "data" / "released_config.json").read_text())

INTEGERS = [
    "num_hidden_layers",
    "num_attention_heads",
    "o_groups",
    "head_dim",
    "qk_rope_head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
    "vocab_size",
    "hidden_size",
    "q_lora_rank",
    "o_lora_rank",
    "max_position_embeddings",
    "sliding_window",
    "moe_intermediate_size",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "candidate_topk_blocks",
    "candidate_block_size",
    "hc_mult",
    "hc_sinkhorn_iters",
    "engram_vocab_size",
    "engram_max_ngram_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_compressed_vocab_size",
]
NUMBERS = ["rms_norm_eps", "swiglu_limit", "routed_scaling_factor", "hc_eps", "rope_theta", "compress_rope_theta"]
LISTS = [
    "compress_ratios",
    "kv_source_layer_ids",
    "index_source_layer_ids",
    "engram_layer_ids",
    "engram_num_embeddings",
]
TOKENS = ["engram_pad_token_id", "bos_token_id", "eos_token_id", "pad_token_id"]
FIXED = {
    "hidden_act": "gelu",
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "num_key_value_heads": 2,
    "attention_bias": True,
    "tie_word_embeddings": True,
    "n_shared_experts": 2,
    "dtype": "float16",
    "norm_topk_prob": 1,
}
SCALING = {"rope_type": "linear", "factor": 0, "beta_fast": 0, "beta_slow": -1, "original_max_position_embeddings": 0}
QUANT = {"quant_method": "awq", "scale_fmt": "fp32", "weight_block_size": [128, 128], "expert_dtype": "int4"}
OPTIONAL = {"engram_layer_ids", "engram_num_embeddings"}


def released(path: str = "", value: Any = None, **text: Any) -> dict[str, Any]:
    """The released config with one field set by its dotted path (None: absent) or fields of text_config."""
    config = copy.deepcopy(RELEASED)
    config["text_config"].update(text)
    if path:
        *parents, name = path.split(".")
        holder = config
        for parent in parents:
            holder = holder[parent]
        holder.pop(name, None)
        if value is not None:
            holder[name] = value
    return config


def refuse(config: Any, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(config)
    assert all(word in str(caught.value) for word in words), caught.value


def expected_layer(i: int) -> LayerSpec:
    """Row i of the table in model.md 1.3, written as the table is."""
    owner = next((o for o in (20, 14, 8, 2) if i >= o), None)
    index = next((o for o in (36, 32, 28, 24, 20, 14, 8, 2) if i >= o), None)
    return LayerSpec(
        index=i,
        ratio=0 if i < 2 else 2 if i < 20 else 1,
        owns_kv=i in (2, 8, 14, 20),
        kv_owner=owner,
        owns_index=i in (2, 8, 14, 20, 24, 28, 32, 36),
        index_owner=index,
        publishes_candidates=i == 20,
        applies_candidates=i in (24, 28, 32, 36),
        engram={1: 0, 14: 1}.get(i),
    )


def test_the_released_config_has_the_published_schedule() -> None:
    model = parse_config(RELEASED)
    assert len(RELEASED["text_config"]["compress_ratios"]) == 43  # the last three belong to the draft head
    assert model.layers == tuple(expected_layer(i) for i in range(40))
    full = [layer.index for layer in model.layers if layer.owns_kv]
    reindex = [layer.index for layer in model.layers if layer.owns_index and not layer.owns_kv]
    assert (full, reindex) == ([2, 8, 14, 20], [24, 28, 32, 36])
    assert sum(layer.ratio > 0 and not layer.owns_index for layer in model.layers) == 30
    assert model.last_kv_owner == 20 and model.engram_columns == 24 and model.heads_per_group == 8


def test_the_released_sizes_and_rope_rules() -> None:
    model = parse_config(RELEASED)
    assert (model.hidden_size, model.num_heads, model.head_dim, model.rope_dim) == (5120, 64, 512, 64)
    assert (model.window, model.index_topk, model.rms_eps, model.hc_eps) == (128, 512, 1e-20, 1e-6)
    assert (model.num_experts, model.experts_per_token, model.routed_scaling_factor) == (384, 6, 1.5)
    assert model.window_rope == RopeSpec(10000.0)
    assert model.compress_rope == RopeSpec(160000.0, 16.0, 32.0, 1.0, 65536)
    assert model.quant is not None and model.quant.fp4_experts
    assert (model.bos_token_id, model.eos_token_ids, model.pad_token_id, model.dtype) == (0, (1,), 2, "bfloat16")


def test_a_router_temperature_is_1_where_the_field_is_absent() -> None:
    assert "gate_temp" not in RELEASED["text_config"]
    assert parse_config(RELEASED).gate_temp == 1.0
    assert parse_config(released(gate_temp=0.5)).gate_temp == 0.5


def test_a_flattened_config_is_the_same_model() -> None:
    flat = {**RELEASED["text_config"], **{k: v for k, v in RELEASED.items() if k not in ("text_config",)}}
    assert parse_config(flat) == parse_config(RELEASED)
    assert parse_config({**flat, "model_type": "deepseek_v41_text"}) == parse_config(RELEASED)


def test_fields_at_the_top_win_over_those_of_the_text_config() -> None:
    assert parse_config({**RELEASED, "sliding_window": 64}).window == 64
    assert parse_config(released(eos_token_id=7)).eos_token_ids == (1,)


def test_yarn_may_be_spelled_type() -> None:
    scaling = dict(RELEASED["text_config"]["rope_scaling"])
    scaling["type"] = scaling.pop("rope_type")
    assert parse_config(released(rope_scaling=scaling)) == parse_config(RELEASED)
    assert parse_config(released("text_config.rope_scaling")).compress_rope == RopeSpec(160000.0)


def test_draft_entries_of_the_ratios_may_be_absent() -> None:
    ratios = RELEASED["text_config"]["compress_ratios"]
    assert parse_config(released(compress_ratios=ratios[:40])) == parse_config(RELEASED)
    refuse(released(compress_ratios=ratios[:39]), "compress_ratios has 39 entries for 40 layers")


def test_several_end_of_sequence_tokens() -> None:
    assert parse_config(released("eos_token_id", [1, 5])).eos_token_ids == (1, 5)
    for bad in ([1, "2"], [1, 129280], [-1], [True], "1", 129280, -1, True):
        refuse(released("eos_token_id", bad), "eos_token_id is")


def test_without_a_candidate_source_its_sizes_may_be_absent() -> None:
    for source in (None, -1):
        config = released("text_config.candidate_source_layer_id", source)
        del config["text_config"]["candidate_topk_blocks"], config["text_config"]["candidate_block_size"]
        assert not any(s.publishes_candidates or s.applies_candidates for s in parse_config(config).layers)
    config["text_config"]["candidate_source_layer_id"] = 24
    refuse(config, "candidate_topk_blocks is missing")


def test_candidates_end_with_the_next_kv_owner() -> None:
    layers = parse_config(released(candidate_source_layer_id=8, index_source_layer_ids=[2, 8, 10, 14, 20, 24])).layers
    assert [s.index for s in layers if s.applies_candidates] == [10]


def test_without_engram_layers_its_sizes_may_be_absent() -> None:
    config = released()
    config["text_config"] = {k: v for k, v in config["text_config"].items() if not k.startswith("engram")}
    assert parse_config(config).engram_layers == ()


@pytest.mark.parametrize("name", INTEGERS)
def test_a_wrong_integer_is_named(name: str) -> None:
    for bad in (-1, 0, 1.5, "8", True, [8], math.nan):
        refuse(released(f"text_config.{name}", bad), f"text_config.{name} is {bad!r}")


@pytest.mark.parametrize("name", NUMBERS)
def test_a_wrong_number_is_named(name: str) -> None:
    for bad in (-1.0, "1", True, [1.0], math.nan, math.inf):
        refuse(released(f"text_config.{name}", bad), f"text_config.{name} is {bad!r}")


@pytest.mark.parametrize("name", ["swiglu_limit", "rope_theta", "compress_rope_theta", "gate_temp"])
def test_a_number_that_divides_or_bounds_is_not_zero(name: str) -> None:
    refuse(released(f"text_config.{name}", 0), f"text_config.{name} is 0; a number above")


@pytest.mark.parametrize("name", LISTS)
def test_a_wrong_list_is_named(name: str) -> None:
    for bad in ("[1]", 3, [1.0], [True], ["1"], {"1": 1}):
        refuse(released(f"text_config.{name}", bad), f"text_config.{name} is {bad!r}")


@pytest.mark.parametrize("name", TOKENS)
def test_a_token_outside_the_vocabulary_is_named(name: str) -> None:
    path = f"text_config.{name}" if name.startswith("engram") else name
    for bad in (-1, 129280, 1.0, "1"):
        refuse(released(path, bad), f"{name} is {bad!r}")


@pytest.mark.parametrize("name", sorted({*INTEGERS, *NUMBERS, *LISTS} - OPTIONAL))
def test_a_missing_field_is_named(name: str) -> None:
    refuse(released(f"text_config.{name}"), f"text_config.{name} is missing")
    with_null = released()
    with_null["text_config"][name] = None
    refuse(with_null, f"text_config.{name} is missing")


@pytest.mark.parametrize("name", FIXED)
def test_what_this_model_never_has_is_named(name: str) -> None:
    path = name if name in RELEASED else f"text_config.{name}"
    refuse(released(path, FIXED[name]), f"{name} is {FIXED[name]!r}")


@pytest.mark.parametrize("name", SCALING)
def test_a_wrong_field_of_the_rope_scaling_is_named(name: str) -> None:
    refuse(released(f"text_config.rope_scaling.{name}", SCALING[name]), f"rope_scaling.{name} is {SCALING[name]!r}")
    if not name.startswith("beta"):
        refuse(released(f"text_config.rope_scaling.{name}"), f"rope_scaling.{name} is missing")
    refuse(released(rope_scaling=["yarn"]), "text_config.rope_scaling is ['yarn']")


@pytest.mark.parametrize("name", QUANT)
def test_a_wrong_field_of_the_quantisation_is_named(name: str) -> None:
    refuse(released(f"quantization_config.{name}", QUANT[name]), f"quantization_config.{name} is {QUANT[name]!r}")
    for bad in ("fp8", 8, ["fp8"]):
        refuse(released("quantization_config", bad), f"quantization_config is {bad!r}")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"compress_ratios": [3] * 43}, "compress_ratios is [3,"),
        ({"kv_source_layer_ids": [8, 2, 14, 20]}, "kv_source_layer_ids is [8, 2, 14, 20]; the ids must ascend"),
        ({"kv_source_layer_ids": [2, 2, 8, 14, 20]}, "without repeats"),
        ({"kv_source_layer_ids": [1, 8, 14, 20]}, "kv_source_layer_ids names layer 1"),
        ({"kv_source_layer_ids": [2, 8, 14, 20, 40]}, "kv_source_layer_ids names layer 40"),
        ({"index_source_layer_ids": [-1, 2, 8, 14, 20]}, "index_source_layer_ids names layer -1"),
        ({"kv_source_layer_ids": [8, 14, 20]}, "leave layer 2 without a source"),
        ({"kv_source_layer_ids": [2, 8, 14]}, "layer 20 has ratio 1 but reads layer 14 of ratio 2"),
        ({"index_source_layer_ids": [2, 14, 20]}, "layer 8 would use layer 2's choice over layer 8's KV"),
        ({"candidate_source_layer_id": 21}, "candidate_source_layer_id is 21, which is not in index_source_layer_ids"),
        ({"candidate_source_layer_id": 1.0}, "candidate_source_layer_id is 1.0"),
        ({"candidate_source_layer_id": True}, "candidate_source_layer_id is True"),
        ({"engram_layer_ids": [14, 1]}, "engram_layer_ids is [14, 1]"),
        ({"engram_layer_ids": [1, 40]}, "engram_layer_ids is [1, 40]"),
        ({"engram_layer_ids": [1]}, "engram_num_embeddings has 2 entries for 1"),
        ({"o_groups": 7}, "o_groups is 7, which does not divide num_attention_heads 64"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63"),
        ({"qk_rope_head_dim": 514}, "qk_rope_head_dim is 514; an even number of at most head_dim 512"),
        ({"index_head_dim": 32}, "index_head_dim is 32; an integer of at least 64"),
        ({"num_experts_per_tok": 385}, "num_experts_per_tok is 385, more than n_routed_experts 384"),
        ({"num_key_value_heads": True}, "num_key_value_heads is True"),
    ],
)
def test_fields_that_do_not_fit_each_other_are_named(fields: dict[str, Any], words: str) -> None:
    refuse(released(**fields), words)


def test_another_model_or_no_object_is_refused() -> None:
    refuse(released("model_type", "deepseek_v3"), "config.json.model_type is 'deepseek_v3'", "'deepseek_v41'")
    refuse(released("model_type"), "config.json.model_type is missing")
    refuse([RELEASED], "one JSON object")
    refuse({**RELEASED, "text_config": []}, "text_config must be an object")


def test_every_field_that_is_read_is_tried_by_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    read = set()
    get = module.Fields.get

    def recording(self: Any, name: str, default: Any) -> Any:
        read.add(name)
        return get(self, name, default)

    monkeypatch.setattr(module.Fields, "get", recording)
    parse_config(RELEASED)
    more = {"gate_temp", "candidate_source_layer_id", "model_type"}
    assert read == {*INTEGERS, *NUMBERS, *LISTS, *TOKENS, *FIXED, *SCALING, *QUANT, *more}


def test_a_file_is_read_with_its_overrides(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(RELEASED))
    assert load_config(tmp_path) == parse_config(RELEASED)
    changed = load_config(tmp_path, {"text_config": {"sliding_window": 64, "rope_scaling": {"factor": 2}}})
    assert (changed.window, changed.compress_rope.factor, changed.compress_rope.original_positions) == (64, 2.0, 65536)
    assert load_config(tmp_path, {"sliding_window": 32}).window == 32
    flat = {**RELEASED["text_config"], **{k: v for k, v in RELEASED.items() if k != "text_config"}}
    path.write_text(json.dumps(flat))
    assert load_config(tmp_path, {"text_config": {"sliding_window": 64}}).window == 64


@pytest.mark.parametrize(
    ("content", "words"), [(b"{", "not valid JSON"), (b"\xff\xfe{}", "not valid JSON"), (b"[]", "one JSON object")]
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(tmp_path)
    assert "config.json" in str(caught.value)
