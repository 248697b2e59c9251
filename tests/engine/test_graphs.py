"""Recorded forward passes that run again on other inputs, without a GPU: a recorded pass is here the call itself.

What a replay reads are then the tensors of the recorded step with the content of a later one, as on a GPU; numbers that
were looked at on the host stay those of the recorded step. Results must be those of an engine that records nothing.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import in_process
import numpy as np
import pytest
from in_process import GREEDY, Answer, generate, local_engine
from logits_runner import LogitsRunner
from random_models import random_text_config, write_model
from torch import Tensor

from paraflash.engine.engine import EngineCore
from paraflash.engine.graphs import StepGraphs
from paraflash.engine.sampling_params import SamplingParams
from paraflash.kernels.interface import IndexRows


class BoundedKernels:
    """Kernels that take the number of entries from its bound, which recorded passes of one signature share."""

    def __init__(self, kernels: Any):
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def select_entries(
        self, q: Tensor, weights: Tensor, pool: Any, rows: IndexRows, *args: Any, **options: Any
    ) -> tuple[Tensor, Any]:
        most = min(rows.width, rows.block_tables.shape[1] * rows.entries)
        rows = replace(rows, visible_host=np.full(len(q), most))
        found: tuple[Tensor, Any] = self._kernels.select_entries(q, weights, pool, rows, *args, **options)
        return found


class ReplayingRunner(LogitsRunner):
    def __init__(self, *args: Any):
        super().__init__(*args)
        self.kernels = BoundedKernels(self.kernels)  # type: ignore[assignment]
        self.graphs = StepGraphs(self.mesh, lambda run: run)


Prompts = dict[str, tuple[list[int], SamplingParams]]


def answers_of(
    folder: Path, tp: int, pcp: int, prompts: Prompts, replays: bool, options: dict[str, Any]
) -> tuple[dict[str, Answer], tuple[int, int]]:
    """The answers, and how many passes were recorded at most and replayed at least on a rank."""
    runner = ReplayingRunner if replays else LogitsRunner
    with mock.patch.object(in_process, "LogitsRunner", runner), local_engine(folder, tp, pcp, **options) as core:
        answers = generate(core, prompts)
        return answers, counts_of(core) if replays else (0, 0)


def counts_of(core: EngineCore) -> tuple[int, int]:
    """Ranks may differ: what their rows can see does."""
    graphs = [runner.graphs for runner in core.executor.runners]
    return max(g.captures for g in graphs), min(g.replays for g in graphs)


def compare(found: dict[str, Answer], wanted: dict[str, Answer]) -> None:
    for name, want in wanted.items():
        answer = found[name]
        if want.rows:
            assert np.abs(np.stack(answer.rows) - np.stack(want.rows)).max() < 1e-4
        assert answer.tokens == want.tokens, name
        assert np.allclose(answer.logprobs, want.logprobs, atol=1e-4)


def ids(r: random.Random, length: int, vocab: int = 270) -> list[int]:
    return [r.randrange(3, vocab) for _ in range(length)]


@pytest.mark.parametrize(("tp", "pcp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("seed", range(400, 406))
def test_replayed_passes_give_what_passes_of_their_own_give(seed: int, tp: int, pcp: int, tmp_path: Path) -> None:
    r = random.Random(seed)
    write_model(tmp_path, random_text_config(seed, tp, pcp), seed)
    prompts = {
        f"r{i}": (ids(r, n), SamplingParams(max_tokens=r.choice([9, 14, 30]), prompt_logprobs=1, logprobs=0, **GREEDY))
        for i, n in enumerate(r.sample([1, 2, 17, 64, 70, 128, 129, 192], 5))
    }
    options = {
        "max_num_batched_tokens": r.choice([64, 128]),
        "num_gpu_blocks_override": r.choice([8, 24]),
        "swa_bounded_replay": bool(seed % 2),
        "enable_prefix_caching": True,
    }
    wanted, _ = answers_of(tmp_path, tp, pcp, prompts, False, options)
    found, (captures, replays) = answers_of(tmp_path, tp, pcp, prompts, True, options)
    compare(found, wanted)
    assert 0 < captures < replays
