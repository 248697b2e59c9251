"""The memory plan of a rank: its sums, what it chooses, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paraflash.cache.records import kv_format
from paraflash.config.engine import EngineConfig, Refused
from paraflash.engine.memory_plan import LONG_CONTEXT_BYTES, MemoryPlan, choose, plan_memory
from paraflash.kernels.reference import reference_kernels
from paraflash.planner.cli import read_model
from paraflash.planner.memory import workspace_bytes
from paraflash.topology import Topology

GIB = 2**30
DATA = Path(__file__).parent.parent / "data"
PLAN = MemoryPlan(
    experts=30 * GIB,
    dense_bf16=16 * GIB,
    dense_fp8=9 * GIB,
    embeddings=3 * GIB,
    engram=2 * GIB,
    steps=8 * GIB,
    windows=5 * GIB,
    kv=4 * GIB,
    usable=68 * GIB,
)


def test_the_sums_differ_in_the_dense_weights_alone() -> None:
    assert (PLAN.needed("bf16"), PLAN.needed("fp8")) == (68 * GIB, 61 * GIB)


@pytest.mark.parametrize(
    ("usable", "bf16", "fp8"),
    [(68 * GIB, True, True), (68 * GIB - 1, False, True), (61 * GIB, False, True), (61 * GIB - 1, False, False)],
)
def test_a_plan_fits_up_to_the_last_byte(usable: int, bf16: bool, fp8: bool) -> None:
    plan = replace(PLAN, usable=usable)
    assert (plan.fits("bf16"), plan.fits("fp8")) == (bf16, fp8)


SMALL = replace(PLAN, usable=60 * GIB)
SAME = replace(SMALL, dense_fp8=SMALL.dense_bf16)


@pytest.mark.parametrize(
    ("asked", "plan", "fits", "unavailable", "form", "why"),
    [
        ("auto", PLAN, True, "", "bf16", "it fits"),
        ("auto", PLAN, True, "no package", "bf16", "it fits"),
        ("auto", SMALL, False, "", "fp8", "bf16 does not fit"),
        ("auto", PLAN, False, "", "fp8", "bf16 does not fit on another rank"),
        ("auto", SMALL, False, "no package", "bf16", "it does not fit, but no package"),
        ("auto", SAME, False, "", "bf16", "it does not fit, but no weight of this model could be smaller"),
        ("bf16", SMALL, False, "", "bf16", "as asked for"),
        ("fp8", PLAN, True, "", "fp8", "as asked for"),
    ],
)
def test_what_is_chosen_and_why(
    asked: str, plan: MemoryPlan, fits: bool, unavailable: str, form: str, why: str
) -> None:
    assert choose(asked, plan, fits, unavailable) == (form, why)


def test_fp8_is_refused_where_it_is_not_available() -> None:
    with pytest.raises(Refused, match=r"^dense_weights is fp8: no package; use --dense-weights bf16 or auto$"):
        choose("fp8", PLAN, True, "no package")
    assert reference_kernels().why_no_fp8_linears


def released(**options: object) -> MemoryPlan:
    """Rank 0 of TP 1 x PCP 8 of the released model."""
    model = read_model(str(DATA / "released_config.json"))
    config = EngineConfig(
        "m", **{"prefill_context_parallel_size": 8, "max_num_batched_tokens": 4096, "max_model_len": 65536, **options}
    )
    fmt = kv_format("bfloat16", model.head_dim, model.rope_dim, model.index_head_dim)
    return plan_memory(config, model, 0, fmt, ("fp4",), slots=257, spare_rows=10_000, graphs=True, usable=80 * GIB)


def test_the_plan_of_the_released_model() -> None:
    plan = released()
    assert plan.experts == 40 * 48 * 3 * 5120 * 2304 * 17 // 32
    assert plan.embeddings == 2 * 129280 * 5120 * 2
    attention = 126_615_552 - 8192 * 4096 - 5120 * (1280 + 512)  # without what is grouped or has few outputs
    packed = 40 * (attention + 3 * 5120 * 2304) + 8 * 4096 * 1280 + 2 * 25600 * 6144
    assert plan.dense_bf16 - plan.dense_fp8 == packed * 31 // 32
    assert plan.kv == 1025 * 64 * 2.5 * (1024 + 256)  # 65,536 tokens and the null block
    assert plan.windows == 257 * (40 * 128 * 1024 + 3 * 2 * 4 * 512) + 10_000 * 1024
    model = read_model(str(DATA / "released_config.json"))
    assert plan.steps == 2 * (int(workspace_bytes(model, Topology(1, 8), 4096, 65536)) + LONG_CONTEXT_BYTES)
    assert plan.engram == 0


def test_what_was_asked_for_counts_as_kv_and_shared_out_engram_tables_count() -> None:
    assert released(kv_cache_memory_bytes=12345).kv == 12345
    assert released(num_gpu_blocks_override=9).kv == 10 * 64 * 2.5 * (1024 + 256)
    both = released(num_gpu_blocks_override=9, kv_cache_memory_bytes=12345)
    assert both.kv == 10 * 64 * 2.5 * (1024 + 256), "the pool has the blocks, whatever the bytes"
    all_requests = 257 * 1024 + 1
    assert released(kv_cache_memory_bytes=1 << 40).kv == all_requests * 64 * 2.5 * (1024 + 256), "more is never taken"
    assert released(max_model_len=None).kv == released(max_model_len=2**20).kv
    on_device = {"engram_config": {"cpu_offload": False}}
    assert released(**on_device).engram == (384006168 + 384016682 + 2) * 264
    assert released(**on_device, load_format="dummy").engram == 0  # dummy rows are never stored


def test_the_table_shows_both_forms_in_gib() -> None:
    lines = PLAN.table().splitlines()
    assert lines[2].split() == ["dense", "weights", "16.00", "9.00"]
    assert lines[-2].split() == ["sum", "68.00", "61.00"]
    assert lines[-1].split() == ["may", "be", "used", "68.00", "68.00"]
