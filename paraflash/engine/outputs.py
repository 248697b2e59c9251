"""What `LLM.generate` returns, in vLLM's shape: a `RequestOutput` per prompt with a `CompletionOutput` per sample."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from paraflash.engine.messages import TokenLogprobs
from paraflash.engine.tokenizer import token_bytes


@dataclass
class Logprob:
    """One token at one position; rank 1 is the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Position = dict[int, Logprob]  # the token itself first, then the best ones


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # only with logprobs
    logprobs: list[Position] | None = None  # one per token
    finish_reason: str | None = None  # stop, length, abort
    stop_reason: int | str | None = None  # the stop token id or stop string; None for end of sequence

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Moments in seconds of `time.monotonic()`."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_preemptions: int = 0


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None  # None where the prompt was given as ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[Position | None] | None = None  # None for the first token
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None


def position(tokenizer: Tokenizer, found: TokenLogprobs) -> Position:
    """The token and the best tokens of one position as a dict by id."""
    table = token_bytes(tokenizer)

    def entry(token: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, table[token].decode("utf-8", "replace"))

    entries = {found.token_id: entry(found.token_id, found.logprob, found.rank)}
    for rank, (token, logprob) in enumerate(zip(found.top_ids, found.top_logprobs, strict=True), 1):
        entries.setdefault(token, entry(token, logprob, rank))
    return entries
