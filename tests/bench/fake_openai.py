"""A tiny OpenAI-compatible server with scripted answers, timings and faults, for the tests of the measuring commands.

Answers are a function of the prompt alone: token i of a prompt is word `(hash + i) % 50`. Run as a script it also takes
the topology, so that a sweep can start it in place of the real server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

TEMPLATE_TOKENS = 3  # what the fake chat template adds


@dataclass
class Script:
    """How the server behaves; tests change it while it runs."""

    ttft: float = 0.0
    itl: float = 0.0
    usage: bool = True
    count_offset: int = 0  # the server's prompt count is wrong by so much
    fail_from: int | None = None  # requests from this one on are refused
    die_at: int | None = None  # the process kills itself when it gets this request
    cut_at_token: int | None = None  # the stream ends early, without an end
    bare_end: bool = False  # the finish reason comes in an event of its own
    answers: dict[str, str] = field(default_factory=dict)  # text that the prompt contains last -> whole answer
    change_at: int | None = None  # from this token on, answers differ from the usual ones
    letter: str = "w"  # what each token's text begins with
    no_tokenize: bool = False
    root: str | None = None  # what /v1/models gives as the model's folder
    requests: list[dict[str, Any]] = field(default_factory=list)
    prompt_tokens: int = 0
    generated: int = 0
    running: int = 0
    peak: int = 0


def error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "BadRequestError", "code": status}}, status)


def words_of(prompt: Any, count: int, script: Script) -> list[str]:
    start = zlib.crc32(json.dumps(prompt).encode()) % 50
    words = [f" {script.letter}{(start + i) % 50}" for i in range(count)]
    if script.change_at is not None:
        words[script.change_at :] = [f" x{(start + i) % 50}" for i in range(script.change_at, count)]
    return words


def make_app(script: Script) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "fake", "object": "model", "root": script.root}]}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(
            "# HELP vllm:prompt_tokens_total x\n"
            f'vllm:prompt_tokens_total{{engine="0"}} {float(script.prompt_tokens)}\n'
            f'vllm:generation_tokens_total{{engine="0"}} {float(script.generated)}\n'
        )

    @app.post("/tokenize", response_model=None)
    async def tokenize(request: Request) -> Any:
        body = await request.json()
        if script.no_tokenize:
            return error(404, "Not Found")
        text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        tokens = [100 + zlib.crc32(w.encode()) % 1000 for w in text.split()]
        tokens += [1] * (TEMPLATE_TOKENS if "messages" in body else 0)
        return {"tokens": tokens, "count": len(tokens)}

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Any:
        return await answer(await request.json(), chat=False)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> Any:
        return await answer(await request.json(), chat=True)

    async def answer(body: dict[str, Any], chat: bool) -> Any:
        script.requests.append(body)
        if script.die_at is not None and len(script.requests) >= script.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if script.fail_from is not None and len(script.requests) >= script.fail_from:
            return error(400, "max_tokens is wrong")
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        limit = body.get("max_tokens") or body.get("max_completion_tokens")
        words, reason = words_of(prompt, limit, script), "length"
        for key, text in script.answers.items():
            if isinstance(prompt, str) and key in prompt[-len(key) - 60 :]:
                pieces = [" " + w for w in text.split()]
                words, reason = pieces[:limit], "stop" if len(pieces) <= limit else "length"
        asked = len(prompt) if isinstance(prompt, list) else len(prompt.split()) + (TEMPLATE_TOKENS if chat else 0)
        script.prompt_tokens += asked
        script.generated += len(words)
        usage = {"prompt_tokens": asked + script.count_offset, "completion_tokens": len(words)}
        if body.get("stream"):
            return StreamingResponse(events(words, reason, usage, chat), media_type="text/event-stream")
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        if chat:
            choice["message"] = {"role": "assistant", "content": "".join(words)}
        else:
            choice["text"] = "".join(words)
            if body.get("logprobs") is not None:
                other = [w.replace("x", "w") if "x" in w else w.replace("w", "x") for w in words]
                choice["logprobs"] = {
                    "tokens": words,
                    "token_logprobs": [-0.5] * len(words),
                    "top_logprobs": [{w: -0.5, o: -0.75} for w, o in zip(words, other, strict=True)],
                }
        return {"object": "text_completion", "model": "fake", "choices": [choice], "usage": usage}

    async def events(words: list[str], reason: str, usage: dict[str, int], chat: bool) -> Any:
        script.running += 1
        script.peak = max(script.peak, script.running)
        try:
            await asyncio.sleep(script.ttft)
            if chat:
                yield event([{"index": 0, "delta": {"role": "assistant", "content": ""}}])
            for i, word in enumerate(words):
                if i == script.cut_at_token:
                    return
                await asyncio.sleep(script.itl if i else 0)
                last = reason if i == len(words) - 1 and not script.bare_end else None
                piece = {"delta": {"content": word}} if chat else {"text": word}
                yield event([{"index": 0, **piece, "finish_reason": last}])
            if script.bare_end:
                yield event([{"index": 0, **({"delta": {}} if chat else {"text": ""}), "finish_reason": reason}])
            if script.usage:
                yield event([], usage)
            yield "data: [DONE]\n\n"
        finally:
            script.running -= 1

    def event(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        return f"data: {json.dumps({'choices': choices, 'usage': usage}, ensure_ascii=False)}\n\n"

    return app


@contextmanager
def running(script: Script) -> Iterator[str]:
    """Runs the server in a thread and gives its URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(script), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pcp", type=int, default=1)
    parser.add_argument("--die-at", type=int, help="without PCP, kill yourself at this request")
    parser.add_argument("--while-there-is", help="... as long as this file exists")
    parser.add_argument("--refuse-pcp", type=int, help="with this --pcp, do not start")
    args = parser.parse_args()
    print(f"fake server tp={args.tp} pcp={args.pcp}", flush=True)
    if args.pcp == args.refuse_pcp:
        raise SystemExit("prefill_context_parallel_size is refused here")
    dies = args.die_at is not None and args.pcp == 1 and os.path.exists(args.while_there_is)
    script = Script(ttft=0.02 / args.pcp, die_at=args.die_at if dies else None)
    uvicorn.run(make_app(script), host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
