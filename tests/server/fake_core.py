"""An engine core that says what the prompt tells it to; it runs in the engine process in place of the real one.

A prompt that contains SAY<<text>> is answered with that text and the end of sequence; any other with its own tokens.
Other words in the prompt: SLOW (30 ms a step), FOREVER (the answer repeats until max_tokens), DIE (the process is
killed), RAISE (a step raises), STUCK (a step takes 60 s), BUSY and REFUSE (the request is not taken).
"""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

from paraflash.config.engine import EngineConfig, Refused
from paraflash.engine.messages import TokenLogprobs
from paraflash.engine.request import Delta, Request, RequestRefused
from paraflash.engine.sampling_params import SamplingParams
from paraflash.engine.scheduler import QueueFull
from paraflash.engine.tokenizer import load_tokenizer, token_bytes

EOS = 1


class ScriptedCore:
    def __init__(self, config: EngineConfig):
        if config.seed == 666:
            raise Refused("seed is 666; any other is allowed")
        self.config = config
        self.tokenizer = load_tokenizer(config.tokenizer or config.model)
        self.bytes = token_bytes(self.tokenizer)
        self.live: dict[str, tuple[Request, list[int], str]] = {}
        self.prompt_tokens = self.generation_tokens = 0

    def add_request(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, *, cache_salt: str | None = None
    ) -> None:
        text = b"".join(self.bytes[i] for i in prompt_token_ids).decode("utf-8", "replace")
        if "BUSY" in text:
            raise QueueFull("1 request waits, as many as --max-queue allows")
        if "REFUSE" in text:
            raise RequestRefused("prompt", "this prompt is refused")
        said = re.search(r"SAY<<(.*?)>>END", text, re.DOTALL)
        reply = self.tokenizer.encode(said.group(1)).ids if said else list(prompt_token_ids[-8:])
        if params.structured_outputs is not None and params.structured_outputs.json is not None:
            reply = self.tokenizer.encode('{"a": 1}').ids
        request = Request(request_id, prompt_token_ids, params, cache_salt, time.monotonic())
        self.live[request_id] = (request, reply, text)

    def abort(self, request_id: str) -> None:
        self.live.pop(request_id, None)

    def has_unfinished(self) -> bool:
        return bool(self.live)

    def step(self) -> list[Delta]:
        texts = [text for _, _, text in self.live.values()]
        if any("DIE" in text for text in texts):
            os.kill(os.getpid(), signal.SIGKILL)
        if any("RAISE" in text for text in texts):
            raise RuntimeError("rank 1 died in this test")
        if any("STUCK" in text for text in texts):
            time.sleep(60)
        if any("SLOW" in text for text in texts):
            time.sleep(0.03)
        return [self._advance(*entry) for entry in list(self.live.values())]

    def _advance(self, request: Request, reply: list[int], text: str) -> Delta:
        params, done = request.params, request.num_output_tokens
        if not done:
            request.times.scheduled = request.times.first_token = time.monotonic()
            self.prompt_tokens += request.prompt_len
        endless = "FOREVER" in text
        token = reply[done % len(reply)] if endless else (reply[done] if done < len(reply) else EOS)
        request.append(token)
        self.generation_tokens += 1
        if token == EOS and not params.ignore_eos:
            request.finish_reason = "stop"
        elif token in (params.stop_token_ids or ()):
            request.finish_reason, request.stop_reason = "stop", token
        elif params.max_tokens is not None and done + 1 >= params.max_tokens:
            request.finish_reason = "length"
        if request.finish_reason:
            request.times.finished = time.monotonic()
            self.live.pop(request.request_id, None)
        delta = request.delta([token])
        delta.num_cached_tokens = request.prompt_len // 2
        if params.logprobs is not None:
            delta.logprobs = [self._logprobs(token, params.logprobs)]
        if params.prompt_logprobs is not None and not done:
            delta.prompt_logprobs = [self._logprobs(int(t), params.prompt_logprobs) for t in request.tokens[1:-1]]
        return delta

    def _logprobs(self, token: int, top: int) -> TokenLogprobs:
        ids = [(token + i) % 512 for i in range(top)]
        return TokenLogprobs(token, -0.5, 1, ids, [-0.5] + [float("-inf")] * (top - 1) if top else [])

    def stats(self) -> dict[str, Any]:
        return {
            "running": len(self.live),
            "waiting": 0,
            "kv_usage": len(self.live) / 100,
            "preemptions": 0,
            "prefix_queries": self.prompt_tokens,
            "prefix_hits": self.prompt_tokens // 2,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "timings": {"model": 0.5, "pcp_rows": 0.25},
        }

    def info(self) -> dict[str, Any]:
        return {"topology": "fake", "max_model_len": self.config.max_model_len or 4096, "num_blocks": 100}

    def shutdown(self) -> None:
        pass
