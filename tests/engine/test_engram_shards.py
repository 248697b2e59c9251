"""Engram tables split over TP: the rows of all shares add up to the table, and the engine answers as without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import GREEDY, generate, local_engine
from safetensors.torch import load_file

from paraflash.checkpoint.load import Checkpoint, open_engram_tables
from paraflash.config.model import load_config
from paraflash.engine.engram_shards import TableShard
from paraflash.engine.sampling_params import SamplingParams

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["narrow", "narrow_fp8"])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_shares_add_up_to_the_table(name: str, size: int) -> None:
    model = load_config(GOLDEN / name)
    for table in open_engram_tables(Checkpoint.open(GOLDEN / name), model, torch.float32):
        ids = np.array([[0, table.rows - 1], [table.rows // 3, table.rows // 3 + 1], [7, 7]])
        shards = [TableShard(table, rank, size, CPU) for rank in range(size)]
        assert sum(shard.rows for shard in shards) == table.rows
        found = sum(shard.lookup(torch.from_numpy(ids)) for shard in shards)
        assert torch.equal(found, table.lookup(ids))


def test_more_ranks_than_rows_leave_some_without() -> None:
    (table, *_) = open_engram_tables(Checkpoint.open(GOLDEN / "narrow"), load_config(GOLDEN / "narrow"), torch.float32)
    table.rows = 3
    shards = [TableShard(table, rank, 5, CPU) for rank in range(5)]
    assert [shard.rows for shard in shards] == [1, 1, 1, 0, 0]
    assert torch.equal(sum(s.lookup(torch.tensor([0, 1, 2])) for s in shards), table.lookup(np.arange(3)))


@pytest.mark.parametrize(("tp", "pcp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_golden_logits_with_tables_on_the_devices(tp: int, pcp: int) -> None:
    golden = load_file(GOLDEN / "wide" / "expected_plain.safetensors")
    prompts = {
        str(i): (golden[f"prompt.{i}.input_ids"].tolist(), SamplingParams(max_tokens=4, prompt_logprobs=1, **GREEDY))
        for i in (3, 5, 6)
    }
    with local_engine(GOLDEN / "wide", tp, pcp, engram_config={"cpu_offload": False}) as core:
        answers = generate(core, prompts)
        held = [info["engram_device_bytes"] for info in core.executor.call_all("cache_info")]
    for i in (3, 5, 6):
        wanted = golden[f"prompt.{i}.logits"].numpy()
        rows = np.stack(answers[str(i)].rows)
        assert np.abs(rows - wanted[: len(rows)]).max() < 1e-4
    model = load_config(GOLDEN / "wide")
    bf16_row = 2 * model.engram_head_dim
    kept = [-(-rows // tp) + 1 for rows in model.engram_rows]  # and one of zeros
    assert held == [sum(kept) * bf16_row] * len(held), "1040 and 1786 rows are even"
