"""Engram hashing against the golden files and the vectors of model.md 3.12."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from paraflash.config.model import ConfigError, ModelConfig, load_config
from paraflash.model import engram_hash as eh

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
FOLDERS = ("narrow", "narrow_fp8", "wide")


def released() -> ModelConfig:
    return replace(
        load_config(GOLDEN / "narrow"),
        engram_layers=(1, 14),
        engram_rows=(384006168, 384016682),
        engram_vocab_size=16_000_000,
        engram_heads=8,
        engram_compressed_vocab_size=99092,
    )


def hash_ids(model: ModelConfig, mapping: eh.Ints, ids: eh.Ints, lookback: eh.Ints) -> eh.Ints:
    return eh.hash_windows(model, mapping, eh.make_windows(ids, lookback, model.engram_max_ngram))


@pytest.mark.parametrize("folder", FOLDERS)
def test_constants_and_ids_equal_the_golden_files(folder: str) -> None:
    model = load_config(GOLDEN / folder)
    mapping = eh.load_token_map(GOLDEN / folder / "tokenizer.json", model)
    with safe_open(GOLDEN / folder / "expected.safetensors", "np") as f:
        np.testing.assert_array_equal(mapping, f.get_tensor("engram.token_map"))
        np.testing.assert_array_equal(
            eh.constants_of(model).primes.reshape(-1), f.get_tensor("engram.primes").reshape(-1)
        )
        np.testing.assert_array_equal(eh.constants_of(model).multipliers, f.get_tensor("engram.multipliers"))
        ids = f.get_tensor(f"prompt.{int(f.get_tensor('trace.prompt'))}.input_ids")
        expected = f.get_tensor("trace.engram.hash_ids")
    np.testing.assert_array_equal(hash_ids(model, mapping, ids, np.zeros(0)), expected)
    for cut in (1, 2, 3, 17, len(ids) - 1):
        rest = hash_ids(model, mapping, ids[cut:], ids[max(0, cut - 3) : cut])
        np.testing.assert_array_equal(rest, expected[cut:])
    eh.check_tables(model)


def test_released_constants() -> None:
    model = released()
    table = eh.constants_of(model).primes
    assert (table[0] - 16_000_000).tolist() == [
        *(57, 79, 81, 97, 121, 129, 133, 183),
        *(189, 207, 211, 253, 277, 289, 307, 321),
        *(339, 381, 393, 399, 403, 409, 447, 463),
    ]
    assert (table[1] - 16_000_000).tolist() == [
        *(477, 487, 499, 507, 511, 573, 609, 627),
        *(667, 669, 693, 697, 711, 729, 759, 769),
        *(781, 799, 813, 819, 841, 877, 879, 889),
    ]
    assert eh.table_rows(model).tolist() == [384006168, 384016682]
    assert eh.constants_of(model).multipliers.tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]


def test_released_hash_vector() -> None:
    rows = eh.hash_windows(released(), np.arange(99092), np.array([[10, 20, 30, 40]]))[0]
    assert rows[0, :4].tolist() == [10250667, 16051853, 42761335, 48437066]
    assert rows[0, -2:].tolist() == [365830131, 381142068]
    assert rows[1, :2].tolist() == [13402985, 31185432]
    assert rows[1, -2:].tolist() == [360884307, 370522085]


def test_lookback_is_blocked_from_the_first_missing_token_on() -> None:
    model, mapping = released(), np.arange(99092)
    blocked = eh.hash_windows(model, mapping, np.array([[10, eh.NO_TOKEN, 30, 40]]))
    np.testing.assert_array_equal(blocked, eh.hash_windows(model, mapping, np.array([[10, 2, 2, 2]])))


def test_an_id_without_a_token_counts_as_pad_alone() -> None:
    model, mapping = released(), np.arange(99092)
    past = eh.hash_windows(model, mapping, np.array([[10, 99092, 30, 40]]))
    np.testing.assert_array_equal(past, eh.hash_windows(model, mapping, np.array([[10, 2, 30, 40]])))


def test_another_tokenizer_or_table_size_is_refused_by_name() -> None:
    model = load_config(GOLDEN / "narrow")
    with pytest.raises(ConfigError, match=r"engram_compressed_vocab_size is 296.*297 classes"):
        eh.load_token_map(GOLDEN / "narrow" / "tokenizer.json", replace(model, engram_compressed_vocab_size=296))
    with pytest.raises(ConfigError, match=r"engram_num_embeddings is \[1040, 1787\].*\[1040, 1786\]"):
        eh.check_tables(replace(model, engram_rows=(1040, 1787)))
    with pytest.raises(ValueError, match="-3 is negative"):
        hash_ids(model, np.arange(297), np.array([-3]), np.zeros(0))
