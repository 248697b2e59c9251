"""What is known of a machine's memory, and how loading is shown."""

import logging
from pathlib import Path

import pytest

from paraflash.checkpoint import memory
from paraflash.checkpoint.progress import show_progress
from paraflash.checkpoint.tensors import Shard, TensorSpec, shard_slices, tensor_table
from paraflash.config.model import ModelConfig
from paraflash.planner.cli import read_model


@pytest.fixture(scope="module")
def released() -> ModelConfig:
    return read_model(str(Path(__file__).parents[1] / "data" / "released_config.json"))


ALL = (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("layers.1.engram.wkv", ALL),
        ("layers.2.attn.wq_a", ()),  # 1280 outputs, too few to gain, as wkv's 512
        ("layers.2.attn.wq_b", ALL),
        ("layers.2.attn.wkv", ()),
        ("layers.2.attn.wo_a", ()),  # multiplied group by group
        ("layers.2.attn.wo_b", ALL),
        ("layers.2.attn.indexer.wq_b", ALL),
        ("layers.2.attn.indexer.wk", ()),  # stored in bf16, as the following
        ("layers.2.attn.compressor.wkv", ()),
        ("layers.2.ffn.gate", ()),
        ("layers.2.ffn.shared_experts.w1", (1,)),  # 2304 outputs: 1152 a rank at TP 2 are too few
        ("layers.2.ffn.shared_experts.w3", (1,)),
        ("layers.2.ffn.shared_experts.w2", (1, 2, 4)),  # 2304 inputs: 288 a rank at TP 8 are no multiple of 64
        ("layers.2.ffn.experts.0.w1", ()),
        ("embed", ()),
        ("head", ()),
    ],
)
def test_which_linears_of_the_release_stay_in_one_byte_at_which_tp(
    released: ModelConfig, name: str, sizes: tuple[int, ...]
) -> None:
    spec: TensorSpec = next(s for s in tensor_table(released) if s.name == f"{name}.weight")
    parts = {tp: shard_slices(spec, Shard(0, tp, tp)) for tp in ALL}
    assert tuple(tp for tp, part in parts.items() if part and memory.one_byte(spec, part)) == sizes


def test_a_part_that_cuts_a_scale_block_does_not_stay_in_one_byte() -> None:
    spec = TensorSpec("x.weight", (4096, 512), "fp8")
    assert memory.one_byte(spec, (slice(128, 2176), slice(64, 128)))
    assert not memory.one_byte(spec, (slice(16, 2064), slice(64, 128)))
    assert not memory.one_byte(spec, (slice(128, 2176), slice(16, 80)))
    assert not memory.one_byte(spec, (slice(0, 2048), slice(0, 0)))


def test_a_part_with_few_outputs_does_not_stay_in_one_byte() -> None:
    spec = TensorSpec("x.weight", (4096, 512), "fp8")
    assert memory.one_byte(spec, (slice(0, 2048), slice(0, 512)))
    assert not memory.one_byte(spec, (slice(0, 1920), slice(0, 512)))
    assert not memory.one_byte(spec, (slice(0, 0), slice(0, 512)))


def test_a_container_limit_leaves_what_is_not_used_or_can_be_dropped(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 250\nactive_file 50\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory._cgroup(tmp_path) == 1000 - 700 + 250 + 50
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._cgroup(tmp_path) is None
    assert memory._cgroup(tmp_path / "none") is None


def test_meminfo_is_read_in_kib(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    5 kB\n")
    assert memory._meminfo(tmp_path / "meminfo") == 5 * 1024
    assert memory._meminfo(tmp_path / "none") is None


def test_memory_that_suffices_or_is_unknown_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for free in (10, None):
        monkeypatch.setattr(memory, "available_memory", lambda device, free=free: free)
        memory.check_memory(10, "cpu")
    monkeypatch.setattr(memory, "available_memory", lambda device: 9)
    with pytest.raises(memory.NotEnoughMemory):
        memory.check_memory(10, "cpu")


def test_without_a_terminal_progress_is_one_line_at_the_end_and_one_every_few_seconds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    with caplog.at_level(logging.INFO), show_progress("Loading weights") as progress:
        for done in range(1, 101):
            progress(done << 30, 100 << 30)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and lines[0].startswith("Loading weights: 100.00 of 100.00 GiB")
