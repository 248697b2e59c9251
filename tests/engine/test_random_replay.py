"""Random small models with prefix hits, bounded replay and preemption, against the definition of replay at every step.

As in `test_random_models`, nothing is compared once a decision was too close to call; here that ends the whole run,
since requests share what they wrote.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from in_process import GREEDY, local_engine
from random_models import TIE, Yardstick, random_text_config, write_model
from torch import Tensor

from paraflash.engine import runner
from paraflash.engine.engine import EngineCore
from paraflash.engine.sampling_params import SamplingParams
from tests import replay_oracle
from tests.replay_oracle import Follower, ReplayOracle


class RandomReplay(ReplayOracle):
    """The oracle of replay with what `Yardstick` adds to the oracle of the model. `close`: a near tie was met."""

    def __init__(self, folder: Path):
        self.__dict__.update(Yardstick(folder).__dict__)
        self.close = False

    def hashes(self, ids: Tensor) -> Tensor:
        return super().hashes(ids) if self.c["engram_layer_ids"] else ids[:, None, None]

    def moe(self, layer: int, h: Tensor, tr: dict[str, Tensor]) -> Tensor:
        self.sure = torch.ones(len(h), dtype=torch.bool)
        out = Yardstick.moe(self, layer, h, tr)  # type: ignore[arg-type]
        self.close |= not self.sure.all()
        return out

    def _choose(self, layer: int, *rest: Any) -> Tensor:
        c, source = self.c, self.c["candidate_source_layer_id"]
        if any(source < owner <= layer for owner in self.sources):  # the candidates were those of another owner
            self.c = {**c, "candidate_source_layer_id": -1}
        with mock.patch.object(replay_oracle, "_best", self._best):
            chosen = super()._choose(layer, *rest)
        self.c = c
        return chosen

    def _best(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        value, index = scores.sort(dim=-1, descending=True, stable=True)
        if scores.shape[1] > count:
            last, next_ = value[:, count - 1], value[:, count]
            tied = (last == 0) & (next_ == 0)
            self.close |= bool(((last - next_ < TIE) & ~tied & (next_ > -math.inf)).any())
        return value[:, :count], index[:, :count]


@contextmanager
def sampled_logits() -> Iterator[list[Tensor]]:
    """Logits that tokens are drawn from, one tensor [requests, vocab] a step that samples."""
    seen: list[Tensor] = []
    draw = runner.sample

    def recording(logits: Tensor, *rest: Any) -> Any:
        seen.append(logits.clone())
        return draw(logits, *rest)

    with mock.patch.object(runner, "sample", recording):
        yield seen


def run_along(core: EngineCore, oracle: RandomReplay, r: random.Random, seen: list[Tensor]) -> int:
    """Runs requests that share prefixes and arrive at random; returns how many rows were compared."""
    common = [r.randrange(3, 270) for _ in range(200)]
    waiting = [
        (f"r{i}", common[:n] if i % 3 else [r.randrange(3, 270) for _ in range(n)])
        for i, n in enumerate([70, 5, 129, 130, 64, 200, 65, 190])
    ]
    follower = Follower(oracle, 400, core.scheduler.drops_rows)
    compared = 0
    while waiting or core.has_unfinished():
        if waiting and r.random() < 0.5:
            core.add_request(*waiting.pop(0), SamplingParams(max_tokens=r.choice([1, 4, 12]), **GREEDY))
        if not core.has_unfinished():
            continue
        core.step()
        step = core.executor.steps[-1]
        if oracle.close:
            continue
        want = follower.follow(step)
        sampled = [q for q in step.requests if q.sample is not None]
        if oracle.close or not sampled:
            continue
        for q, row in zip(sampled, seen[-1], strict=True):
            position = q.num_computed + q.num_tokens - 1
            worst = (row - want[q.request_id, position]).abs().max().item()
            assert worst < 1e-4, f"{q.request_id}: position {position} differs by {worst:.1e}"
            compared += 1
    return compared


@pytest.mark.parametrize(
    ("tp", "pcp", "seed", "window", "budget"),
    [
        (1, 1, 34, 8, 90),
        (1, 1, 67, 1, 33),
        (1, 1, 60, 3, 20),
        (1, 1, 19, 16, 20),
        (1, 1, 75, 7, 300),
        (1, 2, 105, 8, 50),
        (1, 2, 100, 2, 20),
        (1, 4, 165, 1, 300),
        (1, 4, 155, 8, 300),
        (2, 2, 260, 4, 21),
    ],
)
def test_a_random_model_follows_the_definition_of_replay(
    tp: int, pcp: int, seed: int, window: int, budget: int, tmp_path: Path
) -> None:
    write_model(tmp_path, {**random_text_config(seed, tp, pcp), "sliding_window": window}, seed)
    options = dict(swa_bounded_replay=True, enable_prefix_caching=True, num_gpu_blocks_override=7)
    with (
        sampled_logits() as seen,
        local_engine(tmp_path, tp, pcp, max_num_batched_tokens=budget, **options) as core,
    ):
        compared = run_along(core, RandomReplay(tmp_path), random.Random(seed), seen)
        kept = {q.kept_rows for step in core.executor.steps for q in step.requests}
        assert compared > 15 and core.stats()["prefix_hits"] > 0
        assert kept & {0, window}, "some rows were left out"
