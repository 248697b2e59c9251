"""`paraflash bench offline` on a golden model: its figures, and loads that the engine cannot take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paraflash.cli import main

NARROW = Path(__file__).parent.parent / "data" / "golden" / "narrow"
ENGINE = [
    str(NARROW), "--device", "cpu", "--dtype", "float32", "--kv-cache-dtype", "float32", "--kv-cache-rounding", "none",
    "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "128",
]  # fmt: skip


def test_prefill_and_decode_are_measured_at_every_budget_and_number(tmp_path: Path) -> None:
    load = ["--input-len", "40", "--concurrency", "1", "2", "--budgets", "32", "64", "--prompts", "2"]
    decode = ["--decode", "1", "3", "--decode-context", "20", "--decode-tokens", "6"]
    out = tmp_path / "offline.json"
    assert main(["bench", "offline", *ENGINE, *load, *decode, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [(e["budget"], e["concurrency"]) for e in found["prefill"]] == [(32, 1), (32, 2), (64, 1), (64, 2)]
    for entry in found["prefill"]:
        assert entry["input_tokens_per_second"] == pytest.approx(2 * 40 / entry["seconds"])
        assert 0 < entry["mean_ttft_ms"] <= 1e3 * entry["seconds"]
    assert [e["requests"] for e in found["decode"]] == [1, 3]
    assert all(e["steps"] >= 3 and e["median_step_seconds"] > 0 for e in found["decode"])


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (["--input-len", "16", "128"], "--input-len is 128, but a request holds 128 tokens"),
        (["--input-len", "16", "--decode", "2"], "--decode-context is 8192 and 8483 with what is generated"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0"),
    ],
)
def test_what_the_engine_would_refuse_is_one_line_before_anything_is_measured(
    load: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "offline", *ENGINE, *load]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("paraflash bench offline: error: ") and said in printed.err
    assert "input tok/s" not in printed.out
