"""Bytes of the memory plan against the totals that model.md gives for the release."""

from __future__ import annotations

import pytest

from paraflash.checkpoint.memory import stored_bytes
from paraflash.checkpoint.tensors import tensor_table
from paraflash.planner.memory import (
    MemoryOptions,
    cache_records,
    kv_bytes_per_token,
    rank_memory,
    weight_bytes,
    window_bytes,
)
from paraflash.topology import Topology

from .helpers import hardware, released

EXPERTS = 40 * 384 * 3 * 5120 * 2304 * 17 // 32  # half a byte a value and a scale byte for 32
ENGRAM = (384006168 + 384016682) * 264


def checkpoint_bytes() -> float:
    """Of all text tensors as stored."""
    return sum(stored_bytes(spec) for spec in tensor_table(released()))


def fp8(params: int) -> int:
    return params + params // 1024


def draft_head_bytes() -> int:
    """mtp.*, by the shapes of model.md section 7."""
    attention = fp8(126_615_552) + 2 * (1280 + 512) + 4 * 64
    mixes = 2 * 4 * (24 * 20480 + 24 + 3)
    router = 2 * 128 * 5120 + 2 * 4 * 128
    experts = 128 * 3 * 5120 * 2304 * 17 // 32 + fp8(3 * 5120 * 2304)
    block = attention + mixes + router + experts + 2 * 2 * 5120
    return 3 * block + fp8(5120 * 15360) + 2 * 2 * 5120 + 2 * 2 * 129280 * 256 + 2 * 5376


def test_text_tensors_and_draft_head_leave_the_published_total_just_the_vision_tower():
    vision = 32 * (4 * 1024 * 1024 + 3 * 1024 * 2816) * 2
    rest = 510_286_023_000 - checkpoint_bytes() - draft_head_bytes()
    assert vision < rest < 1.25 * vision  # its blocks, plus the patch embedding and the aligner


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_split_of_eight_holds_the_same_experts(tp):
    experts, _, engram = weight_bytes(released(), Topology(tp, 8 // tp), "bf16")
    assert experts == EXPERTS / 8
    assert engram == ENGRAM


ATTENTION = 126_615_552  # parameters of wq_a, wq_b, wkv, wo_a, wo_b of a layer
WO_A = 8192 * 4096
WQ_A, WKV = 5120 * 1280, 5120 * 512  # fewer than 2,048 outputs
FP8_PARAMS = 40 * (ATTENTION + 3 * 5120 * 2304) + 8 * 4096 * 1280 + 2 * 25600 * 6144


def test_bf16_dense_weights_are_what_is_left_of_the_text_checkpoint_with_its_fp8_expanded():
    _, dense, _ = weight_bytes(released(), Topology(1, 1), "bf16")
    unread = 40 * 384 * 4  # a router's bias for images
    assert dense == checkpoint_bytes() - EXPERTS - ENGRAM - unread + FP8_PARAMS - FP8_PARAMS // 1024


def test_one_byte_dense_weights_save_a_byte_less_a_scale_for_32_values_but_not_of_grouped_or_narrow_projections():
    wide, narrow = (weight_bytes(released(), Topology(1, 1), form) for form in ("bf16", "fp8"))
    assert wide[1] - narrow[1] == (FP8_PARAMS - 40 * (WO_A + WQ_A + WKV)) * 31 // 32
    assert wide[0] == narrow[0] == EXPERTS


def test_the_shared_expert_stays_bf16_where_tp_cuts_it_into_other_multiples_or_few_outputs():
    def saved(tp: int) -> int:
        wide, narrow = (weight_bytes(released(), Topology(tp, 1), form)[1] for form in ("bf16", "fp8"))
        return wide - narrow

    replicated = 8 * 4096 * 1280 + 2 * 25600 * 6144
    split = 40 * (32768 * 1280 + 5120 * 8192)
    # 1152 and 576 channels a rank: only w2, which takes them as inputs. 288: none.
    assert saved(2) == (replicated + (split + 40 * 5120 * 2304) // 2) * 31 // 32
    assert saved(4) == (replicated + (split + 40 * 5120 * 2304) // 4) * 31 // 32
    assert saved(8) == (replicated + split // 8) * 31 // 32


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [("nvfp4_ds_mla", 890), ("fp8_ds_mla", 1790), ("bfloat16", 2.5 * (1024 + 256))]
)
def test_kv_bytes_a_token(dtype, nbytes):
    assert kv_bytes_per_token(released(), cache_records(released(), dtype)) == nbytes


def test_windows_of_one_request_take_the_documented_bytes():
    records = cache_records(released(), "fp8_ds_mla")
    ring = 3 * 2 * 512 * 4
    assert window_bytes(released(), records, 1) == pytest.approx(2.85 * 2**20 + ring, rel=0.002)


def plan(topology: Topology | None = None, **options: object):
    return rank_memory(released(), topology or Topology(2, 4), hardware(), MemoryOptions(**options), 4096, 32768)


def test_kv_fills_what_the_utilization_leaves():
    memory = plan()
    room = 0.92 * hardware().memory_bytes - memory.fixed
    assert memory.kv_tokens % 64 == 0
    assert 0 <= room - memory.kv_tokens * memory.kv_bytes_per_token < 64 * memory.kv_bytes_per_token


def test_smaller_records_hold_more_tokens():
    assert (
        plan(kv_cache_dtype="nvfp4_ds_mla").kv_tokens > plan(kv_cache_dtype="fp8_ds_mla").kv_tokens > plan().kv_tokens
    )


def test_more_pcp_means_more_dense_bytes_a_rank():
    dense = [plan(Topology(tp, 8 // tp)).dense for tp in (8, 4, 2, 1)]
    assert dense == sorted(dense) and len(set(dense)) == 4


def test_engram_stands_once_in_host_memory_or_in_tp_shares_on_the_gpus():
    host, gpu = plan(), plan(engram_on_gpu=True)
    assert (host.host_node, host.engram) == (ENGRAM, 0)
    assert (gpu.host_node, gpu.engram) == (0, ENGRAM / 2)


def test_nothing_is_left_for_kv_where_the_weights_do_not_fit():
    assert plan(Topology(1, 1)).kv_tokens == 0


@pytest.mark.parametrize("value", [0.0, 1.5, float("nan")])
def test_utilization_out_of_range_is_refused(value):
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        plan(gpu_memory_utilization=value)


def test_unknown_dense_weights_are_refused():
    with pytest.raises(ValueError, match="dense_weights is 'int4'"):
        plan(dense_weights="int4")


@pytest.mark.parametrize(
    ("topology", "utilization", "form"),
    [
        (Topology(8, 1), 0.92, "bf16"),
        (Topology(1, 8), 0.92, "bf16"),
        (Topology(1, 8), 0.52, "fp8"),  # 53.6 GB: between 49.5 and 54.5
        (Topology(1, 1), 0.92, "fp8"),  # nothing fits: the smaller one comes nearest
    ],
)
def test_auto_keeps_one_byte_only_where_bf16_leaves_no_room_for_a_prompt(topology, utilization, form):
    chosen = plan(topology, gpu_memory_utilization=utilization)
    assert chosen.dense_weights == form
    assert chosen == plan(topology, gpu_memory_utilization=utilization, dense_weights=form)
