"""/v1/chat/completions: reasoning, content and tool calls, streamed or not.

Reasoning is sent as `reasoning` (the present name) and as `reasoning_content` (the former one).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from paraflash.engine.messages import TokenLogprobs
from paraflash.server import sampling
from paraflash.server.chat_parser import ChatParser, Delta
from paraflash.server.errors import bad_request
from paraflash.server.generation import Event, Generation
from paraflash.server.logprobs import chat_logprobs, prompt_logprobs
from paraflash.server.protocol import ChatRequest
from paraflash.server.respond import DONE, event
from paraflash.server.state import ServerState


class Chat:
    """One request of this route, from its checks to its answer."""

    def __init__(self, state: ServerState, request: ChatRequest, request_id: str):
        self.state, self.request = state, request
        self.model = state.check_model(request.model)
        self.id, self.created = f"chatcmpl-{request_id}", int(time.time())
        self._parsers: dict[int, ChatParser] = {}

    async def start(self) -> None:
        """Checks the request and hands it to the engine. Raises `ApiError` and what `Generation.start` raises."""
        request, limits = self.request, self.state.limits
        if (refused := sampling.not_supported(request)) is not None:
            raise refused
        sampling.check_stream_options(request)
        n = sampling.check_choices(1, request.n)
        self.top = self._top_logprobs()
        sampling.check_logprobs("top_logprobs", self.top, limits)
        sampling.check_logprobs("prompt_logprobs", request.prompt_logprobs, limits)
        if request.stream and request.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs is not supported with stream: true", "prompt_logprobs")
        grammar, grammar_field = sampling.grammar_of(request)
        self.prepared = await self.state.chat.prepare(request, grammar)
        named = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
        wanted = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        prompt = self.prepared.prompt_token_ids
        sampling.room_for(len(prompt), wanted, limits, named)
        params = sampling.sampling_params(
            request, limits, wanted, self.top, request.prompt_logprobs, self.prepared.grammar, keep_special=True
        )
        self.generation = await Generation.start(
            self.state,
            self.id,
            [prompt],
            params,
            n,
            self.state.chat.hidden_ids,
            request.cache_salt,
            grammar_field if grammar is not None else "tools",
        )
        parallel = request.parallel_tool_calls is not False
        reasoning = request.include_reasoning is not False
        for choice in self.generation.choices:
            self._parsers[choice.index] = ChatParser(self.prepared, parallel, reasoning)

    def _top_logprobs(self) -> int | None:
        if self.request.top_logprobs is not None and not self.request.logprobs:
            if self.request.top_logprobs == 0:
                return None
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        return (self.request.top_logprobs or 0) if self.request.logprobs else None

    def _deltas(self, item: Event) -> tuple[list[Delta], str | None]:
        """What the event adds, and the finish reason if it is the choice's last."""
        parser, reason = self._parsers[item.choice.index], item.choice.finish_reason
        deltas = parser.feed(item.text)
        if reason is None:
            return deltas, None
        last, reason = parser.finish(reason)
        return [*deltas, *last], reason

    def _logprobs(self, rows: list[TokenLogprobs]) -> dict[str, Any] | None:
        if self.top is None:
            return None
        as_ids = bool(self.request.return_tokens_as_token_ids)
        return {"content": chat_logprobs(self.state.tokenizer, rows, self.top, as_ids)}

    def _usage(self) -> dict[str, Any]:
        reasoning = None
        if self.prepared.conversation.thinking_mode:
            reasoning = sum(self._reasoning_tokens(c.token_ids) for c in self.generation.choices)
        return self.generation.usage(reasoning_tokens=reasoning)

    def _reasoning_tokens(self, ids: list[int]) -> int:
        """Tokens before the end of thinking; all of them if it has not come."""
        if not self.prepared.starts_in_reasoning:
            return 0
        end = self.state.chat.think_end_id
        return ids.index(end) if end in ids else len(ids)

    def _body(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        messages = {c.index: _Message() for c in self.generation.choices}
        rows: dict[int, list[TokenLogprobs]] = {c.index: [] for c in self.generation.choices}
        prompt_rows: list[TokenLogprobs] = []
        reasons: dict[int, str | None] = {}
        async for item in self.generation.events():
            deltas, reasons[item.choice.index] = self._deltas(item)
            messages[item.choice.index].add(deltas)
            rows[item.choice.index] += item.logprobs
            prompt_rows = item.prompt_logprobs or prompt_rows
        choices = []
        for choice in self.generation.choices:
            entry = {
                "index": choice.index,
                "message": messages[choice.index].body(),
                "logprobs": self._logprobs(rows[choice.index]),
                "finish_reason": reasons[choice.index],
                "stop_reason": choice.stop_reason,
            }
            if self.request.return_token_ids:
                entry["token_ids"] = choice.token_ids
            choices.append(entry)
        body = {**self._body("chat.completion"), "choices": choices, "usage": self._usage()}
        prompt = self.prepared.prompt_token_ids
        if self.request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(
                self.state.tokenizer, prompt, prompt_rows, self.request.prompt_logprobs
            )
        if self.request.return_token_ids:
            body["prompt_token_ids"] = prompt
        return body

    async def stream(self) -> AsyncIterator[bytes]:
        """The answer as events: the role, the deltas, the finish reason, the usage if asked for, [DONE].

        Log-probabilities of tokens whose text is still held back go with the next chunk of their choice.
        """
        options = self.request.stream_options
        wants_usage = self.state.options.force_include_usage or bool(options and options.include_usage)
        each = wants_usage and bool(options and options.continuous_usage_stats)
        rows: dict[int, list[TokenLogprobs]] = {c.index: [] for c in self.generation.choices}
        ids: dict[int, list[int]] = {c.index: [] for c in self.generation.choices}

        def chunk(index: int, delta: Delta, reason: str | None = None, stop: int | str | None = None) -> bytes:
            entry: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
            if rows[index]:
                entry["logprobs"], rows[index] = self._logprobs(rows[index]), []
            if reason is not None:
                entry["stop_reason"] = stop
            if self.request.return_token_ids:
                entry["token_ids"], ids[index] = ids[index], []
            body = {**self._body("chat.completion.chunk"), "choices": [entry]}
            if self.request.return_token_ids and "role" in delta:
                body["prompt_token_ids"] = self.prepared.prompt_token_ids
            return event({**body, "usage": self._usage()} if each else body)

        for choice in self.generation.choices:
            yield chunk(choice.index, {"role": "assistant", "content": ""})
        async for item in self.generation.events():
            index = item.choice.index
            deltas, reason = self._deltas(item)
            rows[index] += item.logprobs
            ids[index] += item.token_ids
            for delta in deltas:
                yield chunk(index, delta)
            if reason is not None:
                yield chunk(index, {}, reason, item.choice.stop_reason)
        if wants_usage:
            yield event({**self._body("chat.completion.chunk"), "choices": [], "usage": self._usage()})
        yield DONE


class _Message:
    """Puts the deltas of one choice together."""

    def __init__(self) -> None:
        self.reasoning, self.content = "", ""
        self.calls: dict[int, dict[str, Any]] = {}

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.reasoning += delta.get("reasoning", "")
            self.content += delta.get("content", "")
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    function = {"name": call["function"]["name"], "arguments": ""}
                    self.calls[call["index"]] = {"id": call["id"], "type": "function", "function": function}
                self.calls[call["index"]]["function"]["arguments"] += call["function"].get("arguments", "")

    def body(self) -> dict[str, Any]:
        reasoning = self.reasoning or None
        content: str | None = self.content
        if not self.content and (self.calls or reasoning):
            content = None
        body: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        body |= {"reasoning": reasoning, "reasoning_content": reasoning}
        return body | ({"tool_calls": [self.calls[i] for i in sorted(self.calls)]} if self.calls else {})
