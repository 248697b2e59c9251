"""The choices of one HTTP request, from the engine's deltas to pieces of text.

`Generation.start` hands prompts times n requests to the engine; `events()` yields one `Event` per delta, with text in
which stop strings and split characters are held back. It also keeps the counts for `usage`, metrics and the log.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from paraflash.engine.client import NotTaken, Stream, Submission
from paraflash.engine.detokenizer import Detokenizer
from paraflash.engine.messages import TokenLogprobs
from paraflash.engine.request import Delta, Times
from paraflash.engine.sampling_params import SamplingParams, seed_of_sample
from paraflash.server.errors import ApiError, bad_request
from paraflash.server.state import ServerState

request_log = logging.getLogger("paraflash.requests")
_serial = itertools.count()


@dataclass
class Choice:
    """One generation of the request."""

    index: int
    engine_id: str
    prompt: list[int]
    decoder: Detokenizer
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached: int = 0
    preemptions: int = 0
    last_token: float | None = None
    times: Times | None = None


@dataclass
class Event:
    """What one delta brought for one choice."""

    choice: Choice
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs] | None
    first: bool  # the first of this choice


class Generation:
    def __init__(self, state: ServerState, request_id: str, choices: list[Choice], grammar_field: str):
        self.state, self.request_id, self.choices = state, request_id, choices
        self.grammar_field = grammar_field
        self.arrival = time.monotonic()
        self._by_id = {choice.engine_id: choice for choice in choices}
        self._stream: Stream | None = None
        self._closed = False
        self.error: str | None = None

    @classmethod
    async def start(
        cls,
        state: ServerState,
        request_id: str,
        prompts: list[list[int]],
        params: SamplingParams,
        n: int,
        hidden_ids: frozenset[int] = frozenset(),
        cache_salt: str | None = None,
        grammar_field: str = "structured_outputs",
    ) -> Generation:
        """Choice i of a prompt draws with seed + i; `grammar_field` is the request's name for what set the grammar.

        Raises `ApiError`, `NotTaken` or `EngineGone`; then nothing is left running.
        """
        serial = next(_serial)
        choices, submissions = [], []
        for index, (prompt, i) in enumerate(itertools.product(prompts, range(n))):
            own = replace(params, seed=seed_of_sample(params.seed, i), stop=None)
            name = f"{request_id}-{serial}-{index}"
            decoder = Detokenizer(state.tokenizer.tokenizer, params, hidden_ids)
            choices.append(Choice(index, name, prompt, decoder))
            # Stop strings are found here; the engine has no text.
            submissions.append(Submission(name, prompt, own, cache_salt))
        self = cls(state, request_id, choices, grammar_field)
        try:
            self._stream = await state.engine.submit(submissions)
        except BaseException as error:
            self._closed = True
            if isinstance(error, NotTaken) and error.field == "structured_outputs":
                raise self._bad_grammar(str(error).removeprefix("structured_outputs: ")) from None
            raise
        state.metrics.request_taken(n, params.max_tokens)
        return self

    async def events(self) -> AsyncIterator[Event]:
        """Until every choice has finished. Raises `EngineGone`."""
        assert self._stream is not None
        try:
            async for delta in self._stream:
                yield self._event(delta)
        except Exception as error:
            self.error = str(error)
            raise
        finally:
            self.close()

    def _event(self, delta: Delta) -> Event:
        choice, now = self._by_id[delta.request_id], time.monotonic()
        if delta.finish_reason == "abort":  # not by us: we hear nothing of what we abort
            if isinstance(delta.stop_reason, str):
                raise self._bad_grammar(delta.stop_reason)
            raise ApiError(500, "the engine gave this request up; the server's log has the reason")
        metrics, first = self.state.metrics, not choice.token_ids
        choice.cached, choice.preemptions, choice.times = delta.num_cached_tokens, delta.num_preemptions, delta.times
        choice.token_ids += delta.token_ids
        if delta.token_ids:
            if first:
                metrics.prefill_done(len(choice.prompt), delta.num_cached_tokens)
            metrics.tokens_arrived(len(delta.token_ids), now, choice.last_token, self.arrival)
            choice.last_token = now
        text, stop = choice.decoder.feed(delta.token_ids, delta.finish_reason)
        choice.text += text
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        if stop is not None:
            choice.finish_reason, choice.stop_reason = "stop", stop
            if delta.finish_reason is None and self._stream is not None:
                self._stream.abort([choice.engine_id])
        if choice.finish_reason is not None:
            self._finished(choice)
        return Event(choice, text, delta.token_ids, delta.logprobs or [], delta.prompt_logprobs, first)

    def _bad_grammar(self, reason: str) -> ApiError:
        return bad_request(f"{self.grammar_field}: {reason}", self.grammar_field)

    def _finished(self, choice: Choice) -> None:
        times = choice.times
        if times is not None and times.finished is None:  # ended here by a stop string, or aborted
            times.finished = time.monotonic() if times.first_token is not None else None
        self.state.metrics.request_finished(
            choice.finish_reason or "abort",
            len(choice.prompt),
            len(choice.token_ids),
            choice.cached,
            choice.preemptions,
            time.monotonic() - self.arrival,
            times,
        )

    def close(self) -> None:
        """Ends what still runs, and writes the request's line of the log. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._stream is not None:
            self._stream.close()
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.finish_reason = "error" if self.error else "abort"
                self._finished(choice)
        if self.state.options.log_requests:
            request_log.info("%s", json.dumps(self._log_line()))

    def _log_line(self) -> dict[str, Any]:
        first = [c.times.first_token - c.times.arrival for c in self.choices if c.times and c.times.first_token]
        queued = [c.times.scheduled - c.times.arrival for c in self.choices if c.times and c.times.scheduled]
        return {
            "request_id": self.request_id,
            "choices": len(self.choices),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reasons": [c.finish_reason for c in self.choices],
            "queue_s": round(min(queued), 4) if queued else None,
            "first_token_s": round(min(first), 4) if first else None,
            "total_s": round(time.monotonic() - self.arrival, 4),
            **({"error": self.error} if self.error else {}),
        }

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices it has."""
        return sum(len(prompt) for prompt in {id(c.prompt): c.prompt for c in self.choices}.values())

    @property
    def cached_tokens(self) -> int:
        most: dict[int, int] = {}
        for c in self.choices:
            most[id(c.prompt)] = c.cached if id(c.prompt) not in most else min(most[id(c.prompt)], c.cached)
        return sum(most.values())

    @property
    def completion_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.choices)

    def usage(self, completion_tokens: int | None = None, reasoning_tokens: int | None = None) -> dict[str, Any]:
        """OpenAI's usage object, of everything so far."""
        completion = self.completion_tokens if completion_tokens is None else completion_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": None,
        }
        if self.state.options.prompt_tokens_details:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        if reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
        return usage
