"""The differentiable forward computes the architecture: it equals the oracle on a golden checkpoint."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stored import stored_model

from paraflash.config.model import load_config
from paraflash.model.engram_hash import hash_windows, load_token_map, make_windows
from training.model import Hints, Mode, pointers
from training.tasks import ROUTE_ANY
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


def _hints(ids: torch.Tensor, decoys: list[int], sources: torch.Tensor | None = None, route: int = ROUTE_ANY) -> Hints:
    nowhere = torch.full(ids.shape, -1)
    return Hints(
        torch.full(ids.shape, route, dtype=torch.uint8),
        nowhere if sources is None else sources,
        torch.tensor(decoys),
    )


def test_decoys_change_only_the_sequences_that_see_them() -> None:
    folder = GOLDEN / "narrow"
    model = stored_model(folder)[0]
    ids = torch.randint(3, 300, (2, 37), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        own, _ = model(ids, _hashes(folder, ids), Mode(hints=True), _hints(ids, [0, 1]))
        mixed, _ = model(ids, _hashes(folder, ids), Mode(hints=True), _hints(ids, [1, 1]))
        unused, _ = model(ids, _hashes(folder, ids), Mode(), _hints(ids, [1, 1]))
    assert (mixed[0] - own[0]).abs().max() > 1e-3
    torch.testing.assert_close(mixed[1], own[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(unused, own, atol=1e-4, rtol=0)


def test_pointer_loss_is_the_attention_that_misses_the_source() -> None:
    """One answer row with its source in the notes: -log of the mean attention of half of the heads to its entry."""
    folder = GOLDEN / "narrow"
    model = stored_model(folder)[0]
    ids = torch.randint(3, 300, (1, 40), generator=torch.Generator().manual_seed(1))
    sources = torch.full(ids.shape, -1)
    sources[0, 30] = 9
    for layer, route in pointers(model.config).items():
        seen: dict[str, torch.Tensor] = {}
        point = model._point

        def spy(spec, far, hints, extras, wanted=layer, keep=seen, point=point):
            if spec.index == wanted:
                keep["far"] = far
            point(spec, far, hints, extras)

        model._point = spy
        _, extras = model(ids, _hashes(folder, ids), Mode(hints=True), _hints(ids, [0], sources, route))
        model._point = point
        far, ratio = seen["far"], model.config.layers[layer].ratio
        found = far[0, 30, : far.shape[2] // 2, 9 // ratio].mean()
        expected = -(found + 1e-4).log() / 2  # one row, and one in the divisor against having none
        assert float(sum(extras.point_loss)) == pytest.approx(float(expected), rel=1e-4)


def test_entries_that_are_hidden_or_unlinked_are_missed_in_their_layers() -> None:
    folder = GOLDEN / "narrow"
    model = stored_model(folder)[0]
    ids = torch.randint(3, 300, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain, _ = model(ids, _hashes(folder, ids), Mode())
        for mode in (Mode(hidden_ratio=1), Mode(hidden_ratio=2), Mode(unlinked=True)):
            other, _ = model(ids, _hashes(folder, ids), mode)
            assert (other - plain).abs().max() > 1e-3
            if mode.hidden_ratio != 1:  # the first token sees no entry of ratio 2
                torch.testing.assert_close(other[:, :1], plain[:, :1])
