"""A step that decodes one row of each request, from its `Columns` to arrays [n], n rows with those that fill it up.

A row that fills up is at position 0, writes to a spare slot and to the null block, and nobody wants its result.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paraflash.engine.messages import Columns, Number
from paraflash.kernels.sizes import power_of_2
from paraflash.model.decode_batch import DecodeStep, block_tables
from paraflash.model.engram_hash import NO_TOKEN

Ints = NDArray[np.int64]


def padded_rows(rows: int, ranks: int) -> int:
    """Rows of a decode step of `rows` requests: equally many on each PCP rank, in steps of at most a half."""
    each = -(-rows // ranks)
    power = power_of_2(each)
    return ranks * (power * 3 // 4 if power > 16 and each <= power * 3 // 4 else power)


def decode_step(columns: Columns, rows: int, spare_slot: int, block_size: int) -> DecodeStep:
    numbers = columns.numbers
    filled = np.zeros((rows, len(Number)), np.int64)
    filled[:, Number.SLOT] = spare_slot
    filled[: len(numbers)] = numbers
    position = filled[:, Number.COMPUTED]
    needed = int(position.max()) // block_size + 1
    return DecodeStep(
        slot=filled[:, Number.SLOT],
        position=position,
        window_start=filled[:, Number.WINDOW_START],
        write_start=filled[:, Number.WRITE_START],
        tables=block_tables(columns.block_ids, numbers[:, Number.BLOCKS], rows, needed),
    )


def decode_tokens(columns: Columns, rows: int) -> Ints:
    """[rows] token ids."""
    found = np.zeros(rows, np.int64)
    found[: len(columns.token_ids)] = columns.token_ids
    return found


def decode_windows(columns: Columns, tokens: Ints, max_ngram: int) -> Ints:
    """[n, max_ngram] windows of `decode_tokens`, as `engram_hash.make_windows` of each request."""
    reach = max_ngram - 1
    oldest_first = np.full((len(tokens), max_ngram), NO_TOKEN, np.int64)
    oldest_first[:, reach] = tokens
    lengths = columns.numbers[:, Number.LOOKBACK]
    flat, kept = columns.lookback, np.minimum(lengths, reach)
    if (lengths > reach).any():  # only the newest count
        flat = flat[np.concatenate([np.arange(n) >= n - k for n, k in zip(lengths, kept, strict=True)])]
    oldest_first[: len(kept), :reach][np.arange(reach) >= reach - kept[:, None]] = flat
    return oldest_first[:, ::-1]
