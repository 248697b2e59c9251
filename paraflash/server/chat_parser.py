"""From the text of an answer to deltas of reasoning, content and tool calls; deepseek-recipe does the parsing.

Two things are added to it. The beginning of a marker that the end of an answer has cut off is dropped rather than
shown, and the arguments of every call are valid JSON however the answer ends (`JsonGuard`).
"""

from __future__ import annotations

import json
from typing import Any

import deepseek_recipe as recipe

from paraflash.server.chat_codec import Prepared
from paraflash.server.json_guard import JsonGuard

Delta = dict[str, Any]  # reasoning, content and tool_calls, each only if there is something
_MARKERS = ("<｜DSML｜", "</｜DSML｜")


def _open_marker(text: str) -> int:
    """Length of the longest end of `text` that is the beginning of a marker, but no whole one."""
    for length in range(min(len(text), max(map(len, _MARKERS)) - 1), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in _MARKERS):
            return length
    return 0


class ChatParser:
    """Parses one choice. Feed it text in order, then `finish` once."""

    def __init__(self, prepared: Prepared, parallel_tool_calls: bool = True, reasoning: bool = True):
        request = recipe.ConversationRequest(prepared.conversation, recipe.ModelVersion.DeepseekV41Flash)
        generator = recipe.ChatCompletionRequest.chunk_generator(request, "", "")
        self._processor = recipe.StreamProcessor(generator, prepared.parsing)
        self._parallel, self._reasoning = parallel_tool_calls, reasoning
        self._parses_calls = prepared.parsing.parse_tool_calls
        self._held = ""
        self._guards: dict[int, JsonGuard] = {}
        self._finish_reason: str | None = None
        self._processor.push(recipe.InferenceChunk.ready())

    def feed(self, text: str) -> list[Delta]:
        if not self._parses_calls:
            return self._push(text)
        text = self._held + text
        keep = len(text) - _open_marker(text)
        self._held = text[keep:]
        return self._push(text[:keep])

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        """reason: `stop` or `length`, as the engine says. Returns the last deltas and OpenAI's finish reason."""
        inside_call = bool(self._guards) and not self._calls_done()
        deltas = [] if inside_call or "｜" in self._held else self._push(self._held)
        kind = recipe.InferenceFinishReason
        if not self._processor.finished:
            end = kind.Length if reason == "length" else kind.Stop
            deltas += self._read(self._processor.push(recipe.InferenceChunk.finish(end)))
            deltas += self._read(self._processor.finish())
        deltas += self._close(before=None)
        return deltas, self._finish_reason or reason

    def _calls_done(self) -> bool:
        return all(guard.complete for guard in self._guards.values())

    def _push(self, text: str) -> list[Delta]:
        if not text or self._processor.finished:
            return []
        return self._read(self._processor.push(recipe.InferenceChunk.text(text)))

    def _read(self, chunks: list[Any]) -> list[Delta]:
        deltas: list[Delta] = []
        for chunk in chunks:
            choice = json.loads(chunk.to_json())["choices"][0]
            self._finish_reason = choice["finish_reason"] or self._finish_reason
            raw = choice["delta"]
            if self._reasoning and raw.get("reasoning_content"):
                deltas.append({"reasoning": raw["reasoning_content"], "reasoning_content": raw["reasoning_content"]})
            if raw.get("content"):
                deltas.append({"content": raw["content"]})
            for call in raw.get("tool_calls") or []:
                deltas += self._call(call)
        return deltas

    def _call(self, call: dict[str, Any]) -> list[Delta]:
        index = call["index"]
        if index > 0 and not self._parallel:
            return []
        deltas: list[Delta] = []
        if index not in self._guards:
            deltas += self._close(before=index)
            self._guards[index] = JsonGuard()
        given = call["function"].get("arguments") or ""
        arguments = self._guards[index].feed(given)
        if "id" in call:
            function = {**call["function"], "arguments": arguments}
            deltas.append({"tool_calls": [{**call, "function": function}]})
        elif arguments:
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
        return deltas

    def _close(self, before: int | None) -> list[Delta]:
        """What completes the arguments of calls that are over."""
        deltas: list[Delta] = []
        for index, guard in self._guards.items():
            if (before is None or index < before) and (rest := guard.close()):
                deltas.append({"tool_calls": [{"index": index, "function": {"arguments": rest}}]})
        return deltas
