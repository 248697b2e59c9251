"""Which Engram rows a token reads: pure integer arithmetic on token ids, the same on every rank (model.md 3.12).

A raw id goes through the *token map* (ids whose normalised text is equal share a class); the classes of a token and
its predecessors are hashed once per n-gram size, head and Engram layer into a row of that layer's table.
Shapes: ids [n] -> windows [n, max_ngram] -> rows [n, engram layers, columns], column = (ngram - 2) * heads + head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paraflash.config.model import ConfigError, ModelConfig

Ints = NDArray[np.int64]
NO_TOKEN = -1  # a look-back position before the start of the sequence
_SEED_STEP = 10007  # multiplier seed of layer L is 10007 * L


def token_map(tokenizer_path: str | Path) -> tuple[Ints, int]:
    """Class of every token id, in first-seen order, and the number of classes.

    Reads `tokenizer.json`; returns ([len(tokenizer)] int64, classes).
    """
    from tokenizers import Regex, Tokenizer, normalizers

    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    normaliser = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            # A lone blank is a word of its own: it is carried past the strip as a private-use character.
            normalizers.Replace(Regex(r"^ $"), "\ue000"),
            normalizers.Strip(),
            normalizers.Replace("\ue000", " "),
        ]
    )
    classes: dict[str, int] = {}
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    result = np.empty(size, dtype=np.int64)
    for token in range(size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" in text:  # a piece of a character: only its vocabulary spelling tells it apart
            key = tokenizer.id_to_token(token) or text
        else:
            key = normaliser.normalize_str(text) or text
        result[token] = classes.setdefault(key, len(classes))
    return result, len(classes)


def load_token_map(tokenizer_path: str | Path, model: ModelConfig) -> Ints:
    """`token_map` of a model folder's tokenizer, checked against the config; raises ConfigError if they disagree."""
    result, classes = token_map(tokenizer_path)
    if classes != model.engram_compressed_vocab_size:
        raise ConfigError(
            f"text_config.engram_compressed_vocab_size is {model.engram_compressed_vocab_size}, but {tokenizer_path} "
            f"gives {classes} classes; with another tokenizer every Engram row would be the wrong one"
        )
    return result


def table_rows(model: ModelConfig) -> Ints:
    """[engram layers]: rows that each layer's table must have, the sum of its primes."""
    return constants_of(model).primes.sum(axis=1)


def check_tables(model: ModelConfig) -> None:
    """Raises ConfigError where engram_num_embeddings is not what the hash columns need."""
    rows = table_rows(model).tolist()
    if rows != list(model.engram_rows):
        raise ConfigError(
            f"text_config.engram_num_embeddings is {list(model.engram_rows)}; the hash columns need {rows}"
        )


def make_windows(ids: NDArray[np.integer], lookback: NDArray[np.integer], max_ngram: int) -> Ints:
    """[n, max_ngram]: column i is the id i positions before each of `ids` [n], NO_TOKEN before the sequence start.

    `lookback` holds up to max_ngram - 1 ids before ids[0], oldest first; it is shorter only at the sequence start.
    """
    new: Ints = np.asarray(ids, np.int64)
    if max_ngram < 2:
        return new[:, None]
    known: Ints = np.asarray(lookback, np.int64)[-(max_ngram - 1) :]
    padded = np.concatenate([np.full(max_ngram - 1 - len(known), NO_TOKEN, np.int64), known, new])
    if len(new) == 1:  # a decode row: making a view of one window takes longer than all else here
        return padded[None, ::-1]
    return np.lib.stride_tricks.sliding_window_view(padded, max_ngram)[:, ::-1]


def hash_windows(model: ModelConfig, mapping: Ints, windows: Ints) -> Ints:
    """Table rows [n, engram layers, columns] of raw-id windows [n, max_ngram] (several requests may be stacked).

    A look-back that is NO_TOKEN makes itself and all further ones the pad class. Ids past the tokenizer (embedding
    rows without a token) count as pad too, so that a sampled one cannot stop the engine.
    """
    constants = constants_of(model)
    windows = np.asarray(windows, np.int64)
    if windows.ndim != 2 or windows.shape[1] != model.engram_max_ngram:
        raise ValueError(f"windows has shape {list(windows.shape)}; [n, {model.engram_max_ngram}] is needed")
    if (windows[:, 0] < 0).any():
        raise ValueError(f"token id {int(windows[:, 0].min())} is negative")
    pad = mapping[model.engram_pad_token_id]
    dead = np.logical_or.accumulate(windows < 0, axis=1) | (windows >= len(mapping))
    classes = np.where(dead, pad, mapping[np.where(dead, 0, windows)])
    products = classes[:, None, :] * constants.multipliers  # [n, layers, ngram]; below 2^63 by the multiplier bound
    rolls = np.bitwise_xor.accumulate(products, axis=2)[:, :, 1:]  # one per n-gram size, from 2 on
    return np.repeat(rolls, model.engram_heads, axis=2) % constants.primes + constants.offsets


@dataclass(frozen=True)
class Constants:
    primes: Ints  # [layers, columns] table size of each hash column, used once over all layers and columns
    offsets: Ints  # [layers, columns] first table row of each column
    multipliers: Ints  # [layers, max_ngram] odd factor of each look-back distance


def constants_of(model: ModelConfig) -> Constants:
    """Those of a model; they follow from its config alone."""
    return _constants(
        model.engram_layers,
        model.engram_vocab_size,
        model.engram_max_ngram,
        model.engram_heads,
        model.engram_compressed_vocab_size,
    )


@lru_cache(maxsize=8)
def _constants(layers: tuple[int, ...], start: int, max_ngram: int, heads: int, classes: int) -> Constants:
    used: set[int] = set()
    columns = (max_ngram - 1) * heads
    table = np.zeros((len(layers), columns), np.int64)
    for row in table:
        for ngram in range(max_ngram - 1):
            candidate = start  # each n-gram size searches from the start again; `used` keeps them distinct
            for head in range(heads):
                while candidate in used or not _is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                row[ngram * heads + head] = candidate
    bound = (2**63 - 1) // classes // 2
    generators = [np.random.default_rng(_SEED_STEP * layer) for layer in layers]
    factors = [rng.integers(0, bound, max_ngram, np.int64) * 2 + 1 for rng in generators]
    return Constants(
        primes=table,
        offsets=np.cumsum(table, axis=1) - table,
        multipliers=np.stack(factors) if factors else np.zeros((0, max_ngram), np.int64),
    )


def _is_prime(number: int) -> bool:
    if number < 4 or number % 2 == 0:
        return number in (2, 3)
    divisors = np.arange(3, int(number**0.5) + 2, 2)
    return bool((number % divisors[divisors < number] != 0).all())
