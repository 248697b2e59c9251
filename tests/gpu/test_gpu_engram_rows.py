"""Engram rows that are fetched ahead on a GPU equal plain lookups, for a rank without rows too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from paraflash.checkpoint.load import Checkpoint, open_engram_tables
from paraflash.config.model import load_config
from paraflash.engine.engram_rows import EngramRows
from paraflash.model.inputs import to_device

GOLDEN = Path(__file__).parent.parent / "data" / "golden"


@pytest.mark.parametrize("name", ["wide", "narrow_fp8"])
@pytest.mark.parametrize("count", [0, 1, 300])
def test_rows_fetched_ahead_equal_lookups(name: str, count: int) -> None:
    model = load_config(GOLDEN / name)
    tables = open_engram_tables(Checkpoint.open(GOLDEN / name), model, torch.bfloat16)
    draw = np.random.default_rng(count)
    ids = draw.integers(0, min(model.engram_rows), (count, len(tables), model.engram_columns))
    rows = EngramRows(tables, torch.device("cuda", 0))
    ahead, staged = (
        rows.start(ids),
        rows.staged_rows(to_device(rows.stage(ids)(), rows.device), count, model.engram_columns),
    )
    for n, table in enumerate(tables):
        wanted = table.lookup(ids[:, n]).flatten(1)
        assert torch.equal(ahead(n).cpu(), wanted) and torch.equal(staged(n).cpu(), wanted)
