"""The server on the real engine with a small random checkpoint at PCP 2, driven by the official `openai` client."""

import asyncio
import json
import os
import re
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from running_server import RunningServer, events
from soak import soak

# The launch command of the vLLM guide for this model, on the CPU.
GUIDE = shlex.split("""
--language-model-only --tokenizer-mode deepseek_v41 --attention-backend FLASHMLA_SPARSE_DSV41
--kv-cache-dtype fp8_ds_mla --block-size 64 --tensor-parallel-size 1 --prefill-context-parallel-size 2
--pipeline-parallel-size 1 --data-parallel-size 1 --decode-context-parallel-size 1 --enable-expert-parallel
--all2all-backend allgather_reducescatter --moe-backend marlin --engram-config '{"cpu_offload":true}'
--max-model-len auto --max-num-batched-tokens 512 --max-num-seqs 16 --gpu-memory-utilization 0.9
--no-enable-prefix-caching --no-swa-bounded-replay --enforce-eager --no-async-scheduling --seed 0
--load-format auto --hf-overrides '{}' --device cpu --tool-call-parser deepseek_v41 --reasoning-parser deepseek_v41
--enable-auto-tool-choice --trust-remote-code --num-gpu-blocks-override 64""")
# Without roundings that make random weights chaotic, so that batching cannot change a token.
EXACT = """-pcp 2 --dtype float32 --kv-cache-dtype float32 --kv-cache-rounding none
--no-swa-bounded-replay --num-gpu-blocks-override 64 --max-num-seqs 8"""
MODEL = "deepseek-ai/DeepSeek-V4.1-Flash"
USER: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
WEATHER: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.fixture(scope="module")
def real(checkpoint: Path) -> Iterator[RunningServer]:
    arguments = [str(checkpoint), *GUIDE, "--served-model-name", MODEL]
    server = RunningServer(arguments, None).wait_ready(120)
    yield server
    server.end()


@pytest.fixture(scope="module")
def exact(checkpoint: Path) -> Iterator[RunningServer]:
    server = RunningServer([str(checkpoint), *EXACT.split()], None).wait_ready(120)
    yield server
    server.end()


@pytest.fixture(scope="module")
def client(real: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0, timeout=60)


def bias(server: RunningServer) -> dict[str, int]:
    """Ends the thinking at once and avoids needless space; random weights do neither of their own."""

    def ids(text: str) -> list[int]:
        return list(httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"])

    space = {str(i): -100 for text in (" ", "\n", "\r", "\t") for i in ids(text)}
    return {**space, str(ids("</think>")[0]): 100}


def test_the_guides_command_says_what_it_maps(real: RunningServer) -> None:
    for text in (
        "topology",
        "TP 1 x PCP 2",
        "KV capacity",
        "4,096 tokens",
        "rank 0 holds",
        "rank 1 holds",
        "fp8_ds_mla",
    ):
        assert text in real.log, text
    assert "--moe-backend marlin: on the CPU the reference kernels run" in real.log
    assert "--tool-call-parser: " in real.log


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [MODEL]


def test_a_seed_gives_the_same_answer_streamed_or_not(client: openai.OpenAI) -> None:
    def ask(**more: Any) -> Any:
        return client.chat.completions.create(model=MODEL, messages=USER, max_tokens=24, seed=7, **more)

    whole = ask()
    text, usage = "", None
    for chunk in ask(stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        if chunk.choices:
            text += getattr(chunk.choices[0].delta, "reasoning_content", None) or chunk.choices[0].delta.content or ""
    message = whole.choices[0].message
    assert text == (message.reasoning_content or "") + (message.content or "")
    assert whole.usage.completion_tokens <= 24
    assert usage == whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_choices_of_one_request_differ_and_repeat(client: openai.OpenAI) -> None:
    def texts(n: int) -> list[str]:
        answer = client.completions.create(model=MODEL, prompt="Once", max_tokens=12, n=n, seed=5, temperature=1.5)
        return [c.text for c in answer.choices]

    assert len(set(texts(4))) > 1
    assert texts(4)[:2] == texts(2)


def test_greedy_logprobs_name_the_chosen_token_first(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert len(content) == 8  # type: ignore[arg-type]
    for entry in content or []:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert entry.logprob <= 0


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"guided_grammar": "root ::= root"}, "guided_grammar"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"json": "x"}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}, "response_format"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_the_requests_fault(
    real: RunningServer, client: openai.OpenAI, extra: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=MODEL, prompt="a", extra_body=extra)
    assert error.value.param == param and str(error.value.body["message"]).startswith(f"{param}: ")  # type: ignore[index]
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=2).choices[0].finish_reason
    real.wait_idle()


def test_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Two words", max_tokens=0, echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "Two words"
    assert logprobs.token_logprobs[0] is None  # type: ignore[union-attr, index]
    assert all(p < 0 for p in logprobs.token_logprobs[1:])  # type: ignore[union-attr, index]


@pytest.mark.parametrize("thinking", [True, False])
def test_a_json_schema_is_followed(real: RunningServer, client: openai.OpenAI, thinking: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "mood": {"enum": ["good", "bad"]}},
        "required": ["ok", "mood"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=USER,
        max_tokens=600,
        seed=3,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        reasoning_effort="low" if thinking else "none",
        logit_bias=bias(real),
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert set(found) == {"ok", "mood"}
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": "[a-c]{3}-[0-9]"}, "[a-c]{3}-[0-9]"),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "yy"'}}, "x|yy"),
        ({"structured_outputs": {"choice": ["é", "日"]}}, "é|日"),
    ],
)
def test_a_grammar_is_followed(client: openai.OpenAI, extra: dict[str, Any], pattern: str) -> None:
    answer = client.completions.create(model=MODEL, prompt="Say:", max_tokens=50, seed=1, extra_body=extra)
    assert re.fullmatch(pattern, answer.choices[0].text)


