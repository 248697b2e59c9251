"""The `paraflash` command. Each subcommand lives with the part it drives and is imported only when it is used."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "serve": ("paraflash.server.cli", "start the OpenAI-compatible server"),
    "generate": ("paraflash.engine.cli", "generate text from prompts, without a server"),
    "bench": ("paraflash.bench.cli", "measure a server, a sweep of topologies, or one rank"),
    "eval": ("paraflash.bench.eval_cli", "accuracy on a GSM8K-format file against a server"),
    "compare": ("paraflash.bench.compare_cli", "compare the tokens of two servers"),
    "plan": ("paraflash.planner.cli", "predict every TP x PCP split for a model and a GPU type"),
    "checkpoint": ("paraflash.checkpoint.cli", "write a small random checkpoint, or inspect one"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand; returns its exit status, 130 after a Ctrl-C that the subcommand does not handle."""
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return 130


def _run(argv: list[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    from paraflash import __version__
    from paraflash.arguments import CommandParser

    parser = CommandParser(prog="paraflash", description="Serve DeepSeek-V4.1-Flash with prefill context parallelism.")
    parser.add_argument("--version", action="version", version=f"paraflash {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == chosen:  # only the chosen command pays for its imports
            importlib.import_module(module).add_arguments(sub)
    args = parser.parse_args(argv)
    return int(importlib.import_module(COMMANDS[args.command][0]).run(args) or 0)


if __name__ == "__main__":
    sys.exit(main())
