"""The engine core: requests in, tokens out, one step at a time. It owns the scheduler and the workers.

    core = EngineCore(config)
    core.add_request("a", prompt_ids, SamplingParams(temperature=0))
    while core.has_unfinished():
        for delta in core.step(): ...

It knows tokens only; text is the frontend's. One thread uses it.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from dataclasses import asdict
from typing import Any

import numpy as np

from paraflash.config.engine import EngineConfig
from paraflash.config.model import load_config
from paraflash.engine.defaults import fit_to_pool, resolve
from paraflash.engine.executor import Executor, refuse_in_worker_import
from paraflash.engine.grammar import Grammars, GrammarState
from paraflash.engine.messages import StepInput, StepOutput
from paraflash.engine.preflight import check_start
from paraflash.engine.request import Delta, Request, RequestRefused
from paraflash.engine.sampling_params import SamplingParams
from paraflash.engine.scheduler import Scheduler
from paraflash.engine.worker import MESH, RUNNER

logger = logging.getLogger("paraflash.engine")


class CachesDiffer(RuntimeError):
    """Ranks that must hold the same caches do not (only looked for with `check_caches`)."""


class EngineCore:
    """Starts the workers and loads the model. Raises `Refused`, `ConfigError`, `EngineDeadError` or what loading says.

    `config` need not be resolved; `self.config` is.
    """

    def __init__(self, config: EngineConfig, runner_factory: str = RUNNER, mesh_factory: str | None = MESH):
        refuse_in_worker_import()
        self.model = load_config(config.model, config.hf_overrides)
        config = resolve(config, self.model)
        check_start(config, self.model)
        self.executor = Executor(config, self.model, runner_factory, mesh_factory)
        try:
            self._ranks: list[dict[str, Any]] = self.executor.call_all("cache_info")
            self._num_blocks = min(rank["num_blocks"] for rank in self._ranks)
            self.config = fit_to_pool(config, self.model, self._num_blocks)
            self.scheduler = Scheduler(self.config, self.model, self._num_blocks)
        except BaseException:
            self.executor.shutdown()
            raise
        self._grammars = Grammars(self.config.tokenizer or self.config.model, self.model)
        self._states: dict[str, GrammarState] = {}
        self._timings: defaultdict[str, float] = defaultdict(float)
        self._steps = 0
        self._sent: StepInput | None = None  # the step made ahead, in flight between calls

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
    ) -> None:
        """Queues a request. Raises `RequestRefused` or `BadField`, ValueErrors that name the field, or `QueueFull`."""
        self.executor.check()
        self.check_prompt(prompt_token_ids)
        request = Request(request_id, prompt_token_ids, params, cache_salt, arrival_time=time.monotonic())
        state = self._grammars.start(params.structured_outputs) if params.structured_outputs is not None else None
        if state is not None:
            request.bitmask, request.compiled = state.bitmask, state.compiled
        self.scheduler.add(request)
        if state is not None:
            self._states[request_id] = state

    def check_prompt(self, prompt_token_ids: list[int]) -> None:
        """Raises `RequestRefused` if the ids are no prompt of this model, or too many."""
        if isinstance(prompt_token_ids, (str, bytes)) or len(prompt_token_ids) == 0:
            raise RequestRefused("prompt_token_ids", "the prompt is empty; at least one token is needed")
        ids = np.asarray(prompt_token_ids)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= self.model.vocab_size:
            bad = next((t for t in prompt_token_ids if not self._is_token(t)), "of no kind")
            raise RequestRefused(
                "prompt_token_ids",
                f"the prompt has token id {bad!r}; integers from 0 to {self.model.vocab_size - 1} are allowed",
            )
        limit = self.config.max_model_len or 0
        if len(prompt_token_ids) >= limit:
            raise RequestRefused(
                "input_tokens",
                f"This model's maximum context length is {limit} tokens. However, your prompt contains "
                f"{len(prompt_token_ids)} input tokens, and at least one output token must fit as well.",
            )

    def _is_token(self, value: Any) -> bool:
        integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        return bool(integer and 0 <= value < self.model.vocab_size)

    def abort(self, request_id: str) -> None:
        """Ends a request at once; nothing more is heard of it. Unknown ids are ignored."""
        self.scheduler.abort(request_id)
        self._states.pop(request_id, None)

    def has_unfinished(self) -> bool:
        """Whether `step` has something to do: requests, or a step in flight whose requests have all ended."""
        return self.scheduler.has_unfinished() or self._sent is not None

    def step(self) -> list[Delta]:
        """Runs one step; returns what each request that got a token has new. Raises `EngineDeadError`.

        With async_scheduling the step after it is made and sent before its result is awaited.
        """
        self.executor.check()
        start = time.monotonic()
        ahead, self._sent = self._sent, None
        step = ahead or self.scheduler.schedule()
        if step is None:
            if self.scheduler.has_unfinished():
                raise RuntimeError("requests are unfinished, but no step can be made of them")
            return []
        if self.config.async_scheduling:
            output = self._run_ahead(step, sent=ahead is not None)
        else:
            output = self.executor.execute(step)
        deltas = self.scheduler.update(step, output)
        self._advance_grammars(deltas)
        for component, seconds in output.timings.items():
            self._timings[component] += seconds
        self._timings["step"] += time.monotonic() - start
        self._steps += 1
        if self.config.check_caches:
            self._compare_caches(step.step_id)
        return deltas

    def _run_ahead(self, step: StepInput, sent: bool) -> StepOutput:
        """The result of `step`, which may have been sent before; the one after it is sent meanwhile, if it can be."""
        if not sent:
            self.executor.send(step)
        self._sent = self.scheduler.schedule_ahead()
        if self._sent is not None:
            self.executor.send(self._sent)
        return self.executor.receive()

    def _advance_grammars(self, deltas: list[Delta]) -> None:
        """A request whose grammar cannot be followed ends here, without the token that this step drew for it."""
        for delta in deltas:
            state = self._states.get(delta.request_id)
            if state is None:
                continue
            for token in delta.token_ids:
                state.accept(token)
            if state.failed is not None:
                logger.error("request %s is aborted: %s", delta.request_id, state.failed)
                self.scheduler.abort(delta.request_id)
                delta.num_output_tokens -= len(delta.token_ids)
                delta.token_ids, delta.logprobs = [], None
                delta.finish_reason, delta.stop_reason = "abort", state.failed
            if state.failed is not None or delta.finish_reason is not None:
                del self._states[delta.request_id]

    def _compare_caches(self, step_id: int) -> None:
        """Every context parallel rank of one tensor parallel rank must hold the same bytes."""
        hashes = self.executor.call_all("cache_hash")
        tp = self.config.tensor_parallel_size
        for rank, found in enumerate(hashes):
            if found != hashes[rank % tp]:
                raise CachesDiffer(
                    f"after step {step_id} the caches of rank {rank} differ from those of rank {rank % tp}"
                )

    def check(self) -> None:
        """Raises `EngineDeadError` if a worker has died, also while nothing runs."""
        self.executor.check()

    def stats(self) -> dict[str, Any]:
        """The scheduler's view, the number of steps, and seconds by component since the start (rank 0)."""
        return {**asdict(self.scheduler.stats()), "steps": self._steps, "timings": dict(self._timings)}

    def info(self) -> dict[str, Any]:
        """What was built: topology, limits, KV capacity, and what each rank holds, in bytes. Plain data."""
        config = self.config
        return {
            "model": config.model,
            "device": config.device,
            "dtype": config.dtype,
            "tensor_parallel_size": config.tensor_parallel_size,
            "prefill_context_parallel_size": config.prefill_context_parallel_size,
            "world_size": config.world_size,
            "max_model_len": config.max_model_len,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_num_seqs": config.max_num_seqs,
            "max_logprobs": config.max_logprobs,
            "vocab_size": self.model.vocab_size,
            "block_size": config.block_size,
            "num_blocks": self._num_blocks,
            "kv_capacity_tokens": (self._num_blocks - 1) * config.block_size,
            "kv_cache_dtype": config.kv_cache_dtype,
            "kv_cache_rounding": config.kv_cache_rounding,
            "enable_prefix_caching": config.enable_prefix_caching,
            "swa_bounded_replay": config.swa_bounded_replay,
            "attention_backend": config.attention_backend,
            "moe_backend": config.moe_backend,
            "kernels": self._ranks[0].get("kernels"),
            "pids": self.executor.pids,
            "ranks": self._ranks,
        }

    def shutdown(self) -> None:
        """Ends the workers. May be called again."""
        self._grammars.close()
        self.executor.shutdown()
