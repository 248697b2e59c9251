"""What the engine tells its workers each step, and what comes back. Plain data, pickled to every rank alike.

A step is stateless: it carries all that a worker needs (token ids, block tables, look-back ids, sampling), so ranks
cannot drift apart. Nothing here knows of tensor or context parallelism. A step travels as `Columns`, a few arrays for
all requests together: pickling hundreds of small arrays would take longer than everything else on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
PENDING = -1  # the token id of a row whose token the step before this one samples


@dataclass
class SampleSpec:
    """How the token after a request's last row of this step is chosen."""

    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # always set by the engine; with `step` it determines the draw
    step: int = 0  # index of the output token that is drawn
    logprobs: int | None = None  # top entries to report besides the chosen token; None: none at all
    banned_ids: Int32 | None = None  # e.g. stop tokens before min_tokens
    logit_bias: dict[int, float] | None = None
    history: Int32 | None = None  # prompt + output ids; only where a penalty needs them
    prompt_len: int = 0  # how many of `history` are prompt
    bitmask: Int32 | None = None  # [ceil(vocab / 32)] allowed tokens of a grammar

    @property
    def is_penalised(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def has_rules(self) -> bool:
        """Whether something raises, lowers or forbids single tokens."""
        return bool(self.logit_bias or self.is_penalised) or self.bitmask is not None or self.banned_ids is not None

    @property
    def is_plain(self) -> bool:
        """Whether `plain_spec` of `plain` is this one: no rule on single tokens, and only the token is wanted."""
        return self.logprobs is None and self.history is None and not self.has_rules

    @property
    def plain(self) -> Plain:
        return self.temperature, self.top_p, self.top_k, self.min_p, self.seed, self.step


Plain = tuple[float, float, int, float, int, int]  # temperature, top_p, top_k, min_p, seed, step


def plain_spec(values: Plain) -> SampleSpec:
    temperature, top_p, top_k, min_p, seed, step = values
    return SampleSpec(temperature, top_p, top_k, min_p, seed=seed, step=step)


@dataclass
class StepRequest:
    """One request's share of a step: query rows at positions [num_computed, num_computed + len(token_ids))."""

    request_id: str
    slot: int  # row of the per-request state (windows, ring), 0..max_num_seqs-1
    token_ids: Int32  # [n] >= 1; of a single row perhaps PENDING
    lookback: Int32  # up to ngram-1 ids before num_computed, oldest first (shorter only at the sequence start)
    num_computed: int
    is_prefill: bool  # num_computed < prompt length, whatever n is
    block_ids: Int32  # block table, covers num_computed + n positions
    kv_write_start: int = 0  # compressed entries of tokens before this position exist already: do not write
    window_start: int = 0  # first position whose window latent may be read (bounded replay)
    kept_rows: int = -1  # trailing rows that go through the decoder layers (bounded replay); -1: all
    sample: SampleSpec | None = None  # None: the last row is not sampled (a prefill chunk that is not the last)
    is_last_chunk: bool = True  # the prompt ends with this chunk (or this is a decode row)
    prompt_logprobs: int | None = None  # report logprobs of the prompt tokens that these rows predict
    prompt_targets: Int32 | None = None  # [n] id that follows each row; -1 where it is not a prompt token

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class Number(IntEnum):
    """The columns of `Columns.numbers`. First the lengths of a request's three arrays."""

    TOKENS = 0
    LOOKBACK = 1
    BLOCKS = 2
    SLOT = 3
    IS_PREFILL = 4
    COMPUTED = 5
    WRITE_START = 6
    WINDOW_START = 7
    KEPT_ROWS = 8
    IS_LAST_CHUNK = 9


@dataclass
class Columns:
    """The requests of a step side by side, n of them, arrays joined in step order."""

    request_ids: list[str]
    numbers: Int64  # [n, len(Number)] as `numbers_of` gives them
    token_ids: Int32
    lookback: Int32
    block_ids: Int32
    samples: list[Plain | SampleSpec | None]
    prompts: dict[int, tuple[int, Int32 | None]]  # prompt_logprobs and prompt_targets of the requests that want any

    @property
    def is_decode(self) -> bool:
        """Whether each request has one row, which is sampled and is no part of a prompt."""
        rows, prefill = self.numbers[:, Number.TOKENS], self.numbers[:, Number.IS_PREFILL]
        return not self.prompts and bool((rows == 1).all()) and not prefill.any() and None not in self.samples

    @property
    def first_tokens(self) -> Int64:
        """[n] where each request's tokens begin in `token_ids`."""
        lengths = self.numbers[:, Number.TOKENS]
        return np.cumsum(lengths) - lengths

    def pending(self) -> list[int]:
        """The requests whose token is PENDING."""
        if not (self.token_ids == PENDING).any():
            return []
        return np.flatnonzero(self.token_ids[self.first_tokens] == PENDING).tolist()

    def with_tokens(self, requests: list[int], tokens: Int64) -> Columns:
        """The same with the tokens of those requests."""
        token_ids = self.token_ids.copy()
        token_ids[self.first_tokens[requests]] = tokens
        return replace(self, token_ids=token_ids)

    def specs(self) -> list[SampleSpec | None]:
        return [plain_spec(s) if isinstance(s, tuple) else s for s in self.samples]

    def requests(self) -> list[StepRequest]:
        lengths, others = self.numbers[:, : Number.SLOT], self.numbers[:, Number.SLOT :]
        ends = np.cumsum(lengths, axis=0)
        every = zip(
            self.request_ids, (ends - lengths).tolist(), ends.tolist(), others.tolist(), self.specs(), strict=True
        )
        found = []
        for i, (name, (t, k, b), (t1, k1, b1), (slot, prefill, computed, *bounds, last), spec) in enumerate(every):
            tokens, lookback, blocks = self.token_ids[t:t1], self.lookback[k:k1], self.block_ids[b:b1]
            shown = self.prompts.get(i, (None, None))
            request = (name, slot, tokens, lookback, computed, bool(prefill), blocks, *bounds, spec, bool(last), *shown)
            found.append(StepRequest(*request))
        return found


def numbers_of(r: StepRequest) -> tuple[int, ...]:
    """In the order of `Number`."""
    return (
        *(len(r.token_ids), len(r.lookback), len(r.block_ids), r.slot, r.is_prefill, r.num_computed),
        *(r.kv_write_start, r.window_start, r.kept_rows, r.is_last_chunk),
    )


def columns_of(requests: list[StepRequest]) -> Columns:
    return Columns(
        [r.request_id for r in requests],
        np.array([numbers_of(r) for r in requests], np.int64).reshape(-1, len(Number)),
        _joined([r.token_ids for r in requests]),
        _joined([r.lookback for r in requests]),
        _joined([r.block_ids for r in requests]),
        [s.plain if (s := r.sample) is not None and s.is_plain else s for r in requests],
        {i: (r.prompt_logprobs, r.prompt_targets) for i, r in enumerate(requests) if r.prompt_logprobs is not None},
    )


def _joined(parts: list[Int32]) -> Int32:
    return np.concatenate([np.zeros(0, np.int32), *parts], dtype=np.int32)


class StepInput:
    """One step: made of `requests`, pickled as `columns`; each is made from the other where it is first asked for."""

    def __init__(self, step_id: int, requests: list[StepRequest]):
        self.step_id, self.requests = step_id, requests

    @cached_property
    def requests(self) -> list[StepRequest]:
        return self.columns.requests()

    @cached_property
    def columns(self) -> Columns:
        return columns_of(self.requests)

    def __reduce__(self) -> tuple[Callable[..., StepInput], tuple[Any, ...]]:
        return _step_of, (self.step_id, *vars(self.columns).values())


def step_of(step_id: int, columns: Columns) -> StepInput:
    step = StepInput.__new__(StepInput)
    step.step_id, step.columns = step_id, columns
    return step


def _step_of(step_id: int, *columns: Any) -> StepInput:
    return step_of(step_id, Columns(*columns))


@dataclass
class TokenLogprobs:
    """Log-probabilities of one position: the token itself, its rank (1 = best) and the top entries."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass
class Sampled:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass
class StepOutput:
    step_id: int
    sampled: dict[str, Sampled] = field(default_factory=dict)  # request_id -> token
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)  # seconds per component of this step, rank 0

    def __reduce__(self) -> tuple[Callable[..., StepOutput], tuple[Any, ...]]:
        tokens = [s.token_id for s in self.sampled.values()]
        logprobs = [s.logprobs for s in self.sampled.values()]
        found = logprobs if any(x is not None for x in logprobs) else None
        return _output_of, (self.step_id, list(self.sampled), tokens, found, self.prompt_logprobs, self.timings)


def _output_of(
    step_id: int,
    request_ids: list[str],
    tokens: list[int],
    logprobs: list[TokenLogprobs | None] | None,
    prompt_logprobs: dict[str, list[TokenLogprobs]],
    timings: dict[str, float],
) -> StepOutput:
    every = map(Sampled, tokens, logprobs) if logprobs else map(Sampled, tokens)
    return StepOutput(step_id, dict(zip(request_ids, every, strict=True)), prompt_logprobs, timings)
