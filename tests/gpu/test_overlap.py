"""An exchange that runs beside products, by NCCL or by copy engines, gives the bits of one that is waited for at
once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from paraflash.parallel import copies
from tests import moe_layer

if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs a CUDA device", allow_module_level=True)

# Few rows as in decoding, more than a MiB a rank as in prefill, unequal shares, an empty rank, no rows at all.
CASES = [[8, 8], [2048, 2048], [1500, 1497], [5, 0], [0, 900], [0, 0]]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("copied", [0, 4096], ids=["NCCL", "copy engines"])
def test_an_moe_layer_run_as_it_is_and_replayed(tmp_path: Path, copied: int) -> None:
    torch.multiprocessing.spawn(nccl_rank, (f"file://{tmp_path / 'meet'}", copied), nprocs=2)


def nccl_rank(rank: int, init: str, copied: int) -> None:
    from paraflash.engine.graphs import cuda_capture

    moe_layer.compare(rank, 2, "cuda", init, 2048, CASES, cuda_capture, rounds=6, copied=copied)


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="with more GPUs each rank has its own")
def test_ranks_that_share_a_gpu_write_each_others_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one GPU can show of the copies: memory, flags and streams, without graphs, which gloo forbids."""
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    torch.multiprocessing.spawn(sharing_rank, (f"file://{tmp_path / 'meet'}",), nprocs=2)


def sharing_rank(rank: int, init: str) -> None:
    copies.LEAST_BYTES = 1
    moe_layer.compare(rank, 2, "cuda", init, 2048, CASES, rounds=4, copied=4096)
