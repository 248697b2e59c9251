"""The differentiable forward computes the architecture: it equals the oracle on a golden checkpoint."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stored import stored_model

from paraflash.config.model import load_config
from paraflash.model.engram_hash import hash_windows, load_token_map, make_windows
from training.model import Mode
from training.weights import from_checkpoint, to_checkpoint

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def _hashes(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    config = load_config(folder)
    mapping = load_token_map(folder / "tokenizer.json", config)
    windows = [make_windows(row.numpy(), row.numpy()[:0], config.engram_max_ngram) for row in ids]
    return torch.stack([torch.from_numpy(hash_windows(config, mapping, w)) for w in windows])


@pytest.mark.parametrize("length", [1, 2, 17, 130])
def test_forward_equals_golden_logits_without_rounding(length: int) -> None:
    folder = GOLDEN / "narrow"
    model = stored_model(folder)[0]
    expected = load_file(folder / "expected_plain.safetensors")
    number = next(i for i in range(7) if len(expected[f"prompt.{i}.input_ids"]) == length)
    ids = expected[f"prompt.{number}.input_ids"][None]
    with torch.no_grad():
        logits, _ = model(ids, _hashes(folder, ids), Mode(sparse=True))
    torch.testing.assert_close(logits[0], expected[f"prompt.{number}.logits"], atol=1e-4, rtol=0)


def test_forward_equals_oracle_with_trained_rounding_where_nothing_flips() -> None:
    folder = GOLDEN / "narrow_fp8"
    model = stored_model(folder)[0]
    expected = load_file(folder / "expected.safetensors")
    for number in range(4):
        ids = expected[f"prompt.{number}.input_ids"][None]
        with torch.no_grad():
            logits, _ = model(ids, _hashes(folder, ids), Mode(sparse=True, round_cache=True))
        torch.testing.assert_close(logits[0], expected[f"prompt.{number}.logits"], atol=2e-3, rtol=0)


def test_weights_already_in_the_released_format_are_not_rounded_again() -> None:
    folder = GOLDEN / "narrow_fp8"
    model = stored_model(folder)[0]
    ids = load_file(folder / "expected.safetensors")["prompt.3.input_ids"][None]
    with torch.no_grad():
        plain, _ = model(ids, _hashes(folder, ids), Mode(sparse=True))
        rounded, _ = model(ids, _hashes(folder, ids), Mode(sparse=True, round_weights=True))
    torch.testing.assert_close(plain, rounded, atol=1e-6, rtol=0)


def test_parameters_survive_the_way_to_checkpoint_names_and_back() -> None:
    model = stored_model(GOLDEN / "narrow")[0]
    back = from_checkpoint(model.config, to_checkpoint(model.config, model.parameters_by_name))
    for name, parameter in model.parameters_by_name.items():
        assert torch.equal(parameter, back[name]), name


def test_batched_rows_do_not_influence_each_other() -> None:
    folder = GOLDEN / "narrow"
    model = stored_model(folder)[0]
    ids = torch.randint(3, 300, (2, 37), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        both, _ = model(ids, _hashes(folder, ids), Mode(sparse=True))
        one, _ = model(ids[1:], _hashes(folder, ids[1:]), Mode(sparse=True))
    torch.testing.assert_close(both[1:], one, atol=1e-4, rtol=0)
