"""`paraflash eval FILE`: accuracy on a GSM8K-format file against one or several servers, with a table per topology."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paraflash.arguments import json_object
from paraflash.bench.flags import count_from, positive

if TYPE_CHECKING:
    from paraflash.bench.eval import Answer, Record

_SHOWN_IDS = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help='JSON lines of {"question", "answer"}; the answer ends with "#### N"')
    parser.add_argument(
        "--url", action="append", required=True, metavar="[NAME=]URL", help="a server; repeat it for several topologies"
    )
    parser.add_argument("--endpoint", choices=["chat", "completions"], default="chat", help="how it is asked")
    parser.add_argument("--model", help="default: the first of each server's /v1/models")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: OPENAI_API_KEY")
    parser.add_argument("--num-shots", type=count_from(0), default=4, help="worked examples in each prompt")
    parser.add_argument(
        "--shots-file", type=Path, help="records to take them from; default: FILE, which then lacks them"
    )
    parser.add_argument("--limit", type=count_from(1), help="only the first so many records")
    parser.add_argument("--max-tokens", type=count_from(1), default=1024, help="most tokens of a reply")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=count_from(0), default=0, help="of the choice of examples and of the sampling")
    parser.add_argument("--concurrency", type=count_from(1), default=16, help="requests in flight")
    parser.add_argument("--request-timeout", type=positive, metavar="S", help="a silence of S seconds is an error")
    parser.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="further fields of each request"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every answer as JSON")


def parse_urls(texts: list[str]) -> dict[str, str]:
    """Name to URL; without a name a server is called by its address. Raises ValueError."""
    from paraflash.bench.client import base_url_of

    found: dict[str, str] = {}
    for text in texts:
        match = re.fullmatch(r"([^=]+)=(https?://.+)", text)
        url = base_url_of(match[2] if match else text)
        name = match[1] if match else url.split("://", 1)[1]
        if name in found:
            raise ValueError(f"url {text!r}: the name {name!r} is taken; give NAME=URL with another")
        found[name] = url
    return found


def choose(args: argparse.Namespace) -> tuple[list[Record], list[Record]]:
    """(records to ask, worked examples); an example is never asked."""
    from paraflash.bench.eval import choose_shots, read_records

    records = read_records(args.file)
    shots = choose_shots(read_records(args.shots_file) if args.shots_file else records, args.num_shots, args.seed)
    if not args.shots_file:
        taken = {shot.id for shot in shots}
        records = [record for record in records if record.id not in taken]
        if not records:
            raise ValueError(f"num-shots is {args.num_shots}, which leaves no record of {args.file} to ask")
    return records[: args.limit], shots


async def ask_all(
    args: argparse.Namespace, urls: dict[str, str], records: list[Record], shots: list[Record]
) -> dict[str, list[Answer]]:
    """One server after the other, so that they do not slow each other down on one machine."""
    from rich.console import Console
    from rich.progress import Progress

    from paraflash.bench import client as http
    from paraflash.bench.eval import evaluate

    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    results = {}
    with Progress(console=Console(stderr=True)) as bar:
        for name, url in urls.items():
            async with http.open_client(url, headers, args.request_timeout) as client:
                model = args.model or (await http.models(client))[0]["id"]
                fields: dict[str, Any] = {"model": model, "max_tokens": args.max_tokens, "seed": args.seed}
                fields |= {"temperature": args.temperature} | ({"top_p": args.top_p} if args.top_p else {})
                task = bar.add_task(name, total=len(records))
                results[name] = await evaluate(
                    client,
                    records,
                    shots,
                    endpoint=args.endpoint,
                    fields=fields | args.extra_body,
                    concurrency=args.concurrency,
                    done=lambda answer, task=task: bar.advance(task),  # type: ignore[misc]
                )
    return results


def to_json(args: argparse.Namespace, results: dict[str, list[Answer]], shots: list[Record]) -> dict[str, Any]:
    from dataclasses import asdict

    from paraflash.bench.eval import differing, score

    def plain(answer: Answer) -> dict[str, Any]:
        return asdict(answer) | {"number": None if answer.number is None else str(answer.number)}

    return {
        "file": str(args.file),
        "endpoint": args.endpoint,
        "seed": args.seed,
        "temperature": args.temperature,
        "max_tokens": args.max_tokens,
        "shots": [shot.id for shot in shots],
        "scores": {name: asdict(score(answers)) for name, answers in results.items()},
        "differing": list(differing(results)),
        "answers": {name: [plain(a) for a in answers] for name, answers in results.items()},
    }


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, 1 if every request to some server failed, 2 if the run could not start, 130 if interrupted."""
    from paraflash.bench.client import ServerProblem
    from paraflash.bench.eval import differing, table

    try:
        urls = parse_urls(args.url)
        records, shots = choose(args)
        results = asyncio.run(ask_all(args, urls, records, shots))
    except (ServerProblem, ValueError, OSError) as problem:
        print(f"eval: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    where = args.shots_file or f"{args.file}, which are not asked"
    print(f"{len(records)} records, {len(shots)} worked examples" + (f" of {where}" if shots else "") + "\n")
    print(table(results))
    for name, answers in results.items():
        errors = Counter(a.error for a in answers if a.error)
        for error, n in errors.most_common(3):
            print(f"{name}: {n} x {error}")
    if len(results) > 1:
        ids = list(differing(results))
        shown = ", ".join(map(str, ids[:_SHOWN_IDS])) + (", ..." if len(ids) > _SHOWN_IDS else "")
        print(f"\nAnswers that differ between topologies: {len(ids)}" + (f" (ids {shown})" if ids else ""))
    if args.output:
        args.output.write_text(json.dumps(to_json(args, results, shots), indent=1), encoding="utf-8")
    return 1 if any(all(a.error for a in answers) for answers in results.values()) else 0
