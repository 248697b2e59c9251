"""What is known of a machine's memory, and how loading is shown."""

import logging
from pathlib import Path

import pytest

from paraflash.checkpoint import memory
from paraflash.checkpoint.progress import show_progress


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
