"""The loader on the golden checkpoints: shards, exact values, errors by name, damaged files."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paraflash.checkpoint import memory
from paraflash.checkpoint.dummy import dummy_weights
from paraflash.checkpoint.files import CheckpointError
from paraflash.checkpoint.load import INDEX, Checkpoint, Weights, load_weights, open_engram_tables
from paraflash.checkpoint.memory import FP8_LINEARS, NotEnoughMemory, rank_bytes
from paraflash.checkpoint.quant import QuantTensor
from paraflash.checkpoint.tensors import Shard, tensor_table
from paraflash.config.model import load_config

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
FOLDERS = ["narrow", "narrow_fp8", "wide"]


def load(folder: Path, rank: int = 0, tp: int = 1, pcp: int = 1, **more: Any) -> Weights:
    model, checkpoint = load_config(folder), Checkpoint.open(folder)
    checkpoint.check(model)
    shard = Shard(rank, tp, tp * pcp)
    return load_weights(checkpoint, model, shard, more.pop("dtype", torch.float32), "cpu", **more)


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -value if sign else value


def raw_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Stored bytes of every tensor, by a header parse of our own."""
    data = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    result = {}
    for name, item in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + n for n in item["data_offsets"])
            result[name] = np.frombuffer(data[begin:end], np.uint8).reshape(*item["shape"], -1)
    return result


def test_quantised_weights_equal_the_formulas_applied_byte_by_byte() -> None:
    weights, raw = load(GOLDEN / "narrow_fp8"), raw_tensors(GOLDEN / "narrow_fp8")
    table = np.array([e4m3(b) for b in range(256)])
    name = "layers.3.attn.wo_b"
    codes, scale = raw[f"{name}.weight"][..., 0], raw[f"{name}.scale"][..., 0].astype(np.float64)
    expected = table[codes] * 2.0 ** (np.kron(scale, np.ones((32, 32))) - 127)
    np.testing.assert_array_equal(weights[f"{name}.weight"].numpy(), expected)

    packed, scale = (raw[f"layers.3.ffn.experts.5.w2.{n}"][..., 0] for n in ("weight", "scale"))
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.where(nibbles & 8, -1, 1) * magnitudes[nibbles & 7]
    expected = values * 2.0 ** (np.repeat(scale.astype(np.float64), 32, 1) - 127)
    np.testing.assert_array_equal(weights["layers.3.ffn.experts.w2"][5].numpy(), expected)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize(("tp", "pcp"), [(2, 1), (4, 1), (1, 2), (2, 2), (1, 3)])
def test_shards_put_together_equal_the_whole(folder: str, tp: int, pcp: int, keep: bool) -> None:
    model = load_config(GOLDEN / folder)
    whole = load(GOLDEN / folder)
    ranks = [load(GOLDEN / folder, r, tp, pcp, keep_quantized=keep) for r in range(tp * pcp)]
    values = [
        {k: t.dequantise(torch.float32) if isinstance(t, QuantTensor) else t for k, t in r.items()} for r in ranks
    ]
    for spec in tensor_table(model):
        if spec.optional or spec.split.kind == "engram":
            assert spec.name not in whole
        elif spec.expert is not None:
            joined = torch.cat([v[str(spec.stack)] for v in values if str(spec.stack) in v])
            assert torch.equal(joined[spec.expert], whole[str(spec.stack)][spec.expert])
        elif spec.split.kind == "replicate":
            assert all(torch.equal(v[spec.name], whole[spec.name]) for v in values)
        else:
            dim = int(spec.split.kind == "cols")
            assert torch.equal(torch.cat([v[spec.name] for v in values[:tp]], dim), whole[spec.name])
    for rank, weights in enumerate(ranks):
        sizes = rank_bytes(model, Shard(rank, tp, tp * pcp), 4, keep)
        assert sum(t.nbytes for t in weights.values()) == sizes.device


LINEARS = {"attn.wq_b.weight", "attn.indexer.wq_b.weight"}  # of narrow_fp8: those of multiples that can stay so


