"""Records what an engine's steps were and the logits of every row that they ran through all layers."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paraflash.config.engine import EngineConfig
from paraflash.engine.engine import EngineCore
from paraflash.engine.messages import StepInput, StepOutput, StepRequest
from paraflash.engine.sampling_params import SamplingParams
from paraflash.engine.scheduler import Scheduler
from tests.replay_oracle import Follower, ReplayOracle

NARROW = Path(__file__).parent.parent / "data" / "golden" / "narrow"
LONG = {"text_config": {"max_position_embeddings": 4096}}
TIGHT = {"num_gpu_blocks_override": 9, "max_num_batched_tokens": 47, "max_num_seqs": 4}  # for `mixed_workload`
Rows = dict[tuple[str, int], Tensor]  # (request, position) -> logits


class Recorder:
    """Stands between an engine core and its executor. `steps` are as the scheduler made them."""

    def __init__(self, core: EngineCore):
        self.core, self.run = core, core.executor.execute
        self.steps: list[StepInput] = []
        self.rows: list[Rows] = []  # per step
        core.executor.execute = self.execute

    def execute(self, step: StepInput) -> StepOutput:
        self.steps.append(step)
        output = self.run(StepInput(step.step_id, [_asking(r) for r in step.requests]))
        rows: Rows = {}
        for r in step.requests:
            found = output.prompt_logprobs.pop(r.request_id)
            end = r.num_computed + r.num_tokens
            rows.update({(r.request_id, end - len(found) + i): torch.from_numpy(x) for i, x in enumerate(found)})
            if r.prompt_targets is not None:
                output.prompt_logprobs[r.request_id] = found[: int((r.prompt_targets >= 0).sum())]
        self.rows.append(rows)
        return output

    def restart(self, **settings) -> None:
        """A new scheduler with other settings over poisoned caches; forgets what was recorded."""
        self.core.config = replace(self.core.config, **settings)
        self.core.scheduler = Scheduler(self.core.config, self.core.model, self.core._num_blocks)
        self.core.executor.call_all("poison")
        self.steps, self.rows = [], []

    def add(self, name: str, ids: list[int], *, salt: str | None = None, **params) -> None:
        made = SamplingParams(**{"max_tokens": 3, "temperature": 0.0, "ignore_eos": True, **params})
        self.core.add_request(name, ids, made, cache_salt=salt)

    def finish(self) -> None:
        while self.core.has_unfinished():
            self.core.step()

    def worst(self, drops: bool, compared: list[tuple[int, str, int]] | None = None) -> float:
        """Largest difference from the definition, over all rows; every sampled row must be among them."""
        worst = 0.0
        everything = _followed(pickle.dumps(self.steps), drops)
        for number, (step, rows, expected) in enumerate(zip(self.steps, self.rows, everything, strict=True)):
            assert rows.keys() <= expected.keys()
            for r in step.requests:
                last = (r.request_id, r.num_computed + r.num_tokens - 1)
                assert last in rows or (r.sample is None and r.kept_rows == 0)
            for (name, position), row in rows.items():
                difference = (row - expected[name, position]).abs().max().item()
                assert difference == difference, f"NaN in step {number}, request {name}, position {position}"
                worst = max(worst, difference)
                if compared is not None:
                    compared.append((number, name, position))
        return worst


@cache
def oracle() -> ReplayOracle:
    return ReplayOracle(str(NARROW))


@cache
def _followed(steps: bytes, drops: bool) -> list[Rows]:
    """Equal steps are followed once, whatever number of ranks ran them."""
    follower = Follower(oracle(), 1024, drops)
    return [follower.follow(step) for step in pickle.loads(steps)]


def _asking(r: StepRequest) -> StepRequest:
    """The same rows, with the logits of those wanted that go through all layers."""
    kept = r.num_tokens if r.kept_rows < 0 else r.kept_rows
    targets = np.where(np.arange(r.num_tokens) >= r.num_tokens - kept, 0, -1).astype(np.int32)
    return replace(r, prompt_logprobs=0, prompt_targets=targets)


@contextmanager
def recorded(tp: int = 1, pcp: int = 1, **settings) -> Iterator[Recorder]:
    """An engine of the narrow golden model in mode R0 whose caches start as NaN."""
    config = EngineConfig(
        model=str(NARROW),
        device="cpu",
        dtype="float32",
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        **{
            "kv_cache_rounding": "none",
            "kv_cache_dtype": "float32",
            "hf_overrides": LONG,
            "num_gpu_blocks_override": 60,
            "max_model_len": 1000,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 4,
            "swa_bounded_replay": True,
            **settings,
        },
    )
    core = EngineCore(config, runner_factory="logits_runner:LogitsRunner")
    try:
        core.executor.call_all("poison")
        yield Recorder(core)
    finally:
        core.shutdown()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(3, 384, length).tolist()


def mixed_workload(rec: Recorder) -> None:
    """Prompts of many lengths, shared beginnings, a later turn, aborts and preemptions, in steps that mix all of it."""
    chosen = random.Random(1)
    system = prompt(192, 1)
    waiting: list[tuple[str, list[int], dict]] = [
        ("long", prompt(150, 1), {"max_tokens": 45}),
        ("one", prompt(1, 2), {"max_tokens": 70}),
        ("reported", prompt(61, 3), {"prompt_logprobs": 1}),
        ("first", system + prompt(33, 4), {"max_tokens": 45}),
        ("gone", system + prompt(90, 5), {"max_tokens": 9}),
        ("second", system + prompt(54, 6), {"max_tokens": 20}),
        ("salted", system + prompt(9, 6), {"salt": "s"}),
        ("resent", system + prompt(33, 4), {}),
        ("whole", system, {}),
        ("turn", system + prompt(33, 4) + prompt(75, 7), {"max_tokens": 6}),
    ]
    aborts = {14: "gone", 36: "salted"}  # after so many steps
    number = 0
    while waiting or rec.core.has_unfinished():
        if waiting and (chosen.random() < 0.5 or not rec.core.has_unfinished()):
            name, ids, params = waiting.pop(0)
            rec.add(name, ids, **params)
        rec.core.abort(aborts.get(number, ""))
        if rec.core.has_unfinished():
            rec.core.step()
        number += 1
