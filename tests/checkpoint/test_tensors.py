"""The tensor table and its sharding."""

from dataclasses import replace
from pathlib import Path

import pytest

from paraflash.checkpoint.tensors import SKIPPED, Shard, shard_slices, tensor_table
from paraflash.config.model import ConfigError, ModelConfig, load_config, parse_config

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def released_config() -> dict:
    """The released sizes (model.md 1.2)."""
    return {
        "model_type": "deepseek_v41",
        "text_config": {
            **dict(vocab_size=129280, hidden_size=5120, num_hidden_layers=40, num_attention_heads=64, head_dim=512),
            **dict(qk_rope_head_dim=64, q_lora_rank=1280, o_groups=8, o_lora_rank=1024, swiglu_limit=10.0),
            **dict(moe_intermediate_size=2304, n_routed_experts=384, num_experts_per_tok=6),
            **dict(routed_scaling_factor=1.5, rms_norm_eps=1e-20, max_position_embeddings=1048576, rope_theta=10000),
            **dict(compress_rope_theta=160000, sliding_window=128, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6),
            **dict(index_n_heads=32, index_head_dim=128, index_topk=512, candidate_source_layer_id=20),
            **dict(candidate_topk_blocks=2048, candidate_block_size=8, engram_layer_ids=[1, 14]),
            **dict(engram_num_embeddings=[384006168, 384016682], engram_max_ngram_size=4, engram_n_heads=8),
            **dict(engram_head_dim=256, engram_vocab_size=16000000, engram_compressed_vocab_size=99092),
            "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
            "kv_source_layer_ids": [2, 8, 14, 20],
            "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        },
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32], "expert_dtype": "fp4"},
    }


def test_released_model_has_the_published_tensor_counts_and_shapes() -> None:
    table = tensor_table(parse_config(released_config()))
    tensors = {
        name: shape for s in table for name, shape in ((s.name, s.stored_shape), (s.scale_name, s.scale_shape)) if name
    }
    assert sum(name.startswith("layers.") for name in tensors) == 93_415
    assert len(tensors) == 93_415 + 3
    assert tensors["layers.7.ffn.experts.383.w2.weight"] == (5120, 1152)
    assert tensors["layers.7.ffn.experts.383.w2.scale"] == (5120, 72)
    assert tensors["layers.39.attn.wo_a.scale"] == (256, 128)
    assert tensors["layers.14.engram.embed.scale"] == (384016682, 8)
    assert tensors["layers.1.engram.wkv.weight"] == (25600, 6144)
    assert tensors["layers.2.attn.indexer.wq_b.scale"] == (128, 40)
    assert "layers.20.attn.compressor.wgate.weight" not in tensors
    assert "layers.24.attn.indexer.wk.weight" not in tensors


@pytest.mark.parametrize("folder", ["narrow", "narrow_fp8", "wide"])
@pytest.mark.parametrize(("tp", "pcp"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 3), (4, 4)])
def test_shards_of_all_ranks_cover_every_tensor_exactly_once(folder: str, tp: int, pcp: int) -> None:
    model = load_config(GOLDEN / folder)
    for spec in tensor_table(model):
        parts = [shard_slices(spec, Shard(rank, tp, tp * pcp)) for rank in range(tp * pcp)]
        if spec.split.kind == "engram":
            assert parts == [None] * (tp * pcp)
        elif spec.split.kind == "expert":
            assert sum(part is not None for part in parts) == 1
        elif spec.split.kind == "replicate":
            assert all(part == tuple(slice(0, n) for n in spec.shape) for part in parts)
        else:
            dim = int(spec.split.kind == "cols")
            row = [part[dim] for part in parts[:tp] if part]
            covered = [i for part in row for i in range(part.start, part.stop)]
            assert covered == list(range(spec.shape[dim]))
            assert parts == parts[:tp] * pcp  # the same on every PCP rank


def test_a_ranks_heads_sinks_and_groups_belong_together() -> None:
    model = load_config(GOLDEN / "narrow")
    table = {spec.name: spec for spec in tensor_table(model)}

    def first(name: str, dim: int) -> int:
        part = shard_slices(table[f"layers.0.attn.{name}"], Shard(1, 2, 2))
        assert part is not None
        return part[dim].start

    group = model.o_groups // 2
    assert first("wq_b.weight", 0) == group * model.heads_per_group * model.head_dim
    assert first("attn_sink", 0) == group * model.heads_per_group
    assert first("wo_a.weight", 0) == first("wo_b.weight", 1) == group * model.o_lora_rank


def test_experts_are_cut_into_contiguous_ranges_that_differ_by_at_most_one() -> None:
    assert [Shard(r, 1, 4).experts(10) for r in range(4)] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert [Shard(r, 1, 8).experts(9) for r in range(8)] == [(0, 2), *((r, r + 1) for r in range(2, 9))]
    assert [Shard(r, 1, 8).experts(384) for r in range(8)] == [(48 * r, 48 * r + 48) for r in range(8)]


def test_vision_and_draft_names_are_skipped_and_text_names_are_not() -> None:
    for name in ("vision.blocks.0.w", "aligner.w1.weight", "mtp.0.attn.wq_a.scale", "image_start", "image_newline"):
        assert SKIPPED.match(name)
    for name in ("layers.0.attn.wq_a.weight", "embed.weight", "image_startle", "visionary"):
        assert not SKIPPED.match(name)


def test_a_width_that_fp4_cannot_store_is_refused_by_name() -> None:
    model: ModelConfig = replace(load_config(GOLDEN / "narrow_fp8"), moe_intermediate_size=48)
    with pytest.raises(ConfigError, match=r"experts\.0\.w2\.weight has rows of 48 values.*multiple of 32"):
        tensor_table(model)
