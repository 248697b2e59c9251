"""From the fields of a request to the `SamplingParams` of the engine: defaults, limits of the context, grammars."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paraflash.config.model import ConfigError
from paraflash.engine.sampling_params import BadField, SamplingParams, StructuredOutputs
from paraflash.server.errors import ApiError, bad_request
from paraflash.server.protocol import ResponseFormat, SamplingFields

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_NOT_SUPPORTED = {
    "use_beam_search": "use n with a temperature above 0",
    "prompt_embeds": "send text or token ids",
    "bad_words": "use logit_bias",
    "allowed_token_ids": "use logit_bias or a grammar",
    "logits_processors": "use logit_bias or a grammar",
    "truncate_prompt_tokens": "shorten the prompt",
    "thinking_token_budget": "use reasoning_effort",
    "functions": "send tools",
    "documents": "put their text into the messages",
    "chat_template": "the chat format of this model is fixed",
    "web_search_options": "nothing in a request can reach the network",
}
_MAX_CHOICES = 128  # of one request: prompts times n
_MAX_STOPS = 64
_MAX_DEPTH = 64  # of a JSON schema; compilers of grammars recurse


@dataclass
class Limits:
    """What the engine serves."""

    max_model_len: int
    vocab_size: int
    max_logprobs: int
    defaults: dict[str, Any] = field(default_factory=dict)  # sampling fields that a request leaves open


def generation_defaults(folder: str | Path, source: str, override: dict[str, Any]) -> dict[str, Any]:
    """Defaults of requests. source: `auto` reads the checkpoint's generation_config.json if there is one, `vllm` none,
    anything else is a folder that must have one. Raises `ConfigError` and `BadField`."""
    raw: dict[str, Any] = {}
    path = Path(folder if source == "auto" else source) / "generation_config.json"
    if source != "vllm" and (path.is_file() or source != "auto"):
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{path} must hold one JSON object")
    raw = {**raw, **override}
    chosen = {name: raw[name] for name in _DEFAULTABLE if raw.get(name) is not None}
    if raw.get("do_sample") is False and "temperature" not in override:
        chosen["temperature"] = 0.0
    try:
        SamplingParams(**chosen)
    except BadField as error:
        raise BadField(f"generation config: {error.field}", error.value, error.allowed) from None
    return chosen


def check_choices(prompts: int, n: int | None) -> int:
    """The number of choices per prompt. Raises 400 if they are none or too many."""
    n = 1 if n is None else n
    if n < 1 or prompts * n > _MAX_CHOICES:
        raise bad_request(f"n is {n} with {prompts} prompt(s); 1 to {_MAX_CHOICES} choices in all are allowed", "n")
    return n


def check_stream_options(request: SamplingFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is only allowed with stream: true", "stream_options")


def check_logprobs(name: str, value: int | None, limits: Limits) -> None:
    if value is not None and not 0 <= value <= limits.max_logprobs:
        raise bad_request(f"{name} is {value}; 0 to {limits.max_logprobs} (--max-logprobs) are allowed", name)


def room_for(prompt_len: int, wanted: int | None, limits: Limits, param: str = "max_tokens") -> int:
    """Output tokens that fit behind the prompt; `wanted` must be among them. Raises 400."""
    if wanted is not None and wanted < 1:
        raise bad_request(f"{param} is {wanted}; an integer of at least 1 is needed", param)
    longest = limits.max_model_len
    if prompt_len >= longest:
        raise bad_request(
            f"This model's maximum context length is {longest} tokens. However, your prompt contains {prompt_len} "
            "input tokens, which leaves no room for output. Shorten the prompt.",
            "input_tokens",
        )
    room = longest - prompt_len
    if wanted is not None and wanted > room:
        raise bad_request(
            f"This model's maximum context length is {longest} tokens. However, you requested {wanted} output tokens "
            f"and your prompt contains {prompt_len} input tokens; at most {room} can be generated.",
            param,
        )
    return room if wanted is None else wanted


def sampling_params(
    request: SamplingFields,
    limits: Limits,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: StructuredOutputs | None,
    keep_special: bool = False,
) -> SamplingParams:
    """Checked parameters; explicit values of the request win over every default. Raises 400."""

    def pick(name: str, default: Any) -> Any:
        value = getattr(request, name)
        return limits.defaults.get(name, default) if value is None else value

    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > _MAX_STOPS:
        raise bad_request(f"stop has {len(stops)} strings; at most {_MAX_STOPS} are allowed", "stop")
    try:
        params = SamplingParams(
            n=1,
            temperature=pick("temperature", 1.0),
            top_p=pick("top_p", 1.0),
            top_k=pick("top_k", 0),
            min_p=pick("min_p", 0.0),
            presence_penalty=pick("presence_penalty", 0.0),
            frequency_penalty=pick("frequency_penalty", 0.0),
            repetition_penalty=pick("repetition_penalty", 1.0),
            seed=request.seed,
            stop=list(stops) or None,
            stop_token_ids=request.stop_token_ids or None,
            ignore_eos=bool(request.ignore_eos),
            max_tokens=max_tokens,
            min_tokens=request.min_tokens or 0,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=not keep_special and request.skip_special_tokens is not False,
            include_stop_str_in_output=bool(request.include_stop_str_in_output),
            logit_bias=_logit_bias(request.logit_bias),
            structured_outputs=grammar,
        )
        params.check(limits.vocab_size, limits.max_logprobs)
    except BadField as error:
        raise bad_request(str(error), error.field) from None
    return params


def _logit_bias(raw: dict[str, float] | None) -> dict[int, float] | None:
    if not raw:
        return None
    try:
        return {int(token): bias for token, bias in raw.items()}
    except ValueError:
        raise bad_request("logit_bias: its keys must be token ids", "logit_bias") from None


def grammar_of(request: SamplingFields) -> tuple[StructuredOutputs | None, str]:
    """The grammar that a request asks for, and the field that does. Raises 400 if there are two."""
    found: list[tuple[str, dict[str, Any]]] = []
    if request.structured_outputs is not None:
        given = request.structured_outputs.model_dump(by_alias=True, include=set(_OUTPUT_FIELDS))
        found.append(("structured_outputs", {k: v for k, v in given.items() if v not in (None, False)}))
    for name, kind in _GUIDED.items():
        if (value := getattr(request, name)) is not None:
            found.append((name, {kind: value}))
    if request.response_format is not None and request.response_format.type != "text":
        found.append(("response_format", _response_format(request.response_format)))
    if not found:
        return None, "structured_outputs"
    if len(found) > 1:
        raise bad_request(f"{' and '.join(name for name, _ in found)} exclude each other", found[1][0])
    name, fields = found[0]
    for value in fields.values():
        _check_depth(value, name)
    if fields.get("choice") == []:
        raise bad_request(f"{name}: choice is empty; at least one string is needed", name)
    try:
        return StructuredOutputs(**fields), name
    except BadField as error:
        raise bad_request(f"{name}: {error.allowed} is needed", name) from None


_OUTPUT_FIELDS = ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")


def _response_format(given: ResponseFormat) -> dict[str, Any]:
    if given.type == "json_object":
        return {"json_object": True}
    if given.type == "json_schema":
        if given.json_schema is None or given.json_schema.json_schema is None:
            raise bad_request("response_format.json_schema.schema is missing", "response_format")
        return {"json": given.json_schema.json_schema}
    if given.type == "regex":
        if not given.regex:
            raise bad_request("response_format.regex is missing", "response_format")
        return {"regex": given.regex}
    extra = {k: v for k, v in (given.model_extra or {}).items() if v is not None}
    return {"structural_tag": {"type": "structural_tag", **extra}}


def _check_depth(value: Any, name: str) -> None:
    """Refuses nesting that would exhaust the stack of a grammar compiler. A JSON string is looked at decoded."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return  # not JSON: an EBNF grammar or a regex, or a fault that the compiler reports
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [c for v in level for c in (v.values() if isinstance(v, dict) else v if isinstance(v, list) else ())]
        if not level:
            return
    raise bad_request(f"{name} is nested more than {_MAX_DEPTH} levels deep", name)


def not_supported(request: SamplingFields) -> ApiError | None:
    """Fields of other servers that change the result, so that ignoring them would be wrong."""
    for name, instead in _NOT_SUPPORTED.items():
        if (request.model_extra or {}).get(name) not in (None, False, "", [], {}):
            return bad_request(f"{name} is not supported; {instead}", name)
    return None
