"""Synthetic checkpoints: released format, determinism, tokenizer; dummy weights; inspect and the command line."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from paraflash.checkpoint.dummy import dummy_engram_tables, dummy_weights
from paraflash.checkpoint.load import Checkpoint, load_weights, open_engram_tables
from paraflash.checkpoint.quant import QuantTensor
from paraflash.checkpoint.synthetic import PRESETS, synthetic_config, write_synthetic
from paraflash.checkpoint.tensors import Shard, tensor_table
from paraflash.checkpoint.writer import write_checkpoint
from paraflash.cli import main
from paraflash.config.model import ConfigError, load_config, parse_config
from paraflash.model.engram_hash import check_tables, load_token_map
from tests import oracle


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synth") / "tiny"
    assert main(["checkpoint", "synth", str(folder), "--set", "text_config.engram_head_dim=256"]) == 0
    return folder


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_checkpoint_passes_its_own_checks(tiny: Path) -> None:
    model = load_config(tiny)
    Checkpoint.open(tiny).check(model)
    check_tables(model)
    load_token_map(tiny / "tokenizer.json", model)
    config = json.loads((tiny / "config.json").read_text())
    assert len(config["text_config"]["compress_ratios"]) == model.num_layers + 3
    assert config["quantization_config"]["expert_dtype"] == "fp4" and "vision_config" in config
    names = {path.name for path in tiny.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= names


def test_safetensors_reads_every_shard_and_the_index_agrees(tiny: Path) -> None:
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    found, size = {}, 0
    for path in sorted(tiny.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                found[name] = path.name
                size += file.get_tensor(name).nbytes
    assert found == index["weight_map"]
    assert size == index["metadata"]["total_size"]
    assert len(set(found.values())) == 4
    assert {"mtp.0.main_norm.weight", "image_start", "vision.patch_embed.weight"} <= found.keys()
    with safe_open(tiny / found["layers.1.engram.embed.scale"], "pt") as file:
        assert file.get_slice("layers.1.engram.embed.scale").get_shape()[1] == 8


def test_each_engram_table_lies_in_a_shard_of_its_own(tiny: Path) -> None:
    entries = Checkpoint.open(tiny).entries
    for layer in (1, 4):
        path = entries[f"layers.{layer}.engram.embed.weight"].path
        assert {n for n, e in entries.items() if e.path == path} == {
            f"layers.{layer}.engram.embed.weight",
            f"layers.{layer}.engram.embed.scale",
        }


def test_the_same_seed_writes_the_same_bytes_and_another_does_not(tmp_path: Path) -> None:
    config = synthetic_config("tiny")
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_synthetic(tmp_path / name, config, seed)
    a, b, c = (digest(tmp_path / name) for name in "abc")
    assert a == b
    assert all(a[name] != c[name] for name in a if name.endswith(".safetensors"))


def test_the_shard_count_and_quantisation_change_the_files_not_the_model(tmp_path: Path) -> None:
    results = []
    for name, quantise, shards in (("one", True, 1), ("many", True, 7), ("plain", False, 1)):
        write_synthetic(tmp_path / name, synthetic_config("tiny", quantise=quantise), 1, shards)
        model, checkpoint = load_config(tmp_path / name), Checkpoint.open(tmp_path / name)
        checkpoint.check(model)
        results.append(load_weights(checkpoint, model, Shard(), torch.float32, "cpu"))
    one, many, plain = results
    for key, value in one.items():
        assert torch.equal(value, many[key])
        # Quantising moves values by less than one step of their format.
        assert (value - plain[key]).abs().max() <= 0.26 * plain[key].abs().max()
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()


def test_an_independent_reader_gets_the_same_values_and_no_term_of_the_model_vanishes(tmp_path: Path) -> None:
    write_synthetic(tmp_path, synthetic_config("tiny"), shards=1, extra_tensors=False)
    reader = oracle.M(str(tmp_path))
    weights = load_weights(Checkpoint.open(tmp_path), load_config(tmp_path), Shard(), torch.float32, "cpu")
    for name, value in weights.items():
        parts = (
            [reader.w[f"{name.replace('.w', f'.{e}.w')}.weight"] for e in range(8)] if ".experts.w" in name else None
        )
        assert torch.equal(value, torch.stack(parts) if parts else reader.w[name])

    ids = torch.randint(3, 497, (120,), generator=torch.Generator().manual_seed(0)).tolist()
    base = reader.forward(ids)
    assert 1.5 < base.std() < 4
    terms = (
        "engram.embed",
        "attn_sink",
        "gate.bias",
        "wgate",
        "weights_proj",
        "hc_attn_base",
        "hc_ffn_fn",
        "shared_experts.w2",
    )
    for term in terms:
        kept = {name: value for name, value in reader.w.items() if term in name}
        reader.w.update({name: torch.zeros_like(value) for name, value in kept.items()})
        moved = (reader.forward(ids) - base).abs().mean() / base.std()
        reader.w.update(kept)
        assert moved > 0.1, f"{term} hardly matters: {moved:.3f}"


def test_every_preset_and_override_gives_a_valid_config() -> None:
    for preset in PRESETS:
        check_tables(parse_config(synthetic_config(preset)))
    config = synthetic_config("tiny", {"text_config.n_routed_experts": 12, "text_config.engram_vocab_size": 67})
    assert parse_config(config).num_experts == 12
    check_tables(parse_config(config))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("text_config.num_hidden_layers", 30, "compress_ratios has 8 entries for 30 layers"),
        ("text_config.vocab_size", 100, "vocab_size is 100.*at least 274"),
        ("text_config.o_groups", 3, "o_groups is 3"),
        ("text_config.engram_layer_ids", "1", "engram_layer_ids"),
        ("model_type.x", 1, "model_type is no object"),
    ],
)
def test_an_override_that_does_not_fit_is_refused_by_name(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        synthetic_config("tiny", {path: value})


def test_the_tokenizer_serves_the_chat_encoding(tiny: Path) -> None:
    encoding = recipe.DeepseekV41Encoding().with_tokenizer(recipe.Tokenizer.from_file(str(tiny / "tokenizer.json")))
    tool = recipe.ToolDefinition("f", "does f", {"type": "object", "properties": {"a": {"type": "string"}}})
    conversation = recipe.Conversation(
        [
            recipe.SystemMessage("Be kind.", tools=[tool]),
            recipe.UserMessage("Hi <think> <｜User｜> é 你好"),
            recipe.AssistantMessage("ok", "because", [recipe.ToolCall("1", "f", '{"a":"x"}')]),
            recipe.ToolMessage("result", "1"),
            recipe.LatestReminderMessage("soon"),
            recipe.UserMessage("again"),
        ]
    )
    ids, tokenizer = encoding.encode(conversation), Tokenizer.from_file(str(tiny / "tokenizer.json"))
    rendered = encoding.render_conversation(conversation)
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered.prompt
    assert ids[0] == 0 and tokenizer.get_vocab_size() == load_config(tiny).vocab_size
    markers = [rendered.prompt[a:b] for a, b in rendered.special_ranges]
    assert all(tokenizer.token_to_id(marker) is not None for marker in markers)
    user = tokenizer.token_to_id("<｜User｜>")
    assert ids.count(user) == markers.count("<｜User｜>") == 3  # the spelling inside the text is no token


def test_every_byte_round_trips_through_the_tokenizer(tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    text = "".join(map(chr, range(1, 256))) + "naïve 数学 🙂\r\n\t the  answer"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode(" the answer").ids) == 2


def test_writer_refuses_wrong_tensors_by_name(tmp_path: Path) -> None:
    config = synthetic_config("tiny")
    specs = tensor_table(parse_config(config))
    good = [(spec.name, torch.zeros(spec.shape)) for spec in specs]
    bad_value = torch.zeros(specs[0].shape)
    bad_value[1, 2] = float("inf")
    for tensors, message in (
        (good[1:], "1 tensors are missing: embed.weight"),
        ([*good, ("layers.99.x", torch.zeros(1))], "layers.99.x is no tensor of this config"),
        ([*good, good[0]], "embed.weight is given twice"),
        ([("embed.weight", torch.zeros(3, 4))], r"embed.weight has shape \[3, 4\], not \[512, 64\]"),
        ([("embed.weight", bad_value)], "embed.weight holds a value that is not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            write_checkpoint(tmp_path, config, tensors, shards=2)
        assert not (tmp_path / "config.json").exists()


def test_dummy_weights_have_the_keys_and_spreads_of_the_real_ones_on_every_topology(tiny: Path) -> None:
    model = load_config(tiny)
    real = load_weights(Checkpoint.open(tiny), model, Shard(), torch.float32, "cpu")
    whole = dummy_weights(model, Shard(), torch.float32, "cpu")
    assert {k: v.shape for k, v in whole.items()} == {k: v.shape for k, v in real.items()}
    for key, value in whole.items():
        if value.numel() > 1000:
            assert float(value.std()) == pytest.approx(float(real[key].std()), rel=0.1)
    ranks = [dummy_weights(model, Shard(r, 2, 4), torch.float32, "cpu", keep_quantized=True) for r in range(4)]
    for spec in tensor_table(model):
        if spec.optional or spec.split.kind == "engram":
            continue
        key = spec.stack or spec.name
        parts = [r[key].dequantise(torch.float32) if isinstance(r[key], QuantTensor) else r[key] for r in ranks]
        if spec.split.kind == "replicate":
            assert all(torch.equal(part, whole[key]) for part in parts)
        elif spec.split.kind == "expert":
            assert torch.equal(torch.cat(parts), whole[key])
        else:
            assert torch.equal(torch.cat(parts[:2], int(spec.split.kind == "cols")), whole[key])


def test_dummy_engram_rows_equal_the_synthetic_table_up_to_its_rounding(tiny: Path) -> None:
    model = load_config(tiny)
    ids = np.arange(0, 1500, 7)
    for real, dummy in zip(
        open_engram_tables(Checkpoint.open(tiny), model, torch.float32),
        dummy_engram_tables(model, torch.float32),
        strict=True,
    ):
        values = dummy.lookup(ids)
        assert (real.lookup(ids) - values).abs().max() <= values.abs().max() / 16
        with pytest.raises(IndexError, match="outside a table"):
            dummy.lookup(np.array([dummy.rows]))


def test_inspect_reports_what_each_rank_holds(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", str(tiny), "-tp", "2", "-pcp", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    model, checkpoint = load_config(tiny), Checkpoint.open(tiny)
    assert sum(k["tensors"] for k in report["tensors"]) + sum(g["tensors"] for g in report["skipped"].values()) == len(
        checkpoint.entries
    )
    total = sum(k["bytes"] for k in report["tensors"]) + sum(g["bytes"] for g in report["skipped"].values())
    assert total == sum(report["files"].values())
    assert report["skipped"]["mtp"]["tensors"] == 3 and report["problems"] is None
    for rank in report["ranks"]:
        args = (checkpoint, model, Shard(rank["rank"], 2, 4), torch.bfloat16, "cpu")
        assert sum(t.nbytes for t in load_weights(*args).values()) == rank["cpu_bytes"]
        assert sum(t.nbytes for t in load_weights(*args, keep_quantized=True).values()) == rank["gpu_bytes"]
    assert [rank["experts"] for rank in report["ranks"]] == [[0, 2], [2, 4], [4, 6], [6, 8]]


def test_inspect_works_from_a_config_alone_and_prints_the_table(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "Ranks" in shown and "Files" not in shown
    assert main(["checkpoint", "inspect", str(tmp_path), "--table"]) == 0
    assert "| layers.L.attn.wo_b.weight | [64, 128] | fp8 | [2, 4] | 16 | columns by group |" in capsys.readouterr().out


def test_inspect_fails_with_the_names_of_a_checkpoint_that_does_not_fit(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in tiny.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["q_lora_rank"] = 32
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 1
    assert "layers.0.attn.q_norm.weight is BF16 [64], not BF16 [32]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "text_config.hidden_size"], "PATH=JSON is needed"),
        (["--set", "text_config.hidden_size=x"], "PATH=JSON is needed"),
        (["--shards", "0"], "--shards is 0"),
    ],
)
def test_synth_refuses_bad_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["checkpoint", "synth", str(tmp_path / "x"), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_synth_does_not_replace_a_checkpoint_unasked(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = digest(tiny)
    assert main(["checkpoint", "synth", str(tiny)]) == 1
    assert "--force replaces it" in capsys.readouterr().err
    assert digest(tiny) == before


MEASURE = """
import re, sys, torch
from paraflash.checkpoint.load import Checkpoint, load_weights
from paraflash.checkpoint.tensors import Shard
from paraflash.config.model import load_config

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def load(folder):
    model, checkpoint = load_config(folder), Checkpoint.open(folder)
    checkpoint.check(model)
    return load_weights(checkpoint, model, Shard(1, 2, 2), torch.bfloat16, "cpu", keep_quantized=keep)

