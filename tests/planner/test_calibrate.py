"""Calibration on whatever machine runs the tests: real measurements, tiny sizes."""

from __future__ import annotations

import pytest
import torch

from paraflash.planner.calibrate import Sizes, measure
from paraflash.planner.hardware import load_hardware, save_entry

TINY = Sizes(gemm=64, copy_bytes=1 << 16, reduce_bytes=1 << 14, repeats=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the CPU only where there is no GPU")
def test_a_measured_cpu_entry_is_whole_and_can_be_loaded(tmp_path):
    entry = measure("this one", TINY)
    save_entry(entry, tmp_path / "hardware.json")
    assert load_hardware("This One", tmp_path / "hardware.json") == entry
    assert "gloo" in entry.sources["link_bandwidth"]
    assert entry.bf16_flops > 0 and entry.collective_latency > 0
