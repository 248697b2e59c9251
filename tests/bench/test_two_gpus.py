"""The two-GPU benchmark: what its tables say of given measurements, and its runner on one CPU rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import two_gpus
import two_gpus_report as report

from paraflash.planner.hardware import read_entries

ROOT = Path(__file__).parent.parent.parent


def rank(window: float, attend: float) -> dict:
    parts = [("kernel attend", 0, attend), ("window", 0, window + 0.25), ("exchange pcp window all_gather", 64, window)]
    return {"step": [1.0], "enqueue": [0.5], "recorded_step": [2.0], "parts": [parts]}


def test_an_exchange_counts_what_the_later_rank_spends_in_it_and_the_rest_is_waiting() -> None:
    found = report.summarise([rank(0.75, 0.5), rank(0.125, 1.125)])
    assert found["parts"] == {
        "sparse attention": 0.5,
        "exchange pcp window all_gather": 0.125,
        "waiting for the other rank": 0.625,
        "between the parts": 0.75,
    }
    assert found["window_collective_share"] == 0.125 / 2.0
    assert found["window_step_seconds"] == 1.0


def test_the_hardware_entry_is_one_that_the_planner_reads(tmp_path: Path) -> None:
    table = [
        {"op": "all_reduce", "nbytes": n, "burst_seconds": s, "bus_bytes_per_second": n / s}
        for n, s in ((1 << 16, 2e-5), (1 << 27, 1e-3))
    ]
    measured = {"bf16_flops": 7e14, "memory_bandwidth": 4e12, "launch_seconds": 5e-6}
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps(report.hardware_entry(measured, table, {"gpu": "X"})))
    entry = read_entries(path)["X x2"]
    assert (entry.collective_latency, entry.link_bandwidth) == (2e-5, (1 << 27) / 1e-3)


def test_missing_cells_are_said_and_changes_are_relative_to_the_first_topology() -> None:
    cells = {
        "TP2/PCP1 32768 1": {"input_throughput": 100.0, "mean_ttft": 0.5},
        "TP1/PCP2 32768 1": {"input_throughput": 125.0, "mean_ttft": 0.25},
    }
    text = report.summary({"matrix": cells, "setup": {}}, [32768], [1])
    assert "| 32768 | 1 | 100.00 | 125.00 (+25.00%) | not run |" in text
    assert "| 32768 | 1 | 500.00 | 250.00 (-50.00%) | not run |" in text
    assert "TP1/PCP2 over TP2/PCP1 +25.0%" in text


def test_a_timed_group_takes_the_place_of_collectives_and_of_nothing_else() -> None:
    from rank_runner import TimedGroup

    from paraflash.parallel.mesh import Group

    timed = {"all_gather", "all_reduce", "reduce_scatter", "all_gather_start", "reduce_scatter_start", "out_start"}
    named = {name for name in vars(TimedGroup) if callable(getattr(TimedGroup, name)) and not name.startswith("__")}
    assert named & set(dir(Group)) == timed


def test_the_parts_of_a_recorded_step_make_up_its_time(tmp_path: Path) -> None:
    from rank_runner import BenchRunner

    from paraflash.config.engine import EngineConfig
    from paraflash.config.model import load_config
    from paraflash.model import attention
    from paraflash.parallel.mesh import init_mesh

    raw = json.loads((ROOT / "tests" / "data" / "released_config.json").read_text())
    raw["text_config"].update(two_gpus.LAYERS | two_gpus.SMALL)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", kv_cache_dtype="float32", load_format="dummy",
        max_num_seqs=4, max_num_batched_tokens=32, num_gpu_blocks_override=8,
    )  # fmt: skip
    exchange = attention.exchange_window
    try:
        runner = BenchRunner(config, load_config(tmp_path), init_mesh(0, 1, 1, "cpu"))
        runner.load()
        found = runner.breakdown("prefill", 64, 32, 1)
        decode = runner.breakdown("decode", 2, 32, 1)
    finally:
        attention.exchange_window = exchange
    table = report.summarise([found])
    assert len(found["parts"]) == 2 and len(decode["parts"]) == 1
    assert sum(table["parts"].values()) == pytest.approx(table["recorded_step_seconds"])
    assert {"experts", "dense products", "sparse attention", "entry selection"} <= set(table["parts"])
    assert torch.isfinite(runner.tables[0].lookup(torch.arange(3).numpy())).all()