@pytest.mark.parametrize("dummy", [False, True], ids=["stored", "dummy"])
@pytest.mark.parametrize(
    ("kinds", "linears", "experts"),
    [
        ((), set(), False),
        (("fp4",), set(), True),
        (("fp4", FP8_LINEARS), LINEARS, True),
        ((FP8_LINEARS,), LINEARS, False),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_only_the_kinds_that_were_named_stay_in_their_codes(
    monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...], linears: set[str], experts: bool, tp: int, dummy: bool
) -> None:
    monkeypatch.setattr(memory, "ONE_BYTE_OUTPUTS", 1)  # all of so small a model are few
    folder, shard = GOLDEN / "narrow_fp8", Shard(tp - 1, tp, tp)
    model = load_config(folder)
    if dummy:
        whole, weights = (dummy_weights(model, shard, torch.float32, "cpu", 0, keep) for keep in (False, kinds))
    else:
        whole, weights = (load(folder, tp - 1, tp, keep_quantized=keep) for keep in (False, kinds))
    kept = {name: w for name, w in weights.items() if isinstance(w, QuantTensor)}
    assert {name.split(".", 2)[2] for name, w in kept.items() if w.kind == "fp8"} == linears
    assert any(w.kind == "fp4" for w in kept.values()) == experts
    assert all(torch.equal(w.dequantise(torch.float32), whole[name]) for name, w in kept.items())
    values = sum(w.data.numel() for w in kept.values() if w.kind == "fp8")
    counted, plain = (rank_bytes(model, shard, 4, k) for k in (kinds, [k for k in kinds if k != FP8_LINEARS]))
    assert plain.device - counted.device == 3 * values - values // 32


def test_f32_tensors_stay_f32_and_the_rest_takes_the_dtype() -> None:
    whole, half = load(GOLDEN / "narrow_fp8"), load(GOLDEN / "narrow_fp8", dtype=torch.bfloat16)
    for spec in tensor_table(load_config(GOLDEN / "narrow_fp8")):
        key = spec.stack or spec.name
        if key in half:
            assert half[key].dtype == (torch.float32 if spec.dtype == "f32" else torch.bfloat16)
            assert torch.equal(half[key].float(), whole[key])  # both are exact


def test_unquantised_values_equal_safetensors_own_reading() -> None:
    stored, weights = load_file(GOLDEN / "wide" / "model.safetensors"), load(GOLDEN / "wide")
    for name, tensor in weights.items():
        if ".experts." not in name:
            assert torch.equal(tensor, stored[name].float())
    assert torch.equal(weights["layers.2.ffn.experts.w3"][7], stored["layers.2.ffn.experts.7.w3.weight"].float())
    assert not any(name.startswith(("mtp", "vision", "aligner", "image")) for name in weights)


@pytest.mark.parametrize("folder", FOLDERS)
def test_engram_rows_equal_the_stored_table(folder: str) -> None:
    model, checkpoint = load_config(GOLDEN / folder), Checkpoint.open(GOLDEN / folder)
    raw = raw_tensors(GOLDEN / folder)
    for layer, table in zip(model.engram_layers, open_engram_tables(checkpoint, model, torch.float32), strict=True):
        codes = raw[f"layers.{layer}.engram.embed.weight"]
        ids = np.array([[0, table.rows - 1], [5, 5]])
        if model.quant:
            scale = raw[f"layers.{layer}.engram.embed.scale"][..., 0].astype(np.float64)
            values = np.vectorize(e4m3)(codes[..., 0]) * 2.0 ** (np.repeat(scale, 32, 1) - 127)
        else:
            values = (codes.copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)[..., 0]
        np.testing.assert_array_equal(table.lookup(ids).numpy(), values[ids])
        assert table.lookup(np.zeros(0, np.int64)).shape == (0, table.dim)
        for bad in (-1, table.rows):
            with pytest.raises(IndexError, match=f"row {bad} is outside a table of {table.rows} rows"):
                table.lookup(np.array([0, bad]))


def copy(folder: str, to: Path) -> Path:
    target = to / folder
    shutil.copytree(GOLDEN / folder, target, ignore=shutil.ignore_patterns("expected*", "stability*"))
    return target


def test_missing_unexpected_and_misfit_tensors_are_reported_together_by_name(tmp_path: Path) -> None:
    folder = copy("narrow", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["layers.2.attn.compressor.wgate.weight"]
    del tensors["layers.0.ffn.gate.bias_vl"]  # never needed for text
    tensors["layers.9.attn.extra"] = torch.zeros(2)
    tensors["norm.weight"] = torch.zeros(63, dtype=torch.bfloat16)
    tensors["layers.1.attn.attn_sink"] = tensors["layers.1.attn.attn_sink"].bfloat16()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder).check(load_config(folder))
    text = str(caught.value)
    assert "(4 differences)" in text
    assert "missing: layers.2.attn.compressor.wgate.weight BF16 [64, 64]" in text
    assert "unexpected: layers.9.attn.extra F32 [2]" in text
    assert "norm.weight is BF16 [63], not BF16 [64]" in text
    assert "layers.1.attn.attn_sink is BF16 [8], not F32 [8]" in text


def test_a_config_of_another_format_lists_the_first_differences_and_the_count() -> None:
    with pytest.raises(CheckpointError, match=r"and \d+ more"):
        Checkpoint.open(GOLDEN / "narrow").check(load_config(GOLDEN / "narrow_fp8"))


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    path = copy("narrow", tmp_path) / "model.safetensors"
    data = path.read_bytes()
    for keep, message in ((len(data) - 1, "cut short"), (100, "no complete safetensors file"), (3, "no complete")):
        path.write_bytes(data[:keep])
        with pytest.raises(CheckpointError, match=message) as caught:
            Checkpoint.open(path.parent)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{not json", "damaged header"),
        (b"[1, 2]   ", "an object is needed"),
        (b"\xff\xfe\xfd\xfc", "damaged header"),
        (b'{"a": {"dtype": "F32"}}', "a needs dtype, shape and data_offsets"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "a needs dtype"),
        (b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}}', "spans 4 bytes"),
    ],
)
def test_a_damaged_header_is_a_clear_error(tmp_path: Path, header: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


def test_a_header_length_beyond_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(CheckpointError, match="header length"):
        Checkpoint.open(tmp_path)


def test_a_folder_without_weights_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        Checkpoint.open(tmp_path)


def test_an_index_that_does_not_fit_its_files_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "x.safetensors")

    def index(value: Any) -> None:
        (tmp_path / INDEX).write_text(json.dumps(value))

    for value, message in (
        ({"weight_map": {"a": "x.safetensors", "b": "x.safetensors", "c": "x.safetensors"}}, "c \\(x.safetensors\\)"),
        ({"weight_map": {"a": "x.safetensors"}}, "lists b in no file"),
        ({"weight_map": {"a": "y.safetensors"}}, "y.safetensors cannot be read"),
        ({}, "damaged"),
        ([], "damaged"),
        ({"weight_map": {"a": 3}}, "damaged"),
    ):
        index(value)
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(tmp_path)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", ["layers.0.attn.wkv.scale", "layers.3.ffn.experts.2.w1.scale"])
def test_a_nan_scale_is_refused_by_name(tmp_path: Path, name: str, keep: bool) -> None:
    folder = copy("narrow_fp8", tmp_path)
    entry = Checkpoint.open(folder).entries[name]
    with entry.path.open("r+b") as file:
        file.seek(entry.start + 1)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match=f"{name} holds the scale byte 255"):
        load(folder, keep_quantized=keep)


def test_too_little_memory_is_refused_with_the_numbers_before_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paraflash.checkpoint.memory.available_memory", lambda device: 1 << 20)
    monkeypatch.setattr("paraflash.checkpoint.load.read_rows", lambda *a: pytest.fail("read before the check"))
    with pytest.raises(NotEnoughMemory, match=r"0\.01 GiB are needed, but cpu has 0\.00 GiB free"):
        load(GOLDEN / "narrow")


def test_progress_ends_at_the_total() -> None:
    seen: list[tuple[int, int]] = []
    load(GOLDEN / "narrow", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
