"""`paraflash compare URL_A URL_B`: the same prompts to two servers; fails if too many outputs differ."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paraflash.arguments import json_object
from paraflash.bench.flags import count_from

if TYPE_CHECKING:
    import httpx

    from paraflash.bench.compare import Comparison


def _tolerance(text: str) -> tuple[float, bool]:
    """`3` is a number of prompts, `5%` a share of them: (value, is a share)."""
    share = text.endswith("%")
    value = float(text[:-1]) / 100 if share else int(text)
    if not value >= 0 or (share and value > 1):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a count nor a percentage")
    return value, share


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url_a", metavar="URL_A", help="root of one server, e.g. http://127.0.0.1:8001")
    parser.add_argument("url_b", metavar="URL_B", help="root of the other")
    parser.add_argument(
        "--prompts", type=Path, help="text lines, or .jsonl with prompt or question; default: random ids"
    )
    parser.add_argument(
        "--num-prompts", type=count_from(1), default=16, help="random prompts, or most lines of --prompts"
    )
    parser.add_argument("--input-len", type=count_from(1), default=128, help="tokens of a random prompt")
    parser.add_argument("--max-tokens", type=count_from(1), default=64, help="most tokens of an answer")
    parser.add_argument("--logprobs", type=count_from(1), default=5, help="alternatives to ask for at each token")
    parser.add_argument("--ignore-eos", action="store_true", help="always generate that many")
    parser.add_argument("--seed", type=count_from(0), default=0, help="of the random prompts")
    parser.add_argument("--concurrency", type=count_from(1), default=1, help="prompts in flight at each server")
    parser.add_argument("--model", help="default: the first of each server's /v1/models")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: OPENAI_API_KEY")
    parser.add_argument("--tokenizer", help="model folder or tokenizer.json to take token ids from")
    parser.add_argument("--vocab-size", type=count_from(10), help="draw ids from a vocabulary of this size")
    parser.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="further fields of each request"
    )
    parser.add_argument(
        "--max-different",
        type=_tolerance,
        default=(0, False),
        metavar="N or N%",
        help="outputs that may differ (default 0)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every comparison as JSON")


def read_prompts(path: Path, limit: int) -> list[str]:
    """Raises ValueError naming the line of a .jsonl file that has neither prompt nor question."""
    prompts = []
    for i, line in enumerate(path.read_text("utf-8").split("\n")):
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            try:
                data = json.loads(line)
                line = str(data["prompt"] if "prompt" in data else data["question"])
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}:{i + 1} is not a JSON object with prompt or question") from None
        prompts.append(line)
    if not prompts:
        raise ValueError(f"{path} has no prompt")
    return prompts[:limit]


async def _prompts(args: argparse.Namespace, client: httpx.AsyncClient, entries: list[dict[str, Any]]) -> list[Any]:
    from paraflash.bench.prompts import find_pool, random_prompts

    if args.prompts:
        return read_prompts(args.prompts, args.num_prompts)
    model = args.model or entries[0]["id"]
    pool = await find_pool(client, model, entries, args.vocab_size, args.tokenizer)
    drawn = random_prompts(pool, args.num_prompts, args.input_len, args.max_tokens, seed=args.seed)
    return [prompt.content for prompt in drawn]


async def compare_all(args: argparse.Namespace) -> list[Comparison]:
    """Both servers get each prompt at the same time. A failed request is a comparison with an error."""
    from paraflash.bench import client as http
    from paraflash.bench.compare import Comparison, compare, generate

    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    fields = {"max_tokens": args.max_tokens, "temperature": 0.0, "logprobs": args.logprobs, "seed": args.seed}
    fields |= {"ignore_eos": True} if args.ignore_eos else {}
    slots = asyncio.Semaphore(args.concurrency)
    url_a, url_b = http.base_url_of(args.url_a), http.base_url_of(args.url_b)
    async with http.open_client(url_a, headers) as client_a, http.open_client(url_b, headers) as client_b:
        clients = (client_a, client_b)
        entries = [await http.models(client) for client in clients]
        models = [args.model or listed[0]["id"] for listed in entries]

        async def one(prompt: Any) -> Comparison:
            bodies = [{"model": model, "prompt": prompt, **fields, **args.extra_body} for model in models]
            async with slots:
                work = [generate(client, body) for client, body in zip(clients, bodies, strict=True)]
                a, b = await asyncio.gather(*work, return_exceptions=True)
            for name, got in (("A", a), ("B", b)):
                if isinstance(got, http.ServerProblem):
                    return Comparison(False, error=f"{name}: {got}")
                if isinstance(got, BaseException):
                    raise got
            assert not isinstance(a, BaseException) and not isinstance(b, BaseException)
            return compare(a, b)

        return list(await asyncio.gather(*map(one, await _prompts(args, client_a, entries[0]))))


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, 1 if more outputs differ than allowed (a failed request differs), 2 if it could not start."""
    from dataclasses import asdict

    from paraflash.bench.client import ServerProblem
    from paraflash.bench.compare import summary

    try:
        results = asyncio.run(compare_all(args))
    except (ServerProblem, ValueError, OSError) as problem:
        print(f"compare: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print("\n".join(summary(results)))
    if args.output:
        args.output.write_text(json.dumps([asdict(r) for r in results], indent=1), encoding="utf-8")
    allowed, is_share = args.max_different
    different = sum(not r.equal for r in results)
    return 1 if different > allowed * (len(results) if is_share else 1) else 0
