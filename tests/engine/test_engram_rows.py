"""Engram rows that are staged as bytes for a recorded pass equal plain lookups, however many threads gather them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paraflash.checkpoint.dummy import dummy_engram_tables
from paraflash.checkpoint.load import Checkpoint, open_engram_tables
from paraflash.config.model import load_config
from paraflash.engine.engram_rows import FEW, EngramRows

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
CPU = torch.device("cpu")


def tables_of(name: str) -> tuple[Any, Any]:
    folder = GOLDEN / name.removeprefix("dummy ")
    model = load_config(folder)
    if name.startswith("dummy "):
        return model, dummy_engram_tables(model, torch.float32)
    return model, open_engram_tables(Checkpoint.open(folder), model, torch.float32)


@pytest.mark.parametrize("name", ["wide", "narrow_fp8", "dummy wide"])
@pytest.mark.parametrize("count", [0, 1, 7, 700])
def test_staged_rows_equal_lookups(name: str, count: int) -> None:
    model, tables = tables_of(name)
    ids = np.random.default_rng(count).integers(0, min(model.engram_rows), (count, len(tables), model.engram_columns))
    assert (ids.size > FEW) == (count == 700), "some are gathered here, some by threads"
    rows = EngramRows(tables, CPU)
    found = rows.staged_rows(rows.stage(ids)().clone(), count, model.engram_columns)
    for n, table in enumerate(tables):
        assert torch.equal(found(n), table.lookup(ids[:, n]).flatten(1))


@pytest.mark.parametrize("count", [1, 700])
def test_a_row_outside_of_a_table_is_refused(count: int) -> None:
    model, tables = tables_of("wide")
    ids = np.zeros((count, len(tables), model.engram_columns), np.int64)
    ids[-1, 1, 2] = model.engram_rows[1]
    with pytest.raises(IndexError, match=f"row {model.engram_rows[1]} is outside a table of"):
        EngramRows(tables, CPU).stage(ids)
