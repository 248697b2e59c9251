"""From a chat request to prompt ids: deepseek-recipe checks and encodes the conversation (model.md section 6).

Only the parts of a request that shape the prompt go through recipe's converter. Sampling fields do not: it would
replace a temperature in thinking mode and every top_p, and here the user's explicit values win. Text of users is
encoded without the tokenizer's added vocabulary, so it cannot forge a role or a thinking marker.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

from paraflash.engine.sampling_params import StructuredOutputs
from paraflash.server.errors import ApiError, bad_request
from paraflash.server.grammar import after_thinking, forced_calls, strict_calls
from paraflash.server.protocol import ChatFields, ChatMessage
from paraflash.server.tokens import TextTokenizer

_MODEL = "model"  # the name under which recipe sees the model; clients never do
_IMAGE_MARKS = ("<｜image｜>", "<｜deepseek_image｜>")
_NEEDED = ("<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<think>", "</think>", "｜DSML｜")
_CONTROLS = [token for token in vars(recipe.SpecialToken).values() if isinstance(token, recipe.SpecialToken)]
_MAX_SCHEMA_DEPTH = 64


@dataclass
class Prepared:
    """A conversation that is ready to run."""

    conversation: recipe.Conversation
    prompt_token_ids: list[int]
    parsing: recipe.ParsingOptions
    grammar: StructuredOutputs | None

    @property
    def starts_in_reasoning(self) -> bool:
        stage = self.parsing.thinking_initial_stage
        return stage is not None and stage.starts_in_reasoning() and not self.parsing.starts_in_tool_calls


class ChatCodec:
    """`missing` names chat tokens that the tokenizer lacks; such a checkpoint only serves completions."""

    def __init__(self, tokenizer: TextTokenizer, thinking_by_default: bool = True):
        self.missing = [token for token in _NEEDED if tokenizer.id_of(token) is None]
        self.think_end_id = tokenizer.id_of("</think>")
        # Control tokens are never part of an answer's text; the parser needs the markers of thinking and of calls.
        controls = {tokenizer.id_of(token.default_str()) for token in _CONTROLS}
        marks = {tokenizer.id_of(token) for token in ("<think>", "</think>", "｜DSML｜")}
        self.hidden_ids = frozenset(i for i in (tokenizer.special_ids | controls) - marks if i is not None)
        self._options = (
            recipe.ConversionOptions()
            .with_model_alias(_MODEL, recipe.ModelVersion.DeepseekV41Flash)
            .with_default_thinking_mode(thinking_by_default)
        )
        self._encoding = None
        if not self.missing:
            self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(
                recipe.Tokenizer.from_file(str(tokenizer.path))
            )

    async def prepare(self, request: ChatFields, grammar: StructuredOutputs | None = None) -> Prepared:
        """Checks and encodes a conversation, in a thread. `grammar` is what the answer must follow. Raises 400."""
        if self._encoding is None:
            raise bad_request(
                f"this model's tokenizer has no chat tokens ({', '.join(self.missing)}); use /v1/completions",
                "messages",
            )
        return await asyncio.to_thread(self._prepare, request, grammar)

    def _prepare(self, request: ChatFields, grammar: StructuredOutputs | None) -> Prepared:
        body = self._recipe_body(request)
        try:
            converted = recipe.ChatCompletionRequest(body).convert(self._options)
            conversation = converted.conversation
            wanted = getattr(request, "response_format", None)
            if wanted is not None and wanted.type == "json_object":
                conversation = _with_json_object(conversation)
            assert self._encoding is not None
            ids = self._encoding.encode(conversation)
        except recipe.ConversionError as error:
            raise _converted_error(error) from None
        except (ValueError, RuntimeError, RecursionError) as error:
            message = str(error).removeprefix("invalid request body: ")
            raise bad_request(message, _field_of(message)) from None
        return Prepared(conversation, ids, converted.parsing_options, self._grammar(request, conversation, grammar))

    def _grammar(
        self, request: ChatFields, conversation: recipe.Conversation, grammar: StructuredOutputs | None
    ) -> StructuredOutputs | None:
        parallel = getattr(request, "parallel_tool_calls", None) is not False
        if conversation.tool_choice == "required" and conversation.tools:
            if grammar is not None:
                raise bad_request("a forced tool call excludes response_format and structured outputs", "tool_choice")
            return forced_calls(conversation.tools, parallel and isinstance(request.tool_choice, str))
        thinking = conversation.thinking_mode and not _continues_answer(conversation)
        if grammar is not None:
            return after_thinking(grammar) if thinking else grammar
        return strict_calls(conversation.tools, parallel, thinking)

    def _recipe_body(self, request: ChatFields) -> dict[str, Any]:
        messages = [_message(m, i) for i, m in enumerate(request.messages)]
        if not messages:
            raise bad_request("messages is empty; at least one message is needed", "messages")
        if request.continue_final_message:
            if messages[-1]["role"] != "assistant":
                raise bad_request(
                    "continue_final_message needs an assistant message at the end", "continue_final_message"
                )
            messages[-1]["prefix"] = True
        body: dict[str, Any] = {"model": _MODEL, "messages": messages}
        effort, thinking = _thinking(request)
        if effort is not None:
            body["reasoning_effort"] = effort
        choice = request.tool_choice
        if request.tools:
            body["tools"] = [_tool(tool.model_dump(exclude_none=True)) for tool in request.tools]
            if choice is not None:
                body["tool_choice"] = choice if isinstance(choice, str) else choice.model_dump()
            if choice == "required" or (choice is not None and not isinstance(choice, str)):
                thinking = False  # the prompt itself opens the call, so there is no place to think
                body.pop("reasoning_effort", None)
        elif choice is not None and choice not in ("none", "auto"):
            raise bad_request("tool_choice asks for a call, but there are no tools", "tool_choice")
        if thinking is not None:
            body["thinking"] = {"type": "enabled" if thinking else "disabled"}
        wanted = getattr(request, "response_format", None)
        if wanted is not None and wanted.type == "json_schema":
            body["response_format"] = wanted.model_dump(by_alias=True, exclude_none=True)
        return body


def _thinking(request: ChatFields) -> tuple[str | None, bool | None]:
    """(effort, thinking); None where the request leaves it open. `thinking` itself beats the template's names."""
    kwargs = request.chat_template_kwargs
    effort = request.reasoning_effort or (kwargs.reasoning_effort if kwargs else None)
    thinking = None if kwargs is None else kwargs.thinking if kwargs.thinking is not None else kwargs.enable_thinking
    if request.thinking is not None:
        thinking = request.thinking.type != "disabled"
    if effort == "none":
        if request.thinking is not None and thinking:
            raise bad_request("reasoning_effort none and thinking enabled exclude each other", "reasoning_effort")
        return None, False
    return (None if thinking is False else effort), thinking


