"""Runners without a model, for the tests of processes: they answer with the last id of each request, plus one.

A request id that begins with a word below makes a rank misbehave: "kill:1" kills rank 1, "raise:0" raises there,
"hang:1" loops without end, "sleep:3" takes 3 s with progress on every rank.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from paraflash.config.engine import EngineConfig
from paraflash.config.model import ModelConfig
from paraflash.engine.messages import Sampled, StepInput, StepOutput


class FakeRunner:
    progress: Callable[[], None]

    def __init__(self, config: EngineConfig, model: ModelConfig, mesh: Any):
        self.config, self.model = config, model
        self.rank = int(mesh)  # `rank_as_mesh` below
        self.log: list[int] = []

    def load(self) -> None:
        pass

    def cache_info(self) -> dict[str, Any]:
        blocks = self.config.num_gpu_blocks_override or 100
        return {"num_blocks": blocks, "kv_cache_bytes": blocks * 1000, "weight_bytes": 10}

    def cache_hash(self) -> str:
        return "same"

    def collective_log(self) -> list[Any]:
        return self.log

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def add(self, a: int, b: int) -> int:
        return a + b + self.rank

    def execute(self, step: StepInput) -> StepOutput | None:
        self.log.append(step.step_id)
        for request in step.requests:
            self._misbehave(request.request_id)
        if self.rank:
            return None
        output = StepOutput(step.step_id)
        for request in step.requests:
            if request.sample is not None:
                token = (int(request.token_ids[-1]) + 1) % self.model.vocab_size
                output.sampled[request.request_id] = Sampled(token)
        return output

    def _misbehave(self, request_id: str) -> None:
        word, _, value = request_id.partition(":")
        if word == "sleep":
            for _ in range(int(float(value) * 20)):
                time.sleep(0.05)
                self.progress()
        if value != str(self.rank):
            return
        if word == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif word == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif word == "raise":
            raise ArithmeticError("the numbers are off")
        elif word == "hang":
            while True:
                pass


def rank_as_mesh(rank: int, tp: int, pcp: int, device: Any, init_method: str) -> Any:
    class Rank(int):
        def close(self) -> None:
            pass

    return Rank(rank)


class FailsToLoad(FakeRunner):
    def load(self) -> None:
        raise ValueError("model.safetensors lacks the tensor layers.0.attn.wkv.weight")


class CrashesInLoad(FakeRunner):
    def load(self) -> None:
        if self.rank == 0:
            raise ZeroDivisionError("in load")


class CachesDiffer(FakeRunner):
    def cache_hash(self) -> str:
        return f"hash of rank {self.rank}"
