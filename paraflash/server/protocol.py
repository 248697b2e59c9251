"""The bodies that clients send, as pydantic models: OpenAI's fields plus the sampling fields that vLLM adds.

Types are strict (no "1" for 1), null means "not given", and a field that we do not know is accepted and ignored, as
vLLM does. Ranges are checked once, by `SamplingParams`, whose errors name the field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# Every integer must fit the engine's messages; the exact ranges are the engine's to check.
Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Body):
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "regex", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    regex: str | None = None


class StructuredOutputsField(Body):
    """vLLM's `structured_outputs`; exactly one of them."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


class SamplingFields(Body):
    """What a completion and a chat completion have in common."""

    model: str | None = None
    n: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionRequest(SamplingFields):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = None
    logprobs: Int | None = None
    suffix: str | None = None
    best_of: Int | None = None
    add_special_tokens: bool | None = None


class ChatMessage(Body):
    """The parts of a message are read by deepseek-recipe; here only its outline is fixed."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    prefix: bool | None = None


class FunctionTool(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: NamedFunction


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]


class ChatTemplateKwargs(Body):
    """Names under which clients of other servers switch the thinking of this model."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None


class ChatFields(Body):
    """What decides the prompt of a chat."""

    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class ChatRequest(ChatFields, SamplingFields):
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


class TokenizeRequest(Body):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[TokenId]
