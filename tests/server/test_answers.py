"""Shapes of answers, streamed and not: usage, stop strings, characters, choices, log-probabilities."""

import json
from typing import Any

import httpx
import pytest
from running_server import RunningServer, events

SAID = "SAY<<the quick brown fox>>END"


def complete(server: RunningServer, prompt: Any = SAID, **fields: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt, "max_tokens": 100, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def chunks(server: RunningServer, route: str = "completions", **body: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed answer, which must end with [DONE]."""
    response = httpx.post(f"{server.url}/v1/{route}", json={"max_tokens": 100, **body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    data = events(response)
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def say(text: str, **fields: Any) -> dict[str, Any]:
    """A chat whose answer is `text`."""
    return {"messages": [{"role": "user", "content": f"SAY<<{text}>>END"}], "max_tokens": 300, **fields}


def chat(server: RunningServer, text: str, **fields: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/chat/completions", json=say(text, **fields))
    assert response.status_code == 200, response.text
    return dict(response.json())


def joined(parts: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for part in parts for c in part["choices"] if c["index"] == index)


def test_streamed_text_joins_to_the_whole_text(scripted: RunningServer) -> None:
    whole = complete(scripted)["choices"][0]
    parts = chunks(scripted, prompt=SAID)
    assert joined(parts) == whole["text"] == "the quick brown fox"
    assert parts[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "stop"
    assert all(part["choices"][0]["finish_reason"] is None for part in parts[:-1])
    assert len({part["id"] for part in parts}) == 1


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    ("options", "wanted"),
    [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)],
)
def test_usage_comes_once_at_the_end_and_only_if_asked(
    scripted: RunningServer, route: str, options: Any, wanted: bool
) -> None:
    body = {"prompt": SAID} if route == "completions" else say("x</think>y")
    parts = chunks(scripted, route, **body, **({} if options is None else {"stream_options": options}))
    assert [part["choices"] == [] for part in parts] == [False] * (len(parts) - 1) + [wanted]
    assert ["usage" in part for part in parts] == [False] * (len(parts) - 1) + [wanted]
    if wanted:
        response = httpx.post(f"{scripted.url}/v1/{route}", json={"max_tokens": 100, **body})
        assert parts[-1]["usage"] == response.json()["usage"]


def test_usage_counts_add_up_over_prompts_and_choices(scripted: RunningServer) -> None:
    one = complete(scripted)["usage"]
    assert one["total_tokens"] == one["prompt_tokens"] + one["completion_tokens"]
    many = complete(scripted, [SAID, SAID], n=3)
    assert many["usage"]["prompt_tokens"] == 2 * one["prompt_tokens"]
    assert many["usage"]["completion_tokens"] == 6 * one["completion_tokens"]
    assert [c["index"] for c in many["choices"]] == list(range(6))
    parts = chunks(scripted, prompt=[SAID, SAID], n=3, stream_options={"include_usage": True})
    assert parts[-1]["usage"] == many["usage"]
    assert [joined(parts, i) for i in range(6)] == ["the quick brown fox"] * 6


def test_continuous_usage_grows_with_every_chunk(scripted: RunningServer) -> None:
    parts = chunks(scripted, prompt=SAID, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[0] == 1


def test_reasoning_tokens_are_counted(scripted: RunningServer) -> None:
    ids = httpx.post(f"{scripted.url}/tokenize", json={"prompt": "because"}).json()["tokens"]
    usage = chat(scripted, "because</think>yes")["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(ids)}
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // 2


@pytest.mark.parametrize("keep", [False, True])
def test_no_part_of_a_stop_string_is_sent(scripted: RunningServer, keep: bool) -> None:
    fields = {"stop": ["brown", "own f"], "include_stop_str_in_output": keep}
    parts = chunks(scripted, prompt=SAID, **fields)
    whole = complete(scripted, **fields)["choices"][0]
    expected = "the quick brown" if keep else "the quick "
    assert joined(parts) == whole["text"] == expected
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", "brown")
    assert (parts[-1]["choices"][0]["finish_reason"], parts[-1]["choices"][0]["stop_reason"]) == ("stop", "brown")
    sent = ""
    for part in parts:
        sent += part["choices"][0]["text"]
        assert expected.startswith(sent)
    scripted.wait_idle()


def test_a_stop_string_that_does_not_come_is_not_lost(scripted: RunningServer) -> None:
    assert joined(chunks(scripted, prompt=SAID, stop=["fox jumps"])) == "the quick brown fox"


def test_a_stop_token_ends_the_answer_and_is_named(scripted: RunningServer) -> None:
    ids = httpx.post(f"{scripted.url}/tokenize", json={"prompt": "the quick"}).json()["tokens"]
    choice = complete(scripted, stop_token_ids=[ids[-1]])["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[-1])


def test_streams_never_split_a_character(scripted: RunningServer) -> None:
    text = "naïve 日本語 👩‍👩‍👧 é"
    parts = chunks(scripted, prompt=f"SAY<<{text}>>END")
    assert joined(parts) == text
    assert all("\ufffd" not in part["choices"][0]["text"] for part in parts)
    deltas = [p["choices"][0]["delta"] for p in chunks(scripted, "chat/completions", **say(f"{text}</think>{text}"))]
    assert "".join(d.get("reasoning", "") for d in deltas) == text
    assert "".join(d.get("content", "") for d in deltas) == text


def test_a_character_that_the_length_cuts_shows_as_one_replacement(scripted: RunningServer) -> None:
    ids = httpx.post(f"{scripted.url}/tokenize", json={"prompt": "日"}).json()["tokens"]
    assert len(ids) > 1
    choice = complete(scripted, "SAY<<日>>END", max_tokens=len(ids) - 1)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("\ufffd", "length")


def test_echo_puts_the_prompt_before_the_answer(scripted: RunningServer) -> None:
    whole = complete(scripted, echo=True, logprobs=2)["choices"][0]
    assert whole["text"] == SAID + "the quick brown fox"
    logprobs = whole["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert len({len(values) for values in logprobs.values()}) == 1
    text = "".join(logprobs["tokens"])
    assert text.startswith(SAID + "the quick brown fox")
    assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])
    parts = chunks(scripted, prompt=SAID, echo=True, logprobs=2)
    assert joined(parts) == whole["text"]
    assert [t for p in parts for t in p["choices"][0]["logprobs"]["tokens"]] == logprobs["tokens"]
    assert [t for p in parts for t in p["choices"][0]["logprobs"]["text_offset"]] == logprobs["text_offset"]


def test_echo_of_no_new_tokens_scores_the_prompt_alone(scripted: RunningServer) -> None:
    answer = complete(scripted, echo=True, logprobs=1, max_tokens=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (SAID, "length")
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0


def test_prompts_come_as_text_ids_and_batches(scripted: RunningServer) -> None:
    ids = httpx.post(f"{scripted.url}/tokenize", json={"prompt": SAID}).json()["tokens"]
    for prompt in (SAID, ids):
        assert [c["text"] for c in complete(scripted, prompt)["choices"]] == ["the quick brown fox"]
    for prompt in ([SAID, SAID], [ids, ids]):
        assert [c["text"] for c in complete(scripted, prompt)["choices"]] == ["the quick brown fox"] * 2
    assert complete(scripted, ids, echo=True)["choices"][0]["text"].startswith(SAID)


def test_token_ids_are_returned_if_asked(scripted: RunningServer) -> None:
    whole = complete(scripted, return_token_ids=True)["choices"][0]
    parts = chunks(scripted, prompt=SAID, return_token_ids=True)
    assert [t for p in parts for t in p["choices"][0]["token_ids"]] == whole["token_ids"]
    assert parts[0]["choices"][0]["prompt_token_ids"] == whole["prompt_token_ids"]
    one = chat(scripted, "a</think>b", return_token_ids=True)
    streamed = chunks(scripted, "chat/completions", **say("a</think>b", return_token_ids=True))
    assert [t for p in streamed for t in p["choices"][0]["token_ids"]] == one["choices"][0]["token_ids"]
    assert streamed[0]["prompt_token_ids"] == one["prompt_token_ids"]


def test_prompt_logprobs_have_one_entry_per_prompt_token(scripted: RunningServer) -> None:
    answer = complete(scripted, prompt_logprobs=2)
    rows = answer["choices"][0]["prompt_logprobs"]
    assert len(rows) == answer["usage"]["prompt_tokens"]
    assert rows[0] is None
    assert {k: v for k, v in next(iter(rows[1].values())).items() if k != "decoded_token"} == {
        "logprob": -0.5,
        "rank": 1,
    }
    assert len(chat(scripted, "a</think>b", prompt_logprobs=0)["prompt_logprobs"]) > 10


def test_chat_logprobs_cover_every_token_with_its_bytes(scripted: RunningServer) -> None:
    whole = chat(scripted, "é</think>日", logprobs=True, top_logprobs=2)
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"]
    assert bytes(b for entry in content for b in entry["bytes"]).startswith("é</think>日".encode())
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(content)
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0  # minus infinity is no JSON
    parts = chunks(scripted, "chat/completions", **say("é</think>日", logprobs=True, top_logprobs=2))
    assert [e for p in parts for e in (p["choices"][0]["logprobs"] or {"content": []})["content"]] == content


def test_tokens_can_be_named_by_their_ids(scripted: RunningServer) -> None:
    choice = complete(scripted, logprobs=0, return_tokens_as_token_ids=True, return_token_ids=True)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]


def test_a_chat_has_reasoning_under_both_names(scripted: RunningServer) -> None:
    message = chat(scripted, "why</think>because")["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("why", "why", "because")
    message = chat(scripted, "plain", reasoning_effort="none")["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (None, "plain")


def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(scripted: RunningServer) -> None:
    parts = [
        p["choices"][0]
        for p in chunks(scripted, "chat/completions", **say("why</think>so", n=2))
        if p["choices"][0]["index"] == 1
    ]
    assert parts[0]["delta"] == {"role": "assistant", "content": ""}
    assert (parts[-1]["delta"], parts[-1]["finish_reason"]) == ({}, "stop")
    assert "".join(p["delta"].get("content", "") for p in parts) == "so"


def test_tool_calls_stream_as_deltas(scripted: RunningServer) -> None:
    block = (
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
        '<｜DSML｜ parameter name="a" string="true">x</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    whole = chat(scripted, f"</think>{block}", tools=tools)["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    call = whole["message"]["tool_calls"][0]
    assert (call["type"], call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "function",
        "f",
        {"a": "x"},
    )
    assert whole["message"]["content"] is None
    parts = [p["choices"][0] for p in chunks(scripted, "chat/completions", **say(f"</think>{block}", tools=tools))]
    deltas = [c for p in parts for c in p["delta"].get("tool_calls", [])]
    assert deltas[0]["function"]["name"] == "f"
    assert all("id" not in d for d in deltas[1:])
    assert json.loads("".join(d["function"]["arguments"] for d in deltas)) == {"a": "x"}
    assert parts[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_request_ids_are_echoed(scripted: RunningServer, route: str) -> None:
    body = {"prompt": SAID} if route == "completions" else say("a")
    response = httpx.post(f"{scripted.url}/v1/{route}", json=body, headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"] in ("cmpl-mine-1", "chatcmpl-mine-1")
    assert f'"request_id": "{response.json()["id"]}"' in scripted.log
    bad = httpx.post(f"{scripted.url}/v1/{route}", json=body, headers={"X-Request-Id": "a b\tc" * 100})
    assert len(bad.headers["x-request-id"]) == 32


def test_tokenize_and_detokenize_are_inverse(scripted: RunningServer) -> None:
    answer = httpx.post(f"{scripted.url}/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 4096
    assert httpx.post(f"{scripted.url}/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "héllo"}
    body = {"messages": [{"role": "user", "content": "hi"}]}
    ids = httpx.post(f"{scripted.url}/tokenize", json=body).json()["tokens"]
    prompt = httpx.post(f"{scripted.url}/detokenize", json={"tokens": ids}).json()["prompt"]
    assert prompt.startswith("<｜begin▁of▁sentence｜>")
    assert prompt.endswith("<｜User｜>hi<｜Assistant｜><think>")


def test_metrics_have_the_names_that_dashboards_know(scripted: RunningServer) -> None:
    complete(scripted)
    text = httpx.get(f"{scripted.url}/metrics").text
    gauges = [
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "engine_sleep_state",
        "cache_config_info",
    ]
    counters = [
        "prompt_tokens",
        "generation_tokens",
        "prompt_tokens_cached",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
    ]
    histograms = [
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "request_params_max_tokens", "request_params_n", "iteration_tokens_total",
        "request_prefill_kv_computed_tokens", "request_num_preemptions",
    ]  # fmt: skip
    label = 'engine="0",model_name="tiny"'
    for name in gauges:
        assert f"paraflash:{name}{{" in text, name
    for name in counters:
        assert f"paraflash:{name}_total{{{label}}}" in text, name
    for name in histograms:
        assert f"paraflash:{name}_count{{{label}}}" in text, name
    assert 'paraflash:request_success_total{engine="0",finished_reason="stop",model_name="tiny"}' in text
    assert f'paraflash:step_time_seconds_total{{component="pcp_rows",{label}}} 0.25' in text


def test_counters_of_tokens_agree_with_usage(scripted: RunningServer) -> None:
    def count(name: str) -> float:
        line = next(
            x
            for x in httpx.get(f"{scripted.url}/metrics").text.splitlines()
            if x.startswith(f"paraflash:{name}_total{{")
        )
        return float(line.rpartition(" ")[2])

    before = count("prompt_tokens"), count("generation_tokens")
    usage = complete(scripted)["usage"]
    assert (count("prompt_tokens") - before[0], count("generation_tokens") - before[1]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


def test_the_other_routes_answer(scripted: RunningServer) -> None:
    for path in ("/health", "/ping"):
        response = httpx.get(scripted.url + path)
        assert (response.status_code, response.content) == (200, b"")
    assert set(httpx.get(f"{scripted.url}/version").json()) == {"version"}
    assert httpx.get(f"{scripted.url}/load").json() == {"server_load": 0}
    models = httpx.get(f"{scripted.url}/v1/models").json()["data"]
    assert [m["id"] for m in models] == ["tiny", "other-name"]
    assert models[0]["max_model_len"] == 4096
    status = httpx.get(f"{scripted.url}/status.json").json()
    assert (status["health"], status["stats"]["running"]) == ("serving", 0)


def test_the_status_page_loads_nothing_from_elsewhere(scripted: RunningServer) -> None:
    page = httpx.get(f"{scripted.url}/")
    assert page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text and "https://" not in page.text and "//cdn" not in page.text
