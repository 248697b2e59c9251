"""`paraflash plan` as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from paraflash.cli import main
from paraflash.planner.hardware import HardwareError, load_hardware, read_entries, save_entry
from paraflash.planner.plot import prompt_lengths

from .helpers import CONFIG, DATA, hardware


@pytest.fixture
def plan(tmp_path):
    def call(*words: object) -> int:
        return main(["plan", *map(str, words), "--hardware-file", str(tmp_path / "hardware.json")])

    return call


def test_json_has_every_split_with_memory_terms_and_a_recommendation(plan, capsys):
    assert plan(CONFIG, "--gpu", "H20", "--num-gpus", 8, "--input-len", 8192, "--json") == 0
    out = json.loads(capsys.readouterr().out)
    assert [s["topology"] for s in out["splits"]] == ["TP8/PCP1", "TP4/PCP2", "TP2/PCP4", "TP1/PCP8"]
    best = max(out["splits"], key=lambda s: s["input_tokens_per_second"])
    assert out["recommended"] == best["topology"]
    for split in out["splits"]:
        assert split["memory"]["kv_tokens"] > 8192
        assert split["memory"]["host_node"] == pytest.approx(202.76e9, rel=1e-3)
        assert split["mean_ttft_seconds"] > 0
        assert set(split["terms"]) == {
            *("gemm", "attention", "index", "moe", "residual"),
            *("all_reduce", "pcp_exchange", "engram", "launch"),
        }


def test_table_names_the_splits_the_terms_and_the_choice(plan, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert plan(CONFIG, "--input-len", 4096, "--concurrency", 1) == 0
    out = capsys.readouterr().out
    for word in ("TP4/PCP2", "recommended", "PCP exchange", "Engram", "KV tokens", "mean TTFT ms"):
        assert word in out


def test_replay_is_on_unless_turned_off(plan, capsys):
    plan(CONFIG, "--input-len", 8192, "--json")
    on = json.loads(capsys.readouterr().out)
    plan(CONFIG, "--input-len", 8192, "--no-swa-bounded-replay", "--json")
    off = json.loads(capsys.readouterr().out)
    for fast, slow in zip(on["splits"], off["splits"], strict=True):
        assert fast["input_tokens_per_second"] > 1.5 * slow["input_tokens_per_second"]


def test_mean_ttft_of_a_wave_is_the_mean_of_its_prompts(plan, capsys):
    plan(CONFIG, "--input-len", 4096, "--concurrency", 3, "--json")
    split = json.loads(capsys.readouterr().out)["splits"][0]
    one = 4096 / split["input_tokens_per_second"]
    assert split["mean_ttft_seconds"] == pytest.approx((1 + 2 + 3) / 3 * one)


def test_a_model_folder_works_and_tp_beyond_its_groups_is_refused_in_its_row(plan, capsys):
    assert plan(DATA / "golden" / "wide", "--num-gpus", 8, "--input-len", 40, "--json") == 0
    splits = json.loads(capsys.readouterr().out)["splits"]
    refused = [s for s in splits if s["refused"]]
    assert all("does not divide" in s["refused"] for s in refused)
    assert len(refused) < len(splits)


def test_where_no_split_fits_the_rows_say_why_and_the_status_is_1(plan, capsys):
    assert plan(CONFIG, "--gpu", "H100", "--num-gpus", 2, "--json") == 1
    out = json.loads(capsys.readouterr().out)
    assert out["recommended"] is None
    assert all("does not fit" in s["refused"] for s in out["splits"])


def test_plot_writes_a_png(plan, tmp_path, capsys):
    target = tmp_path / "plan.png"
    assert plan(CONFIG, "--input-len", 2048, "--concurrency", 1, "--plot", target) == 0
    assert target.read_bytes().startswith(b"\x89PNG")


def test_plotted_lengths_stop_at_the_models_positions():
    assert prompt_lengths(8192, 1 << 20)[-1] == 32768
    assert prompt_lengths(131072, 1 << 20)[-1] == 131072
    assert prompt_lengths(8192, 4096)[-1] == 4096
    assert prompt_lengths(40, 512) == [512]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((CONFIG, "--gpu", "H21"), "--gpu is 'H21'; known are H20,"),
        ((CONFIG, "--num-gpus", 16), "--num-gpus is 16; 1 to 8 of H20"),
        ((CONFIG, "--num-gpus", 0), "--num-gpus is 0"),
        ((CONFIG, "--input-len", 0), "input_len is 0"),
        ((CONFIG, "--input-len", 2_000_000), "the model has 1048576 positions"),
        ((CONFIG, "--max-num-batched-tokens", -1), "batch_budget is -1"),
        ((CONFIG, "--max-num-seqs", 0), "--max-num-seqs is 0"),
        ((CONFIG, "--gpu-memory-utilization", "nan"), "gpu_memory_utilization is nan"),
        ((CONFIG, "--engram-config", '{"offload": true}'), "--engram-config"),
        (("no/such/config.json",), "no/such/config.json does not exist"),
        ((), "MODEL_OR_CONFIG is missing"),
    ],
)
def test_bad_input_is_named_with_what_is_allowed(plan, capsys, words, message):
    assert plan(*words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_users_entry_comes_before_a_released_one(tmp_path):
    path = tmp_path / "mine.json"
    entry = hardware("H20")
    save_entry(entry, path)
    text = path.read_text().replace("148000000000000.0", "1000.0")
    path.write_text(text)
    save_entry(hardware("H200"), path)
    assert load_hardware("h20", path).bf16_flops == 1000
    assert load_hardware("H200", path) == hardware("H200")
    assert load_hardware("H20", tmp_path / "none.json") == entry


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "one JSON object"),
        ('{"X": {"bf16_flops": {"value": 1}}}', "entry 'X' has the fields"),
    ],
)
def test_a_broken_hardware_file_is_named(tmp_path, text, message):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(HardwareError, match=message):
        read_entries(path)


@pytest.mark.parametrize("value", ["0", "-1", "true", '"fast"', "NaN"])
def test_a_rate_that_is_no_positive_number_is_refused(tmp_path, value):
    path = tmp_path / "mine.json"
    save_entry(hardware("H20"), path)
    path.write_text(path.read_text().replace("148000000000000.0", value))
    with pytest.raises(HardwareError, match=r"H20\.bf16_flops"):
        read_entries(path)


@pytest.mark.parametrize("name", ["H20", "H20-141GB", "H100", "H200", "B200"])
def test_every_released_number_states_its_source(name):
    sources = hardware(name).sources
    assert len(sources) == 9
    assert all(word != "not stated" for word in sources.values())


def test_the_planner_needs_no_torch_until_it_plans():
    code = "import sys, paraflash.planner.cli; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_config_that_is_no_text_is_named(plan, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe")
    assert plan(path) == 2
    assert f"{path} is not valid JSON" in capsys.readouterr().err
