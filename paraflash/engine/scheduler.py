"""Decides, step by step, which rows of which requests run."""

from __future__ import annotations

from dataclasses import dataclass

from paraflash.config.engine import EngineConfig
from paraflash.config.model import ModelConfig
from paraflash.engine.messages import StepInput, StepOutput
from paraflash.engine.request import Delta, Request


class QueueFull(RuntimeError):
    """As many requests wait as config.max_queue allows; try again later."""


@dataclass(frozen=True)
class SchedulerStats:
    """A moment's view; the counters grow from the start of the engine."""

    running: int
    waiting: int
    kv_usage: float  # share of the pool's blocks in use, 0..1
    preemptions: int
    prefix_queries: int  # tokens looked up in the prefix cache
    prefix_hits: int  # tokens found there
    prompt_tokens: int
    generation_tokens: int


class Scheduler:
    """`num_blocks` counts the null block. `config` must be resolved."""

    def __init__(self, config: EngineConfig, model: ModelConfig, num_blocks: int):
        raise NotImplementedError

    def add(self, request: Request) -> None:
        """Queues a request. Raises `RequestRefused` (it can never run) or `QueueFull`."""
        raise NotImplementedError

    def abort(self, request_id: str) -> Delta | None:
        """Ends a request in any state, also with a step in flight; None if the id is unknown or has finished."""
        raise NotImplementedError

    def has_unfinished(self) -> bool:
        raise NotImplementedError

    def schedule(self) -> StepInput | None:
        """The next step; None if nothing is to be done. Each step must be given to `update` before the next."""
        raise NotImplementedError

    def update(self, step: StepInput, output: StepOutput) -> list[Delta]:
        """Takes the result of a step; one Delta per request that got a token."""
        raise NotImplementedError

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of that id."""
        raise NotImplementedError

    def stats(self) -> SchedulerStats:
        raise NotImplementedError
