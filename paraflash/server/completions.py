"""/v1/completions: text or token prompts, batches, n, echo, log-probabilities, streamed or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from paraflash.engine.sampling_params import SamplingParams
from paraflash.server import sampling
from paraflash.server.errors import bad_request
from paraflash.server.generation import Choice, Event, Generation
from paraflash.server.logprobs import CompletionLogprobs, merge_pieces, prompt_logprobs
from paraflash.server.protocol import CompletionRequest
from paraflash.server.respond import DONE, event
from paraflash.server.state import ServerState

_DEFAULT_MAX_TOKENS = 16  # OpenAI's for this route


class Completion:
    """One request of this route, from its checks to its answer."""

    def __init__(self, state: ServerState, request: CompletionRequest, request_id: str):
        self.state, self.request = state, request
        self.model = state.check_model(request.model)
        self.id, self.created = f"cmpl-{request_id}", int(time.time())
        self.echo = bool(request.echo)
        self.only_echo = self.echo and request.max_tokens == 0
        self.as_ids = bool(request.return_tokens_as_token_ids)
        self._logprobs: dict[int, CompletionLogprobs] = {}

    async def start(self) -> None:
        """Checks the request and hands it to the engine. Raises `ApiError` and what `Generation.start` raises."""
        request, limits = self.request, self.state.limits
        if (refused := sampling.not_supported(request)) is not None:
            raise refused
        if request.suffix:
            raise bad_request("suffix is not supported; put the text into the prompt", "suffix")
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise bad_request("best_of is not supported; use n", "best_of")
        sampling.check_stream_options(request)
        sampling.check_logprobs("logprobs", request.logprobs, limits)
        sampling.check_logprobs("prompt_logprobs", request.prompt_logprobs, limits)
        prompts = await self._prompts()
        n = sampling.check_choices(len(prompts), request.n)
        wanted = request.max_tokens
        if self.only_echo:
            wanted = 1  # the engine always draws one token; it is not shown
        for prompt in prompts:
            sampling.room_for(len(prompt), wanted, limits)
        if wanted is None:
            wanted = min(_DEFAULT_MAX_TOKENS, *(limits.max_model_len - len(prompt) for prompt in prompts))
        # What an echo shows and what prompt_logprobs shows come from one list, which has the most that either asks for.
        tops = [request.prompt_logprobs, request.logprobs if self.echo else None]
        asked = max((top for top in tops if top is not None), default=None)
        if request.stream and request.prompt_logprobs is not None:
            raise bad_request(
                "prompt_logprobs is not supported with stream: true; use echo with logprobs", "prompt_logprobs"
            )
        grammar, grammar_field = sampling.grammar_of(request)
        self.params: SamplingParams = sampling.sampling_params(
            request, limits, wanted, request.logprobs, asked, grammar
        )
        self.generation = await Generation.start(
            self.state, self.id, prompts, self.params, n, cache_salt=request.cache_salt, grammar_field=grammar_field
        )

    async def _prompts(self) -> list[list[int]]:
        given = self.request.prompt
        special = self.request.add_special_tokens is not False
        tokenizer = self.state.tokenizer
        if isinstance(given, str):
            prompts = [await tokenizer.encode(given, special)]
        elif not given:
            raise bad_request("prompt is empty; at least one token is needed", "prompt")
        elif isinstance(given[0], int):
            prompts = [list(given)]  # type: ignore[arg-type]
        elif isinstance(given[0], str):
            sampling.check_choices(len(given), self.request.n)
            prompts = list(await asyncio.gather(*(tokenizer.encode(str(text), special) for text in given)))
        else:
            prompts = [list(ids) for ids in given]  # type: ignore[arg-type]
        for prompt in prompts:
            if not prompt:
                raise bad_request("prompt is empty; at least one token is needed", "prompt")
            if max(prompt) >= self.state.limits.vocab_size:
                raise bad_request(
                    f"prompt has token id {max(prompt)}; ids from 0 to {self.state.limits.vocab_size - 1} are allowed",
                    "prompt",
                )
        return prompts

    def _piece(self, event_: Event) -> tuple[str, dict[str, Any] | None, list[int]]:
        """(text, logprobs, token ids) that this event adds to its choice."""
        choice, text, ids = event_.choice, event_.text, list(event_.token_ids)
        rows: list[Any] = list(event_.logprobs)
        if self.only_echo:
            text, ids, rows = "", [], []
        if self.echo and event_.first:
            text = self._prompt_text(choice) + text
            ids = choice.prompt + ids
            rows = [None, *(event_.prompt_logprobs or []), *rows]
        if self.request.logprobs is None:
            return text, None, ids
        if choice.index not in self._logprobs:
            self._logprobs[choice.index] = CompletionLogprobs(self.state.tokenizer, self.request.logprobs, self.as_ids)
        return text, self._logprobs[choice.index].piece(rows, ids), ids

    def _prompt_text(self, choice: Choice) -> str:
        given = self.request.prompt
        if isinstance(given, str):
            return given
        if isinstance(given[0], str):
            return str(given[choice.index // (self.request.n or 1)])
        return self.state.tokenizer.decode(choice.prompt)

    def _finish(self, choice: Choice) -> tuple[str | None, int | str | None]:
        return (
            ("length", None) if self.only_echo and choice.finish_reason else (choice.finish_reason, choice.stop_reason)
        )

    def _usage(self) -> dict[str, Any]:
        return self.generation.usage(0 if self.only_echo else None)

    def _body(self, kind: str = "text_completion") -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        texts: dict[int, str] = {}
        pieces: dict[int, list[dict[str, Any]]] = {}
        prompt_rows: dict[int, Any] = {}
        async for item in self.generation.events():
            text, logprobs, _ = self._piece(item)
            texts[item.choice.index] = texts.get(item.choice.index, "") + text
            if logprobs is not None:
                pieces.setdefault(item.choice.index, []).append(logprobs)
            if item.prompt_logprobs is not None:
                prompt_rows[item.choice.index] = item.prompt_logprobs
        choices = []
        for choice in self.generation.choices:
            reason, stop = self._finish(choice)
            entry: dict[str, Any] = {
                "index": choice.index,
                "text": texts.get(choice.index, ""),
                "logprobs": merge_pieces(pieces[choice.index]) if choice.index in pieces else None,
                "finish_reason": reason,
                "stop_reason": stop,
                "prompt_logprobs": None,
            }
            if self.request.prompt_logprobs is not None:
                rows = prompt_rows.get(choice.index, [])
                entry["prompt_logprobs"] = prompt_logprobs(
                    self.state.tokenizer, choice.prompt, rows, self.request.prompt_logprobs
                )
            if self.request.return_token_ids:
                entry["token_ids"] = [] if self.only_echo else choice.token_ids
                entry["prompt_token_ids"] = choice.prompt
            choices.append(entry)
        return {**self._body(), "choices": choices, "usage": self._usage()}

    async def stream(self) -> AsyncIterator[bytes]:
        """The answer as events: one chunk per delta, the usage if asked for, [DONE]."""
        options = self.request.stream_options
        wants_usage = self.state.options.force_include_usage or bool(options and options.include_usage)
        each = wants_usage and bool(options and options.continuous_usage_stats)
        async for item in self.generation.events():
            text, logprobs, ids = self._piece(item)
            reason, stop = self._finish(item.choice)
            if not text and not ids and reason is None:
                continue
            entry: dict[str, Any] = {
                "index": item.choice.index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": reason,
                "stop_reason": stop,
            }
            if self.request.return_token_ids:
                entry["token_ids"] = [] if self.only_echo else item.token_ids
                if item.first:
                    entry["prompt_token_ids"] = item.choice.prompt
            body = {**self._body(), "choices": [entry]}
            yield event({**body, "usage": self._usage()} if each else body)
        if wants_usage:
            yield event({**self._body(), "choices": [], "usage": self._usage()})
        yield DONE