def _message(message: ChatMessage, index: int) -> dict[str, Any]:
    """The message as recipe knows it. Raises 400 for what only a multi-modal model could read."""
    where = f"messages.{index}.content"
    out = message.model_dump(include={"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "prefix"})
    out = {key: value for key, value in out.items() if value is not None}
    if message.role == "developer":
        out["role"] = "system"
    if message.reasoning_content is None and message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.content is None:
        if message.role not in ("assistant", "tool"):
            raise bad_request(f"{where} is missing; a string or a list of parts is needed", where)
        out["content"] = ""
    texts = [message.content or ""] if not isinstance(message.content, list) else []
    if isinstance(message.content, list):
        for part in message.content:
            if part.get("type") not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
                kind = str(part.get("type"))[:50]
                raise bad_request(
                    f'{where} has a part of type {kind!r}; {{"type": "text", "text": "..."}} is supported', where
                )
            texts.append(part["text"])
        out["content"] = [{"type": "text", "text": text} for text in texts]
    for mark in _IMAGE_MARKS:
        if any(mark in text for text in texts):
            raise bad_request(f"{where} contains the image placeholder {mark}; only text is supported", where)
    return out


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [tool]
    for _ in range(_MAX_SCHEMA_DEPTH):
        level = [c for v in level for c in (v.values() if isinstance(v, dict) else v if isinstance(v, list) else ())]
        if not level:
            return tool
    raise bad_request(f"tools: a schema is nested more than {_MAX_SCHEMA_DEPTH} levels deep", "tools")


def _with_json_object(conversation: recipe.Conversation) -> recipe.Conversation:
    """Built here because recipe's converter insists on the word "json" in the prompt, which vLLM does not."""
    return recipe.Conversation(
        conversation.messages,
        thinking_mode=conversation.thinking_mode,
        tools=conversation.tools,
        tool_choice=conversation.tool_choice,
        reasoning_effort=conversation.reasoning_effort,
        response_format="json_object",
    )


def _continues_answer(conversation: recipe.Conversation) -> bool:
    """Whether the prompt ends inside the answer, behind the thinking."""
    last = conversation.messages[-1]
    return last.role == "assistant" and last.prefix and bool(last.content)


def _converted_error(error: recipe.ConversionError) -> ApiError:
    try:
        message = str(json.loads(error.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = str(error)
    return bad_request(message, _field_of(message))


def _field_of(message: str) -> str:
    """The field that recipe's message is about; it names none itself."""
    for word, field in (
        ("tool_choice", "tool_choice"),
        ("specified in the 'tools' parameter", "tool_choice"),
        ("Tool names", "tools"),
        ("for function", "tools"),
        ("tool_call", "messages"),
        ("role 'tool'", "messages"),
        ("schema", "response_format"),
        ("function", "tools"),
    ):
        if word in message:
            return field
    return "messages"
