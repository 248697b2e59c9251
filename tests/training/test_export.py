"""The export writes what the engine reads: its logits are those of the trainer's own forward on the stored weights."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from in_process import GREEDY, generate, local_engine
from stored import stored_model

from paraflash.engine.sampling_params import SamplingParams
from paraflash.model.engram_hash import hash_windows, load_token_map, make_windows
from training import export, tasks, testset
from training.model import Miniature, Mode
from training.train import prepare, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The small setting with random weights, saved as the trainer saves it and exported."""
    weights, out = tmp_path_factory.mktemp("weights"), tmp_path_factory.mktemp("checkpoint")
    _, config, _ = prepare(weights, small=True)
    model = Miniature(config, seed=3)
    with torch.no_grad():
        model.parameters_by_name["ffn.gate_bias"].normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
    save(model, weights)
    assert export.export(weights, out) <= export.MOST_BYTES
    return out


def _trainer_logits(folder: Path, ids: list[int], mode: Mode) -> torch.Tensor:
    model, config = stored_model(folder)
    mapping = load_token_map(folder / "tokenizer.json", config)
    row = torch.tensor(ids)
    windows = make_windows(row.numpy(), row.numpy()[:0], config.engram_max_ngram)
    rows = torch.from_numpy(hash_windows(config, mapping, windows))
    with torch.no_grad():
        return model(row[None], rows[None], mode)[0][0]


def _engine_logits(folder: Path, ids: list[int], **options) -> torch.Tensor:
    """Logits of all positions but the last, prefilled in chunks over two ranks."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, **GREEDY)
    with local_engine(folder, pcp=2, max_num_batched_tokens=150, **options) as core:
        return torch.stack([torch.from_numpy(row) for row in generate(core, {"a": (ids, params)})["a"].rows])


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    """A recall problem that is long enough for the selection and the candidate filter to leave entries out."""
    turns = testset.test_problems("recall", 40)
    ids = tasks.prompt_ids(min(turns, key=lambda turn: len(turn.prompt)))
    assert len(ids) > 400
    return ids[:401]


def test_engine_computes_what_the_trainer_computes_without_cache_rounding(folder: Path, prompt: list[int]) -> None:
    ours = _trainer_logits(folder, prompt, Mode(sparse=True))
    theirs = _engine_logits(folder, prompt)
    torch.testing.assert_close(theirs, ours[:-1], atol=1e-4, rtol=0)


def test_engine_computes_what_the_trainer_computes_with_trained_rounding(folder: Path, prompt: list[int]) -> None:
    ours = _trainer_logits(folder, prompt, Mode(sparse=True, round_cache=True))[:-1]
    theirs = _engine_logits(folder, prompt, kv_cache_rounding="trained")
    # A value on a rounding border falls to either side by its last bit; most rows see none.
    off = (theirs - ours).abs().amax(1)
    assert off.median() < 2e-3
    assert (theirs.argmax(1) == ours.argmax(1)).float().mean() > 0.9


def test_exported_weights_are_the_trainers_rounded_ones(folder: Path, prompt: list[int]) -> None:
    model, config = stored_model(folder)
    first = Miniature(config, seed=3)
    with torch.no_grad():
        rounded = first._weights(Mode(round_weights=True))
    for name in ("attn.wq_b", "ffn.w1", "compressor.wkv"):
        torch.testing.assert_close(torch.stack(rounded[name]), model.parameters_by_name[name], rtol=3e-7, atol=0)
    torch.testing.assert_close(rounded["engram.embed.0"], model.parameters_by_name["engram.embed.0"], rtol=3e-7, atol=0)


def test_a_folder_that_grows_too_large_is_refused(tmp_path, monkeypatch) -> None:
    raw, config, _ = prepare(tmp_path, small=True)
    monkeypatch.setattr(export, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="at most 1000"):
        export.write_model(tmp_path, raw, Miniature(config).parameters_by_name)


def test_exported_config_is_the_trainers(folder: Path, tmp_path) -> None:
    raw, _, _ = prepare(tmp_path, small=True)
    assert json.loads((folder / "config.json").read_text()) == raw


def test_card_has_the_last_accuracies_of_the_log(folder: Path) -> None:
    assert "3.55 M parameters" in (folder / "README.md").read_text()
    row = {"eval": "end", "weights": "fp32", **dict.fromkeys(tasks.TASKS, 0.5)}
    text = export.card(1, 1, [{"step": 1}, row, {**row, "weights": "released format", "sort": 0.985}])
    assert "| fp32 | 50.0 |" in text and "98.5" in text