@pytest.mark.parametrize(
    ("choice", "stream"), [("required", True), ({"type": "function", "function": {"name": "weather"}}, False)]
)
def test_a_required_tool_call_is_made(real: RunningServer, client: openai.OpenAI, choice: Any, stream: bool) -> None:
    answer: Any = client.chat.completions.create(
        model=MODEL, messages=USER, tools=WEATHER, tool_choice=choice, max_tokens=600, seed=3, stream=stream,
        parallel_tool_calls=False, logit_bias=bias(real),
    )  # fmt: skip
    if stream:
        parts = [c.choices[0] for c in answer]
        calls = [call for part in parts for call in part.delta.tool_calls or []]
        name, text = calls[0].function.name, "".join(call.function.arguments or "" for call in calls)
        reason = parts[-1].finish_reason
    else:
        call = answer.choices[0].message.tool_calls[0]
        name, text, reason = call.function.name, call.function.arguments, answer.choices[0].finish_reason
    found = json.loads(text)
    assert (name, reason) == ("weather", "tool_calls")
    assert found["city"] in ("Rome", "Oslo")
    assert found["days"] in (1, 2)


def test_a_conversation_with_a_tool_result_goes_on(client: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=WEATHER, max_tokens=4)
    assert answer.usage.completion_tokens == 4  # type: ignore[union-attr]


def test_errors_have_the_clients_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=USER)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=USER, temperature=-1)
    assert caught.value.param == "temperature"
    for extra in ({"guided_json": {"type": "nothing"}}, {"guided_regex": "(("}, {"guided_grammar": "root ::= ("}):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt="x", extra_body=extra)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model=MODEL, prompt="word " * 9000)


def test_a_request_larger_than_the_pool_is_refused_and_others_go_on(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=[5] * 4095, max_tokens=100)
    assert client.completions.create(model=MODEL, prompt=[5] * 50, max_tokens=2).usage is not None


def test_a_long_prompt_is_chunked_and_a_hang_up_in_it_leaks_nothing(real: RunningServer) -> None:
    body = {"prompt": [5] * 3000, "max_tokens": 50, "stream": True}
    for wait in (0.05, 0.15, 0.3, 0.5):
        with (
            pytest.raises(httpx.ReadTimeout),
            httpx.stream("POST", f"{real.url}/v1/completions", json=body, timeout=wait) as response,
        ):
            time.sleep(wait)
            raise httpx.ReadTimeout("hang up", request=response.request)
        real.wait_idle(empty=True)


def test_more_requests_than_the_engine_runs_queue_and_get_what_they_get_alone(exact: RunningServer) -> None:
    def ask(i: int) -> str:
        body = {"prompt": f"Question {i}", "max_tokens": 10, "seed": i}
        answer = httpx.post(f"{exact.url}/v1/completions", json=body, timeout=120).json()
        return str(answer["choices"][0]["text"])

    alone = [ask(i) for i in range(12)]
    together: dict[int, str] = {}
    threads = [threading.Thread(target=lambda i=i: together.update({i: ask(i)})) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [together[i] for i in range(12)] == alone
    exact.wait_idle(empty=True)


def test_a_short_soak_leaves_nothing_and_changes_nothing(exact: RunningServer) -> None:
    found = asyncio.run(soak(exact.url, seconds=4, streams=12, tokens=8))
    assert found.wrong == []
    assert found.whole > 0


def test_a_benchmark_client_gets_what_it_counts(real: RunningServer) -> None:
    """As `vllm bench serve` does it: stream completions, time chunks with text, take tokens from the usage chunk."""
    body = {
        "model": MODEL, "prompt": "word " * 40, "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 16,
        "logprobs": None, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    response = httpx.post(f"{real.url}/v1/completions", json=body, timeout=60)
    parts = [json.loads(data) for data in events(response)[:-1]]
    assert sum(1 for p in parts if p["choices"]) == 16
    assert parts[-1]["usage"]["completion_tokens"] == 16
    assert parts[0]["choices"][0]["text"] is not None


def test_metrics_show_the_time_of_each_exchange(real: RunningServer) -> None:
    body = {"model": MODEL, "prompt": "go", "max_tokens": 2}  # the engine may not have run a step yet
    httpx.post(f"{real.url}/v1/completions", json=body, timeout=60).raise_for_status()
    text = httpx.get(f"{real.url}/metrics").text
    assert 'paraflash:step_time_seconds_total{component="step"' in text
    assert any("pcp" in line for line in text.splitlines() if line.startswith("paraflash:step_time_seconds_total"))


def test_a_killed_worker_ends_every_stream_and_the_server(checkpoint: Path) -> None:
    server = RunningServer([str(checkpoint), "-pcp", "2", "--num-gpu-blocks-override", "64"], None).wait_ready(120)
    texts: list[str] = []

    def stream() -> None:
        body = {"prompt": "go", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        texts.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text)

    threads = [threading.Thread(target=stream) for _ in range(6)]
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 20
        while server.stat("running") < 6 and time.monotonic() < deadline:
            time.sleep(0.05)
        pids = httpx.get(f"{server.url}/status.json").json()["info"]["pids"]
        began = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        assert server.wait_exit(10) == 1
        assert time.monotonic() - began < 10
        for thread in threads:
            thread.join(5)
        assert len(texts) == 6
        for text in texts:
            assert '"error":{' in text
            assert "rank 1" in text
            assert text.rstrip().endswith("data: [DONE]")
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    finally:
        server.end()
