"""Many streams at once, some cut by the client at random points: no error, no leaked block, and every whole answer is
what its prompt and seed give alone. The server must run without the roundings that depend on the batch (see README of
the golden data) and without bounded replay, which is an approximation (model.md 5): --dtype float32
--kv-cache-dtype float32 --kv-cache-rounding none --no-swa-bounded-replay.

    python tests/server/soak.py http://127.0.0.1:8000 --seconds 120 --streams 64
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Result:
    whole: int = 0  # streams that were read to their end
    cut: int = 0
    wrong: list[str] = field(default_factory=list)  # what differed or failed


def bodies(count: int, tokens: int) -> list[dict[str, Any]]:
    """Requests of all kinds: short and long prompts, greedy and sampled, with and without stop strings."""
    rng = random.Random(0)
    out = []
    for i in range(count):
        words = " ".join(
            rng.choice(["one", "two", "red", "blue", "why", "日本"]) for _ in range(rng.choice([1, 5, 40, 150]))
        )
        body: dict[str, Any] = {
            "prompt": f"{i} {words}",
            "max_tokens": rng.randint(1, tokens),
            "seed": i,
            "stream": True,
        }
        body["temperature"] = rng.choice([0.0, 1.0])
        body["stream_options"] = {"include_usage": True}
        if i % 4 == 0:
            body["stop"] = ["e", "zz"]
        out.append(body)
    return out


async def read(client: httpx.AsyncClient, body: dict[str, Any], cut_after: int | None = None) -> str | None:
    """The text of a streamed answer; None if it was cut after `cut_after` chunks. Raises AssertionError."""
    text, chunks, usage = "", 0, None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.status_code
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                assert usage is not None, "no usage"
                return text
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            usage = chunk.get("usage")
            text += "".join(choice["text"] for choice in chunk["choices"])
            chunks += 1
            if cut_after is not None and chunks > cut_after:
                return None
    raise AssertionError("the stream ended without [DONE]")


async def soak(url: str, seconds: float, streams: int, cut_share: float = 0.2, tokens: int = 24) -> Result:
    result, rng = Result(), random.Random(1)
    requests = bodies(2 * streams, tokens)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        alone = [await read(client, body) for body in requests]
        end = time.monotonic() + seconds

        async def run() -> None:
            while time.monotonic() < end:
                i = rng.randrange(len(requests))
                cut = rng.randint(0, tokens // 2) if rng.random() < cut_share else None
                try:
                    text = await read(client, requests[i], cut)
                except (AssertionError, httpx.HTTPError) as error:
                    result.wrong.append(f"request {i}: {error!r}")
                    continue
                if text is None:
                    result.cut += 1
                    continue
                result.whole += 1
                if text != alone[i]:
                    result.wrong.append(f"request {i}: {text!r} instead of {alone[i]!r}")

        await asyncio.gather(*(run() for _ in range(streams)))
        deadline = time.monotonic() + 10
        while (stats := (await client.get("/status.json")).json()["stats"])["running"] + stats["waiting"]:
            if time.monotonic() > deadline:
                result.wrong.append(f"requests are left: {stats}")
                break
            await asyncio.sleep(0.05)
        if stats["kv_usage"] != 0:
            result.wrong.append(f"blocks are left: KV usage {stats['kv_usage']}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--streams", type=int, default=64)
    args = parser.parse_args()
    found = asyncio.run(soak(args.url, args.seconds, args.streams))
    print(f"{found.whole} whole, {found.cut} cut, {len(found.wrong)} wrong")
    for line in found.wrong[:20]:
        print(line)
    raise SystemExit(bool(found.wrong))