folder, small, keep = sys.argv[1], sys.argv[2], sys.argv[3] == "keep"
load(small)  # what torch itself loads at its first use is not the checkpoint's
before = peak()
weights = load(folder)
print(peak() - before, sum(t.nbytes for t in weights.values()))
"""


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 60 MB of weights, large enough to see in a process's memory."""
    folder = tmp_path_factory.mktemp("larger")
    sizes = {"hidden_size": 512, "vocab_size": 24576, "moe_intermediate_size": 256}
    config = synthetic_config("tiny", {f"text_config.{k}": v for k, v in sizes.items()})
    tensors = ((s.name, torch.zeros(s.shape)) for s in tensor_table(parse_config(config)))
    write_checkpoint(folder, config, tensors, shards=2)
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("mode", ["dequantise", "keep"])
def test_peak_memory_of_loading_is_the_shard_plus_one_tensor(tiny: Path, larger: Path, mode: str) -> None:
    command = [sys.executable, "-c", MEASURE, str(larger), str(tiny), mode]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    growth, shard = map(int, done.stdout.split())
    sizes = [2 * int(np.prod(s.shape)) for s in tensor_table(load_config(larger))]
    assert shard < 0.6 * sum(sizes)
    assert 0.8 * shard <= growth <= shard + max(sizes)
