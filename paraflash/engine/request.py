"""One generation from arrival to its last token, and what the engine reports of it (`Delta`).

A request keeps its prompt and output ids in one growing int32 array; every length is derived from that array and
from `num_computed`, the number of leading positions whose state is in the caches. What steps in flight will add to
both is counted beside them, so that the next step can be made before their results are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from paraflash.engine.messages import Int32, SampleSpec, TokenLogprobs
from paraflash.engine.sampling_params import SamplingParams


class RequestRefused(ValueError):
    """A request that can never be served; `field` names what is wrong with it."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple[type[RequestRefused], tuple[str, str]]:
        return RequestRefused, (self.field, str(self))


class State(Enum):
    WAITING = "waiting"  # holds no blocks and no slot; also after a preemption
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class Times:
    """Moments of a request's life in seconds of `time.monotonic()`; None until they happen."""

    arrival: float
    scheduled: float | None = None  # first step that had a row of it
    first_token: float | None = None
    finished: float | None = None


@dataclass
class Delta:
    """What one step added to a request. Plain data: it crosses process borders."""

    request_id: str
    token_ids: list[int]  # new ones, the stop token included
    logprobs: list[TokenLogprobs] | None = None  # one per new token, if asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # of prompt tokens 1..; once, with the first token
    finish_reason: str | None = None  # stop, length, abort
    stop_reason: int | str | None = None  # the stop token id, None for end-of-sequence; why the engine aborted
    num_output_tokens: int = 0  # so far, these included
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    num_preemptions: int = 0
    times: Times = field(default_factory=lambda: Times(0.0))


class Request:
    """`prompt_token_ids`: ids in [0, vocab); anything but 32-bit integers raises `RequestRefused`.

    The scheduler fills the rest when the request is added.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | Int32,
        params: SamplingParams,
        cache_salt: str | None = None,
        arrival_time: float = 0.0,
    ):
        self.request_id = request_id
        self.params = params
        self.cache_salt = cache_salt
        self._ids = _checked_ids(prompt_token_ids)  # grows by doubling
        self.prompt_len = self.num_tokens = len(self._ids)
        self.bitmask: Callable[[], Int32 | None] | None = None  # grammar hook: allowed tokens of the next draw
        self.compiled: Callable[[], bool] | None = None  # grammar hook: whether `bitmask` answers at once

        self.arrival = 0  # order among all requests
        self.seed = 0
        self.max_tokens = 0  # after clipping to the context
        self.eos_ids: tuple[int, ...] = ()  # empty with ignore_eos

        self.state = State.WAITING
        self.slot = -1
        self.block_ids: list[int] = []
        self.num_computed = 0
        self.rows_in_flight = self.tokens_in_flight = 0  # of steps whose result is not known yet
        self.kv_write_start = 0
        self.window_start = 0
        self.least_rows = 0  # the next chunk must have as many rows, or wait (bounded replay)
        self.num_cached_blocks = 0  # leading blocks known to the prefix cache
        self.cache_node = 0  # content id of the last of them, 0 for none

        self._table: tuple[list[int], Int32] | None = None  # block ids and their array

        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.times = Times(arrival_time)

    @property
    def tokens(self) -> Int32:
        """[num_tokens] prompt and output ids, a view."""
        return self._ids[: self.num_tokens]

    @property
    def block_table(self) -> Int32:
        """`block_ids` as an array that never changes; made anew only when there are other or more of them."""
        if self._table is None or self._table[0] is not self.block_ids or len(self._table[1]) != len(self.block_ids):
            self._table = self.block_ids, np.array(self.block_ids, np.int32)
        return self._table[1]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def num_scheduled(self) -> int:
        """Leading positions whose state is in the caches when the steps in flight are done."""
        return self.num_computed + self.rows_in_flight

    @property
    def num_expected(self) -> int:
        """Tokens that there are then."""
        return self.num_tokens + self.tokens_in_flight

    @property
    def num_uncomputed(self) -> int:
        """Rows that no step has taken yet."""
        return self.num_expected - self.num_scheduled

    @property
    def is_prefill(self) -> bool:
        """Whether the next row is part of a prompt. After a preemption the outputs but the last count as prompt."""
        return self.num_scheduled < max(self.prompt_len, self.num_expected - 1)

    @property
    def ends_in_flight(self) -> bool:
        """Whether the token in flight is the last one, whatever it is."""
        return self.tokens_in_flight > 0 and self.num_output_tokens + self.tokens_in_flight >= self.max_tokens

    @property
    def needs_results(self) -> bool:
        """Whether a step of this request can only be made when the one before is known."""
        return bool(self.params.is_penalised or self.bitmask) or self.params.prompt_logprobs is not None

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED

    def append(self, token_id: int) -> None:
        if self.num_tokens == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(max(64, self.num_tokens), np.int32)])
        self._ids[self.num_tokens] = token_id
        self.num_tokens += 1

    def stop_at(self, token_id: int) -> tuple[str, int | None] | None:
        """(finish reason, stop reason) if the request ends with `token_id`, which has just been appended."""
        if self.num_output_tokens >= self.params.min_tokens:
            if token_id in self.eos_ids:
                return "stop", None
            if token_id in (self.params.stop_token_ids or ()):
                return "stop", token_id
        return ("length", None) if self.num_output_tokens >= self.max_tokens else None

    def delta(self, token_ids: list[int]) -> Delta:
        """The report of `token_ids`, the newest outputs, with the request's present state."""
        return Delta(
            self.request_id,
            token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            times=Times(self.times.arrival, self.times.scheduled, self.times.first_token, self.times.finished),
        )


def _checked_ids(ids: Sequence[int] | Int32) -> Int32:
    """A copy of `ids` as int32; numpy alone would cut off fractions."""
    try:
        array = np.array(ids if len(ids) else np.zeros(0, np.int32))
    except (TypeError, ValueError):  # no sequence, or one of sequences of unequal length
        array = np.zeros(0)
    limits = np.iinfo(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array < limits.min).any() or (array > limits.max).any():
        raise RequestRefused("prompt_token_ids", "prompt_token_ids must be a flat list of 32-bit integers")
    return array.astype(np.int32)


def sample_spec(request: Request) -> SampleSpec:
    """How the request's next token is drawn, given the outputs so far."""
    params, step = request.params, request.num_output_tokens + request.tokens_in_flight
    stops = [*request.eos_ids, *(params.stop_token_ids or [])] if step < params.min_tokens else []
    spec = SampleSpec(
        temperature=params.temperature if params.temperature >= 1e-5 else 0.0,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        seed=request.seed,
        step=step,
    )
    if not (stops or params.is_penalised or request.bitmask or params.logit_bias or params.logprobs is not None):
        return spec
    return replace(
        spec,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logprobs=params.logprobs,
        banned_ids=np.array(sorted(set(stops)), np.int32) if stops else None,
        logit_bias=params.logit_bias,
        history=request.tokens.copy() if params.is_penalised else None,
        prompt_len=request.prompt_len,
        bitmask=request.bitmask() if request.bitmask else None,
    )
