"""Spans of one row each as the arrays of a decode step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paraflash.cache.window import DecodeRows, Span
from paraflash.model.decode_batch import DecodeStep, block_tables, decode_rows


def decode_rows_of(spans: Sequence[Span], world: int, rank: int) -> DecodeRows:
    lengths = np.array([len(s.block_ids) for s in spans])
    step = DecodeStep(
        *(np.array([getattr(s, name) for s in spans]) for name in ("slot", "start", "window_start", "write_start")),
        tables=block_tables(np.concatenate([s.block_ids for s in spans]), lengths, len(spans), int(lengths.max())),
    )
    return decode_rows(step, 64, world, rank)
