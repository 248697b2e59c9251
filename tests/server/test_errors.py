"""Bad requests: the right status, the field named, and a body that is always JSON. No 500 for bad input."""

import json
from typing import Any

import httpx
import pytest
from running_server import RunningServer

CHAT = {"messages": [{"role": "user", "content": "SAY<<</think>ok>>END"}], "max_tokens": 20}
TEXT = {"prompt": "SAY<<ok>>END"}
TOOL = {"type": "function", "function": {"name": "f"}}
LONG = (
    b'{"prompt": "a", "messages": [], "tokens": [], "max_tokens": ' + b"9" * 5000 + b"}"
)  # digits beyond Python's limit


def post(server: RunningServer, path: str, body: Any, **options: Any) -> httpx.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **options.pop("headers", {})}
    return httpx.post(server.url + path, content=data, headers=headers, **options)


def check(response: httpx.Response, status: int, param: str | None) -> str:
    body = json.loads(response.content)["error"]
    assert (response.status_code, body["code"], body["param"]) == (status, status, param), body
    assert set(body) == {"message", "type", "param", "code"}
    return str(body["message"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -1),
        ("temperature", 2.5),
        ("temperature", "warm"),
        ("temperature", True),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 2),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", float("nan")),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("-inf")),
        ("seed", 2**63),
        ("n", 0),
        ("n", 10**9),
        ("max_tokens", -1),
        ("max_tokens", 10**30),
        ("max_tokens", "many"),
        ("min_tokens", -1),
        ("min_tokens", 10**6),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["x"] * 65),
        ("stop_token_ids", [512]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"512": 1}),
        ("logit_bias", {"1": float("nan")}),
        ("stream_options", {"include_usage": True}),
        ("response_format", {"type": "json_schema"}),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [5]),
        ("truncate_prompt_tokens", 3),
        ("documents", [{"text": "x"}]),
        ("chat_template", "x"),
    ],
)
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_bad_field_is_named(scripted: RunningServer, route: str, field: str, value: Any) -> None:
    body = {**(TEXT if route == "completions" else CHAT), field: value}
    response = post(scripted, f"/v1/{route}", body)
    message = check(response, 400, response.json()["error"]["param"])
    assert response.json()["error"]["param"].split(".")[0] == field, message


