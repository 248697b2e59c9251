"""Decides, step by step, which rows of which requests run, and what their results mean.

Every step takes first one row of each decoding request, then prompt rows in order of arrival, all under one token
budget; so decoding requests advance in every step, however long the prompts beside them are. A request holds blocks
and a slot only while it runs. When the blocks run out, the latest arrival gives its own back and later computes its
tokens anew. Nothing here knows how a step is spread over ranks.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paraflash.config.engine import EngineConfig
from paraflash.config.model import ModelConfig
from paraflash.engine.admission import fitting_max_tokens, seed_of
from paraflash.engine.blocks import BlockPool
from paraflash.engine.messages import PENDING, StepInput, StepOutput, StepRequest
from paraflash.engine.replay import certain_rows, drops_rows, kept_rows, rewind_rows
from paraflash.engine.request import Delta, Request, RequestRefused, State, sample_spec

logger = logging.getLogger("paraflash.scheduler")

PENDING_TOKEN = np.array([PENDING], np.int32)


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


class Hit(NamedTuple):
    """A prefix found in the cache: the first `tokens` positions have KV; computing starts at `start` <= tokens."""

    block_ids: list[int]
    node: int
    tokens: int
    start: int


class Step(NamedTuple):
    step_id: int
    parts: list[tuple[Request, StepRequest]]


NO_HIT = Hit([], 0, 0, 0)


class Scheduler:
    """`num_blocks` counts the null block. `config` must be resolved: its three token and request limits are set."""

    def __init__(self, config: EngineConfig, model: ModelConfig, num_blocks: int):
        for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs"):
            if (getattr(config, name) or 0) < 1:
                raise ValueError(f"{name} is {getattr(config, name)}; an integer of at least 1 is needed")
        self.config, self.model = config, model
        self.max_model_len = config.max_model_len or 0
        self.budget = config.max_num_batched_tokens or 0
        self.pool = BlockPool(num_blocks, config.block_size)
        self.rewind = rewind_rows(config, model)
        self.drops_rows, self.certain_rows = drops_rows(config, model), certain_rows(config)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self._unfinished: dict[str, Request] = {}
        self._free_slots = list(range(config.max_num_seqs or 0))[::-1]
        self._in_flight: deque[Step] = deque()  # at most two
        self._short_of_blocks = False  # a step made ahead left out rows for which another request must give way
        self._passed_over = False  # the last step left requests waiting
        self._steps = self._arrivals = 0
        self._preemptions = self._prefix_queries = self._prefix_hits = 0
        self._prompt_tokens = self._generation_tokens = 0

    # -- requests come and go ----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request. Raises `RequestRefused` or `BadField` (it can never run) or `QueueFull`."""
        request.params.check(self.model.vocab_size, self.config.max_logprobs)
        if request.request_id in self._unfinished:
            raise RequestRefused("request_id", f"request id {request.request_id!r} is in use")
        max_tokens = fitting_max_tokens(request, self.model.vocab_size, self.max_model_len, self.pool)
        # What came since the last step waits for that step alone, as long as there are places in it.
        places = 0 if self._passed_over else (self.config.max_num_seqs or 0) - len(self.running)
        if 0 < self.config.max_queue <= len(self.waiting) - places:
            raise QueueFull(f"{len(self.waiting)} requests are waiting, as many as max_queue allows")
        request.max_tokens = max_tokens
        request.arrival = self._arrivals
        request.seed = seed_of(request, self.config.seed)
        request.eos_ids = () if request.params.ignore_eos else self.model.eos_token_ids
        self._arrivals += 1
        self._unfinished[request.request_id] = request
        self.waiting.append(request)

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of that id."""
        return self._unfinished.get(request_id)

    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    def abort(self, request_id: str) -> Delta | None:
        """Ends a request in any state; None if the id is unknown or has finished.

        With a step in flight its blocks are free at once: the next step runs after this one on every rank, so a new
        owner's writes come later, and what this step wrote for the request never becomes known content.
        """
        request = self._unfinished.get(request_id)
        if request is None:
            return None
        self._finish(request, "abort", None)
        return request.delta([])

    def _finish(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        if request.state is State.RUNNING:
            self._release(request)
        else:
            self.waiting.remove(request)
        del self._unfinished[request.request_id]
        request.state = State.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        request.times.finished = time.monotonic()

    def _release(self, request: Request) -> None:
        """Takes blocks and slot from a running request; its tokens stay."""
        self.running.remove(request)
        self.pool.free(request.block_ids)
        self._free_slots.append(request.slot)
        request.slot, request.block_ids = -1, []
        request.num_computed = request.least_rows = request.rows_in_flight = request.tokens_in_flight = 0

    def _preempt(self, request: Request) -> None:
        logger.info(
            "request %s: preempted at %d tokens, the KV cache is full", request.request_id, request.num_computed
        )
        self._release(request)
        request.state = State.WAITING
        request.num_preemptions += 1
        self._preemptions += 1
        self.waiting.appendleft(request)

    # -- a step is made ----------------------------------------------------------------------------------------------

    def schedule(self) -> StepInput | None:
        """The next step; None if nothing is to be done. Each step must be given to `update` before the next."""
        if self._in_flight:
            raise RuntimeError(f"step {self._in_flight[0].step_id} is in flight; update must take its result first")
        self._short_of_blocks = False
        return self._make_step()

    def schedule_ahead(self) -> StepInput | None:
        """The step after the one in flight, whose result is not known yet: a token that it samples is PENDING here.

        None where that result must come first: there is nothing else to do, a request depends on it (grammar,
        penalties, log-probabilities of its prompt), or one would have to be preempted. A request that turns out to
        have ended has a row too many here, whose result is dropped. Its blocks and slot may have a new owner by then,
        whose writes come in a later step on every rank.
        """
        if len(self._in_flight) != 1 or self._short_of_blocks or any(r.needs_results for r in self.running):
            return None
        return self._make_step()

    def _make_step(self) -> StepInput | None:
        chunks: dict[Request, int] = {}  # rows of this step
        budget = self.budget
        # Decoding requests first, then prompts, both in order of arrival (the sort is stable).
        for request in sorted((r for r in self.running if not r.ends_in_flight), key=lambda r: r.is_prefill):
            want = self._limit(request.num_uncomputed, budget)
            if want >= max(request.least_rows, 1) and request.state is State.RUNNING:  # not preempted a moment ago
                rows = self._make_room(request, want, chunks)
                if rows:
                    chunks[request] = rows
                    budget -= rows
        self._admit(chunks, budget)
        self._passed_over = bool(self.waiting)
        if not chunks:
            return None
        parts = [(r, self._step_request(r, n)) for r, n in chunks.items()]
        for request, part in parts:
            request.times.scheduled = request.times.scheduled or time.monotonic()
            request.rows_in_flight += part.num_tokens
            request.tokens_in_flight += part.sample is not None
            # Without decoder windows behind it the next chunk must start its own: it has to be longer than a window.
            request.least_rows = self.model.window + 1 if part.kept_rows == 0 else 0
        self._in_flight.append(Step(self._steps, parts))
        self._steps += 1
        return StepInput(self._in_flight[-1].step_id, [step_request for _, step_request in parts])

    def _limit(self, rows: int, budget: int) -> int:
        threshold = self.config.long_prefill_token_threshold
        return min(rows, budget, threshold) if threshold > 0 else min(rows, budget)

    def _make_room(self, request: Request, want: int, chunks: dict[Request, int]) -> int:
        """Gives a running request blocks for `want` more rows; returns how many rows got them.

        Later arrivals that have no row in this step yet are preempted for it, the latest first. One that finds no
        room waits for a step: then others have rows, or an earlier request still comes and may preempt it.
        """
        start = request.num_scheduled
        if start + want <= len(request.block_ids) * self.pool.block_size:
            return want  # as most decode rows
        while self.pool.blocks_for(start + want) - len(request.block_ids) > self.pool.num_free:
            self._short_of_blocks = bool(self._in_flight)
            later = [r for r in self.running if r.arrival > request.arrival and r not in chunks]
            if not later or self._in_flight:  # what a step in flight runs on is not taken away
                room = (len(request.block_ids) + self.pool.num_free) * self.pool.block_size
                want = room - start
                if want < request.least_rows:
                    return 0
                break
            self._preempt(later[-1])
        need = self.pool.blocks_for(start + want) - len(request.block_ids)
        request.block_ids += self.pool.allocate(max(need, 0))
        return want

    def _admit(self, chunks: dict[Request, int], budget: int) -> None:
        """Starts waiting requests in order. Adds to `chunks`.

        One starts only if its whole prompt will find room beside what running prompts still need; it would soon be
        preempted otherwise. So none starts while a running one lacks a block. A prompt that is held back only by
        max_num_partial_prefills lets those behind it pass, and so does one whose grammar is still being compiled, as
        long as there is other work: the step would have to wait for it.
        """
        cap = self.config.max_num_partial_prefills
        partial = sum(r.is_prefill and r.num_uncomputed > chunks.get(r, 0) for r in self.running)
        promised = sum(self._blocks_missing(r) for r in self.running if r.is_prefill)
        compiled = [r for r in self.waiting if r.compiled is None or r.compiled()]
        for request in compiled if compiled or self.running else list(self.waiting):
            if not budget or not self._free_slots:
                return
            hit = self._find_prefix(request)
            rest = request.num_tokens - hit.start
            rows = self._limit(rest, budget)
            if rows < rest and 0 < cap <= partial:
                continue
            unheld = sum(self.pool.references(b) == 0 for b in hit.block_ids)
            need = self.pool.blocks_for(request.num_tokens) - len(hit.block_ids)
            if need > self.pool.num_free - unheld - promised:
                return
            self._start(request, hit)
            chunks[request] = self._make_room(request, rows, chunks)
            budget -= rows
            partial += rows < rest
            promised += self._blocks_missing(request)

    def _blocks_missing(self, request: Request) -> int:
        """Blocks that the request's known tokens still need."""
        return max(self.pool.blocks_for(request.num_tokens) - len(request.block_ids), 0)

    def _find_prefix(self, request: Request) -> Hit:
        """The usable cached prefix: it leaves at least one token new and is long enough to rebuild the windows."""
        if not self._uses_prefix_cache(request):
            return NO_HIT
        found = self.pool.find(request.tokens, request.cache_salt, (request.num_tokens - 1) // self.pool.block_size)
        tokens = len(found.block_ids) * self.pool.block_size
        return Hit(found.block_ids, found.node, tokens, tokens - self.rewind) if tokens > self.rewind else NO_HIT

    def _uses_prefix_cache(self, request: Request) -> bool:
        """Prompt log-probabilities need every prompt row, so nothing can be skipped for them."""
        return self.config.enable_prefix_caching and request.params.prompt_logprobs is None

    def _start(self, request: Request, hit: Hit) -> None:
        """Moves a waiting request to the running ones, with the blocks of its cached prefix."""
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=lambda r: r.arrival)
        request.state = State.RUNNING
        request.slot = self._free_slots.pop()
        self.pool.share(hit.block_ids)
        request.block_ids = list(hit.block_ids)
        request.num_computed = request.window_start = hit.start
        request.kv_write_start = hit.tokens
        request.num_cached_blocks, request.cache_node = len(hit.block_ids), hit.node
        if request.num_preemptions == 0 and self._uses_prefix_cache(request):
            request.num_cached_tokens = hit.tokens
            self._prefix_queries += request.num_tokens
            self._prefix_hits += hit.tokens

    def _step_request(self, request: Request, rows: int) -> StepRequest:
        start, end = request.num_scheduled, request.num_scheduled + rows
        last, is_prefill = end == request.num_expected, request.is_prefill
        wants_prompt = is_prefill and request.params.prompt_logprobs is not None
        drops = self.drops_rows and is_prefill and request.params.prompt_logprobs is None
        kept = kept_rows(rows, request.num_expected - end, self.model.window, self.certain_rows) if drops else rows
        return StepRequest(
            request_id=request.request_id,
            slot=request.slot,
            token_ids=request.tokens[start:end].copy() if end <= request.num_tokens else PENDING_TOKEN,
            lookback=request.tokens[max(start - self.model.engram_max_ngram + 1, 0) : start].copy(),
            num_computed=start,
            is_prefill=is_prefill,
            block_ids=request.block_table[: self.pool.blocks_for(end)],
            kv_write_start=request.kv_write_start,
            window_start=request.window_start,
            kept_rows=kept if kept < rows else -1,
            sample=sample_spec(request) if last else None,
            is_last_chunk=last,
            prompt_logprobs=request.params.prompt_logprobs if wants_prompt else None,
            prompt_targets=_prompt_targets(request, start, end) if wants_prompt else None,
        )

    # -- a step's result ---------------------------------------------------------------------------------------------

    def update(self, step: StepInput, output: StepOutput) -> list[Delta]:
        """Takes the result of a step; one Delta per request that got a token. Aborted requests are passed over."""
        if not self._in_flight or not self._in_flight[0].step_id == step.step_id == output.step_id:
            raise ValueError(f"step {step.step_id} with the output of step {output.step_id} is not the step in flight")
        deltas = []
        for request, part in self._in_flight.popleft().parts:
            if request.finished:
                continue
            request.num_computed += part.num_tokens
            request.rows_in_flight -= part.num_tokens
            request.tokens_in_flight -= part.sample is not None
            request.prompt_logprobs += output.prompt_logprobs.get(request.request_id, [])
            _log_progress(request, part)
            if self.config.enable_prefix_caching:
                self._register_blocks(request)
            if part.sample is not None:
                deltas.append(self._take_token(request, output))
        return deltas

    def _register_blocks(self, request: Request) -> None:
        """Makes the blocks that are full by now known to the prefix cache."""
        for i in range(request.num_cached_blocks, request.num_computed // self.pool.block_size):
            request.cache_node = self.pool.register(
                request.block_ids[i], request.tokens, i, request.cache_node, request.cache_salt
            )
            request.num_cached_blocks = i + 1

    def _take_token(self, request: Request, output: StepOutput) -> Delta:
        sampled = output.sampled[request.request_id]
        request.append(sampled.token_id)
        self._generation_tokens += 1
        first = request.num_output_tokens == 1
        if first:
            request.times.first_token = time.monotonic()
            self._prompt_tokens += request.prompt_len
        end = request.stop_at(sampled.token_id)
        if end is not None:
            self._finish(request, *end)
        delta = request.delta([sampled.token_id])
        if request.params.logprobs is not None and sampled.logprobs is not None:
            delta.logprobs = [sampled.logprobs]
        if first and request.params.prompt_logprobs is not None:
            delta.prompt_logprobs = request.prompt_logprobs
        return delta

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_usage=1 - self.pool.num_free / self.pool.capacity,
            preemptions=self._preemptions,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
        )


def _prompt_targets(request: Request, start: int, end: int) -> np.ndarray:
    """[end - start] int32: the prompt token after each row; -1 past the prompt and where it has been reported."""
    targets = np.full(end - start, -1, np.int32)
    low, high = max(start, len(request.prompt_logprobs)), min(end, request.prompt_len - 1)
    if low < high:
        targets[low - start : high - start] = request.tokens[low + 1 : high + 1]
    return targets


def _log_progress(request: Request, part: StepRequest) -> None:
    """One line per chunk of a prompt that takes more than one."""
    if part.is_prefill and not (part.is_last_chunk and part.num_computed == request.window_start):
        logger.info("request %s: prefill %d/%d tokens", request.request_id, request.num_computed, request.num_tokens)
