"""The HTTP side of every measuring command: one OpenAI-compatible server, streamed or whole answers, side endpoints.

`stream` turns one request into an `Outcome` with the arrival time of each token-bearing event; it never raises for a
failed request, since a failure is a result. Side endpoints (/health, /metrics, /tokenize, /v1/models) return None where
a server lacks them.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx

from paraflash.bench.stats import Outcome

_COUNTER = re.compile(
    r"^(?:vllm|paraflash|sglang):(prompt_tokens|generation_tokens|prompt_tokens_cached)_total(?:\{[^}]*\})?\s+(\S+)",
    re.MULTILINE,
)


class ServerProblem(RuntimeError):
    """The server did not answer as the OpenAI API says; the message names URL, status and text."""


def base_url_of(url: str) -> str:
    """Server root of a URL that may have a trailing slash or /v1. Raises ValueError for anything but http(s)."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0  # .port checks the range
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"url is {url!r}; something like http://127.0.0.1:8000 is needed")
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/").removesuffix("/v1")


def open_client(
    base_url: str, headers: dict[str, str] | None = None, timeout: float | None = None
) -> httpx.AsyncClient:
    """A client without a cap on connections; `timeout` in seconds holds for each read, None waits for ever."""
    local = urlsplit(base_url).hostname in ("localhost", "127.0.0.1", "::1")
    return httpx.AsyncClient(
        base_url=base_url,
        headers=headers,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        timeout=httpx.Timeout(timeout, connect=30.0),
        trust_env=not local,  # a proxy of the environment must not stand before a server on this machine
    )


def error_text(status: int, body: str) -> str:
    """The message of an OpenAI error body, or the start of whatever else came."""
    try:
        error = json.loads(body)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        text = body.strip()
    return f"HTTP {status}: {text[:300]}"


def _describe(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".rstrip(": ")


class _Stream:
    """Collects the events of one answer into an `Outcome`."""

    def __init__(self, outcome: Outcome):
        self.outcome = outcome
        self.finished = False
        self.bare_end = False  # the last event had a finish reason and no text

    def event(self, data: dict[str, Any], now: float) -> None:
        if data.get("error") or data.get("object") == "error":
            raise ServerProblem(error_text(200, json.dumps(data)))
        if usage := data.get("usage"):
            self.outcome.prompt_tokens = usage.get("prompt_tokens")
            self.outcome.completion_tokens = usage.get("completion_tokens")
            self.outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        for choice in data.get("choices") or []:
            delta = choice.get("delta")
            if delta is None:
                text, carries = choice.get("text") or "", bool(choice.get("text"))
            else:
                text = delta.get("content") or ""
                carries = any(delta.get(key) for key in ("content", "reasoning", "reasoning_content", "tool_calls"))
            if choice.get("finish_reason"):
                self.finished, self.outcome.finish_reason = True, choice["finish_reason"]
            if delta is not None and not carries and not self.finished and not self.outcome.chunk_times:
                continue  # chat streams open with an event that only names the role
            self.bare_end = not carries and bool(choice.get("finish_reason"))
            self.outcome.text += text
            self.outcome.chunk_times.append(now)

    def close(self) -> None:
        """Checks that the answer is complete; a closing event that brought no token is not a token's arrival."""
        outcome = self.outcome
        if not self.finished:
            raise ServerProblem("the stream ended before the answer did")
        tokens = outcome.completion_tokens
        if self.bare_end and len(outcome.chunk_times) > 1 and (tokens is None or len(outcome.chunk_times) > tokens):
            outcome.chunk_times.pop()
        if not outcome.chunk_times or tokens == 0:
            raise ServerProblem("the answer has no token")


async def _lines(response: httpx.Response) -> AsyncIterator[tuple[bytes, float]]:
    """Lines of a stream with their arrival times. Only a line feed ends a line: texts may hold U+2028 and its like,
    at which httpx's own `aiter_lines` would cut an event in two."""
    rest = b""
    async for chunk in response.aiter_bytes():
        now = time.perf_counter()
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line, now
    if rest:
        yield rest, time.perf_counter()


async def stream(
    client: httpx.AsyncClient, endpoint: str, body: dict[str, Any], sent_tokens: int | None = None
) -> Outcome:
    """Sends one streaming request and times its events."""
    outcome = Outcome(sent_tokens=sent_tokens, start=time.perf_counter())
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    collected = _Stream(outcome)
    try:
        async with client.stream("POST", endpoint, json=body) as response:
            if response.status_code != 200:
                raise ServerProblem(error_text(response.status_code, (await response.aread()).decode(errors="replace")))
            async for line, now in _lines(response):
                data = line[5:].strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    break
                if data:
                    collected.event(json.loads(data), now)
        collected.close()
    except ServerProblem as problem:
        outcome.error = str(problem)
    except (httpx.HTTPError, ValueError) as problem:
        outcome.error = _describe(problem)
    outcome.end = time.perf_counter()
    return outcome


async def post(client: httpx.AsyncClient, endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
    """A whole (not streamed) answer as JSON. Raises ServerProblem with a readable message on any failure."""
    try:
        response = await client.post(endpoint, json=body)
    except httpx.HTTPError as problem:
        raise ServerProblem(f"{client.base_url}{endpoint.lstrip('/')}: {_describe(problem)}") from problem
    if response.status_code != 200:
        raise ServerProblem(error_text(response.status_code, response.text))
    try:
        return dict(response.json())
    except ValueError:
        raise ServerProblem(f"{endpoint} answered something that is not a JSON object: {response.text[:200]}") from None


async def healthy(client: httpx.AsyncClient, timeout: float = 10.0) -> bool:
    """Whether GET /health answers 200 within `timeout` seconds."""
    try:
        return (await client.get("/health", timeout=timeout)).status_code == 200
    except httpx.HTTPError:
        return False


async def models(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """The entries of /v1/models. Raises ServerProblem if the server does not list any."""
    url = f"{str(client.base_url).rstrip('/')}/v1/models"
    try:
        response = await client.get("/v1/models", timeout=30.0)
    except httpx.HTTPError as problem:
        raise ServerProblem(f"{url}: {_describe(problem)}") from problem
    if response.status_code != 200:
        raise ServerProblem(f"{url}: {error_text(response.status_code, response.text)}")
    try:
        entries = response.json()["data"]
    except (ValueError, KeyError, TypeError):
        raise ServerProblem(f"{url} does not list models: {response.text[:200]}") from None
    if not entries:
        raise ServerProblem(f"{url} lists no model")
    return list(entries)


async def wait_until_listed(client: httpx.AsyncClient, seconds: float) -> list[dict[str, Any]]:
    """Like `models`, trying for up to `seconds`."""
    until = time.monotonic() + seconds
    while True:
        try:
            return await models(client)
        except ServerProblem:
            if time.monotonic() >= until:
                raise
        await asyncio.sleep(0.5)


async def counters(client: httpx.AsyncClient) -> dict[str, float] | None:
    """The server's own token counters (summed over engines), or None if /metrics has none."""
    try:
        response = await client.get("/metrics", timeout=30.0)
    except httpx.HTTPError:
        return None
    found: dict[str, float] = {}
    if response.status_code == 200:
        for name, value in _COUNTER.findall(response.text):
            found[name] = found.get(name, 0.0) + float(value)
    return found or None
