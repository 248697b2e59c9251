"""`paraflash generate MODEL --prompt TEXT ...`: generates in this terminal, without a server."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paraflash.engine.flags import add_engine_flags, engine_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)
    group = parser.add_argument_group("prompts and sampling")
    group.add_argument("--prompt", nargs="+", action="extend", default=[], metavar="TEXT", help="one or more prompts")
    group.add_argument(
        "--prompt-file",
        metavar="FILE",
        help='one prompt per line, or a JSON object {"prompt": ..} or {"prompt_token_ids": [..]}; - is standard input',
    )
    group.add_argument("--n", type=int, default=1, help="answers per prompt (default 1)")
    group.add_argument("--max-tokens", type=int, default=128, help="most tokens of an answer (default 128)")
    group.add_argument("--min-tokens", type=int, default=0, help="least tokens of an answer (default 0)")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default 0)")
    group.add_argument("--top-p", type=float, default=1.0, help="default 1")
    group.add_argument("--top-k", type=int, default=0, help="0: all tokens (default 0)")
    group.add_argument("--min-p", type=float, default=0.0, help="default 0")
    group.add_argument("--presence-penalty", type=float, default=0.0, help="default 0")
    group.add_argument("--frequency-penalty", type=float, default=0.0, help="default 0")
    group.add_argument("--repetition-penalty", type=float, default=1.0, help="default 1")
    group.add_argument("--stop", nargs="+", action="extend", metavar="TEXT", help="texts that end an answer")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    group.add_argument("--json", action="store_true", help="print one JSON object per prompt")
    group.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    from paraflash.engine.sampling_params import SamplingParams

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    names = ("n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "ignore_eos")
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")

    def work() -> None:
        prompts = _prompts(args)
        _generate(args, prompts, SamplingParams(**{name: getattr(args, name) for name in (*names, *penalties)}))

    return exit_status("generate", work)


def exit_status(command: str, work: Callable[[], None]) -> int:
    """Runs what a command does with an engine: 0, or one line on standard error and 2 for what cannot work, 1 for an
    engine that ended, and 130 after a Ctrl-C."""
    from paraflash.engine.executor import EngineDeadError

    try:
        work()
    except (ValueError, OSError, MemoryError) as error:
        print(f"paraflash {command}: error: {error}", file=sys.stderr)
        return 2
    except EngineDeadError as error:
        print(f"paraflash {command}: the engine ended: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _prompts(args: argparse.Namespace) -> list[Any]:
    prompts: list[Any] = list(args.prompt)
    if args.prompt_file is not None:
        try:
            text = sys.stdin.read() if args.prompt_file == "-" else Path(args.prompt_file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--prompt-file {args.prompt_file} is not UTF-8 text: {error}") from None
        prompts += [_line(line) for line in text.split("\n") if line.strip()]  # JSON may hold other line separators
    if not prompts:
        raise ValueError("no prompt is given; use --prompt or --prompt-file")
    return prompts


def _line(line: str) -> Any:
    if line.lstrip().startswith("{"):
        try:
            return json.loads(line)
        except json.JSONDecodeError:
            pass  # a text that happens to begin with a brace
    return line


def _generate(args: argparse.Namespace, prompts: list[Any], params: Any) -> None:
    from paraflash.engine.llm import LLM

    config = engine_config(args)
    with LLM(**vars(config)) as llm:
        for request in llm.generate(prompts, params, use_tqdm=not args.quiet):
            if args.json:
                answers = [
                    {"text": o.text, "token_ids": o.token_ids, "finish_reason": o.finish_reason}
                    for o in request.outputs
                ]
                line = {"prompt": request.prompt, "prompt_token_ids": request.prompt_token_ids, "outputs": answers}
                print(json.dumps(line, ensure_ascii=False), flush=True)
                continue
            shown = request.prompt if request.prompt is not None else f"{len(request.prompt_token_ids)} token ids"
            for output in request.outputs:
                print(f"--- {shown}\n{output.text}", flush=True)
