"""What the engine tells its workers each step, and what comes back. Plain data, pickled to every rank alike.

A step is stateless: it carries all that a worker needs (token ids, block tables, look-back ids, sampling), so ranks
cannot drift apart. Nothing here knows of tensor or context parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


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


@dataclass
class StepRequest:
    """One request's share of a step: query rows at positions [num_computed, num_computed + len(token_ids))."""

    request_id: str
    slot: int  # row of the per-request state (windows, ring), 0..max_num_seqs-1
    token_ids: Int32  # [n] >= 1
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


@dataclass
class StepInput:
    step_id: int
    requests: list[StepRequest]


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