@pytest.mark.parametrize(
    ("route", "extra", "param"),
    [
        ("completions", {"logprobs": 25}, "logprobs"),
        ("completions", {"logprobs": -1}, "logprobs"),
        ("completions", {"prompt_logprobs": 25}, "prompt_logprobs"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": [[]]}, "prompt"),
        ("completions", {"prompt": [512]}, "prompt"),
        ("completions", {"prompt": {"a": 1}}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt.0"),
        ("completions", {"prompt": [[5], [6, -1]]}, "prompt.1.1"),
        ("completions", {"prompt": ["a", None]}, "prompt.1"),
        ("completions", {"stop": ["a", 5]}, "stop.1"),
        ("completions", {"prompt": None}, "prompt"),
        ("completions", {"prompt": ["a"] * 129}, "n"),
        ("completions", {"suffix": "x"}, "suffix"),
        ("completions", {"best_of": 3}, "best_of"),
        ("completions", {"use_beam_search": True}, "use_beam_search"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"max_tokens": 5000}, "max_tokens"),
        ("completions", {"prompt": [5] * 4096}, "input_tokens"),
        ("completions", {"prompt": "REFUSE"}, "prompt"),
        ("completions", {"guided_choice": []}, "guided_choice"),
        ("completions", {"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ("completions", {"structured_outputs": {}}, "structured_outputs"),
        ("completions", {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ("chat/completions", {"top_logprobs": 25, "logprobs": True}, "top_logprobs"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"max_completion_tokens": 5000}, "max_completion_tokens"),
        ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("chat/completions", {"functions": [{"name": "f"}]}, "functions"),
        (
            "chat/completions",
            {"chat_template_kwargs": {"reasoning_effort": "x"}},
            "chat_template_kwargs.reasoning_effort",
        ),
        ("chat/completions", {"tools": [TOOL, TOOL]}, "tools"),
        ("chat/completions", {"tools": [{**TOOL, "function": {"name": "f", "parameters": {"type": 5}}}]}, "tools"),
        ("chat/completions", {"tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "tool_choice"),
        ("chat/completions", {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ("chat/completions", {"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "boss", "content": "x"}]}, "messages"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "messages.0.role"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": "a<｜image｜>"}]}, "messages.0.content"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
        ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
        ("chat/completions", {"reasoning_effort": "huge"}, "reasoning_effort"),
        ("chat/completions", {"continue_final_message": True}, "continue_final_message"),
        ("chat/completions", {"response_format": {"type": "yaml"}}, "response_format.type"),
    ],
)
def test_a_bad_field_of_one_route_is_named(
    scripted: RunningServer, route: str, extra: dict[str, Any], param: str
) -> None:
    base = TEXT if route == "completions" else CHAT
    check(post(scripted, f"/v1/{route}", {**base, **extra}), 400, param)


def test_a_prompt_past_the_context_says_how_long_it_is(scripted: RunningServer) -> None:
    message = check(post(scripted, "/v1/completions", {"prompt": [5] * 5000}), 400, "input_tokens")
    assert "maximum context length is 4096 tokens. However, your prompt contains 5000 input tokens" in message


def test_a_deep_schema_is_refused(scripted: RunningServer) -> None:
    deep: Any = {"type": "object"}
    for _ in range(100):
        deep = {"type": "object", "properties": {"a": deep}}
    check(post(scripted, "/v1/completions", {**TEXT, "guided_json": deep}), 400, "guided_json")
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    check(post(scripted, "/v1/chat/completions", {**CHAT, "tools": tools}), 400, "tools")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b'"x"', b"null", b"[" * 100_000, b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', LONG]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_body_that_is_no_request_gives_400(scripted: RunningServer, path: str, data: bytes) -> None:
    response = post(scripted, path, data)
    check(response, 400, response.json()["error"]["param"])


def test_a_body_that_is_not_json_by_its_type_gives_415(scripted: RunningServer) -> None:
    check(post(scripted, "/v1/completions", b"a=1", headers={"Content-Type": "text/plain"}), 415, None)


def test_an_unknown_model_gives_404(scripted: RunningServer) -> None:
    check(post(scripted, "/v1/completions", {**TEXT, "model": "gpt"}), 404, "model")
    check(post(scripted, "/v1/chat/completions", {**CHAT, "model": "gpt"}), 404, "model")
    assert post(scripted, "/v1/completions", {**TEXT, "model": "other-name"}).json()["model"] == "other-name"


def test_unknown_paths_and_methods_are_json_errors(scripted: RunningServer) -> None:
    check(httpx.get(scripted.url + "/v2/x"), 404, None)
    wrong = httpx.get(scripted.url + "/v1/completions")
    check(wrong, 405, None)
    assert wrong.headers["allow"] == "POST"


def test_a_full_queue_gives_503_and_a_hint_to_retry(scripted: RunningServer) -> None:
    def counted() -> list[str]:
        return [line for line in httpx.get(scripted.url + "/metrics").text.splitlines() if "_params_n_count" in line]

    before = counted()
    response = post(scripted, "/v1/completions", {"prompt": "BUSY", "stream": True})
    check(response, 503, None)
    assert counted() == before != []
    assert response.headers["retry-after"] == "1"


def test_a_refusal_of_the_engine_comes_before_the_stream_begins(scripted: RunningServer) -> None:
    response = post(scripted, "/v1/completions", {"prompt": ["ok", "REFUSE"], "stream": True})
    check(response, 400, "prompt")
    scripted.wait_idle()


def test_unknown_fields_are_ignored_and_logged_once(scripted: RunningServer) -> None:
    for _ in range(2):
        assert post(scripted, "/v1/completions", {**TEXT, "spaces_between_special_tokens": True}).status_code == 200
    assert scripted.log.count("spaces_between_special_tokens") == 1


def test_null_means_not_given(scripted: RunningServer) -> None:
    fields = [
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "logprobs",
        "stream",
        "stream_options",
        "max_tokens",
        "logit_bias",
    ]
    assert post(scripted, "/v1/completions", {**TEXT, **dict.fromkeys(fields)}).status_code == 200
    assert (
        post(scripted, "/v1/chat/completions", {**CHAT, **dict.fromkeys([*fields, "tools", "tool_choice"])}).status_code
        == 200
    )


def test_a_body_past_the_limit_gives_413(start: Any) -> None:
    server = start("--max-body-bytes", "1000")
    body = json.dumps({"prompt": "x" * 2000}).encode()
    check(post(server, "/v1/completions", body), 413, None)
    chunks = [body[:900], body[900:]]  # no Content-Length
    response = httpx.post(
        server.url + "/v1/completions", content=iter(chunks), headers={"Content-Type": "application/json"}
    )
    check(response, 413, None)
    assert post(server, "/v1/completions", {"prompt": "SAY<<ok>>END"}).status_code == 200


def test_with_a_key_only_its_holders_are_served(start: Any) -> None:
    server = start("--api-key", "first", "sécret")
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "first"},
        {"Authorization": "Basic first"},
    ):
        for path in ("/v1/completions", "/v1/models", "/tokenize"):
            response = httpx.request("GET" if path == "/v1/models" else "POST", server.url + path, headers=headers)
            assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})
    for key in ("first", "sécret"):
        good = httpx.get(server.url + "/v1/models", headers={"Authorization": f"Bearer {key}".encode()})
        assert good.status_code == 200
    for path in ("/health", "/metrics", "/version", "/ping"):
        assert httpx.get(server.url + path).status_code == 200
