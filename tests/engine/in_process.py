"""An engine whose ranks are threads of this process, so that a test can run many small models at many topologies.

`EngineCore` runs as it is; only its executor and the collectives are replaced. A collective of threads meets at a
barrier and fails where the ranks of a group bring different operations, labels, shapes or dtypes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from logits_runner import LogitsRunner
from torch import Tensor

from paraflash.config.engine import EngineConfig
from paraflash.config.model import ModelConfig
from paraflash.engine import engine
from paraflash.engine.engine import EngineCore
from paraflash.engine.messages import StepInput, StepOutput
from paraflash.engine.sampling_params import SamplingParams
from paraflash.parallel.mesh import Group, Mesh


class Meeting:
    """Where the ranks of one group hand their tensors to each other."""

    def __init__(self, size: int):
        self.brought: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def exchange(self, rank: int, what: tuple[str, str], x: Tensor) -> list[Tensor]:
        self.brought[rank] = (*what, x)
        self.barrier.wait()
        brought = list(self.brought)
        self.barrier.wait()
        kinds = {(op, label, tuple(t.shape), t.dtype) for op, label, t in brought}
        assert len(kinds) == 1, f"ranks of one group differ in a collective: {kinds}"
        return [t for _, _, t in brought]


@dataclass
class ThreadGroup(Group):
    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def all_gather(self, x: Tensor, label: str) -> Tensor:
        return x if self.size == 1 else torch.cat(self._parts("all_gather", label, x))

    def all_reduce(self, x: Tensor, label: str) -> Tensor:
        return x if self.size == 1 else torch.stack(self._parts("all_reduce", label, x)).sum(0)

    def reduce_scatter(self, x: Tensor, label: str) -> Tensor:
        if self.size == 1:
            return x
        return torch.stack(self._parts("reduce_scatter", label, x)).sum(0).chunk(self.size)[self.rank].clone()

    def _parts(self, op: str, label: str, x: Tensor) -> list[Tensor]:
        self._note(op, label, x, 0.0)
        return self.meeting.exchange(self.rank, (op, label), x)


class ThreadExecutor:
    """Stands in for `Executor`: one `LogitsRunner` and one thread a rank."""

    def __init__(self, config: EngineConfig, model: ModelConfig, *_: Any):
        tp, pcp = config.tensor_parallel_size, config.prefill_context_parallel_size
        tp_meetings = [Meeting(tp) for _ in range(pcp)]
        pcp_meetings = [Meeting(pcp) for _ in range(tp)]
        self._meetings = tp_meetings + pcp_meetings
        self.pids: list[int] = []
        self.runners = [
            LogitsRunner(
                config,
                model,
                Mesh(
                    rank,
                    ThreadGroup("tp", tp, rank % tp, meeting=tp_meetings[rank // tp]),
                    ThreadGroup("pcp", pcp, rank // tp, meeting=pcp_meetings[rank % tp]),
                    torch.device("cpu"),
                ),
            )
            for rank in range(tp * pcp)
        ]
        self._threads = ThreadPoolExecutor(len(self.runners))
        self.steps: list[StepInput] = []
        self._sent: list[StepInput] = []
        self.call_all("load")

    def on_all(self, work: Callable[[LogitsRunner], Any]) -> list[Any]:
        """One result per rank; a rank that fails takes the others out of their collectives."""

        def guarded(runner: LogitsRunner) -> Any:
            try:
                return work(runner)
            except BaseException:
                for meeting in self._meetings:
                    meeting.barrier.abort()
                raise

        futures = [self._threads.submit(guarded, runner) for runner in self.runners]
        errors = [e for f in futures if (e := f.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [f.result() for f in futures]

    def call_all(self, method: str, *args: Any) -> list[Any]:
        return self.on_all(lambda runner: getattr(runner, method)(*args))

    def execute(self, step: StepInput) -> StepOutput:
        self.steps.append(step)
        outputs = self.on_all(lambda runner: runner.execute(step))
        assert all(other is None for other in outputs[1:])
        return outputs[0]

    def send(self, step: StepInput) -> None:
        self._sent.append(step)

    def receive(self) -> StepOutput:
        return self.execute(self._sent.pop(0))

    def check(self) -> None:
        pass

    def shutdown(self) -> None:
        self._threads.shutdown()


GREEDY = dict(temperature=0.0, ignore_eos=True)


@contextmanager
def local_engine(folder: Any, tp: int = 1, pcp: int = 1, **options: Any) -> Iterator[EngineCore]:
    """An fp32 engine in mode R0 unless told otherwise; its caches start as NaN. Caches of all ranks stay comparable."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        **{
            "dtype": "float32",
            "kv_cache_dtype": "float32",
            "kv_cache_rounding": "none",
            "swa_bounded_replay": False,
            "enable_prefix_caching": False,
            "max_num_seqs": 4,
            "num_gpu_blocks_override": 24,
            "max_num_batched_tokens": 48,
            "check_caches": True,
            **options,
        },
    )
    with mock.patch.object(engine, "Executor", ThreadExecutor):
        core = EngineCore(config)
    try:
        core.executor.call_all("poison")
        yield core
    finally:
        core.shutdown()
        torch.set_num_threads(threads)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the tokens, where asked for
    rows: list[np.ndarray] = field(default_factory=list)  # logits of all prompt positions but the last, where asked for
    cached: int = 0  # prompt tokens found in the prefix cache


def generate(core: EngineCore, prompts: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, Answer]:
    for request_id, (ids, params) in prompts.items():
        core.add_request(request_id, ids, params)
    answers = {name: Answer() for name in prompts}
    while core.has_unfinished():
        for delta in core.step():
            answer = answers[delta.request_id]
            answer.tokens += delta.token_ids
            answer.logprobs += [entry.logprob for entry in delta.logprobs or []]
            answer.rows += delta.prompt_logprobs or []
            answer.cached = delta.num_cached_tokens
    return answers
