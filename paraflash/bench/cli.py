"""`paraflash bench`: one subcommand a module, imported only when `bench` is the chosen command.

A module of the table has `add_arguments(parser)` and `run(args) -> int` and imports what is heavy inside `run`.
"""

from __future__ import annotations

import argparse
import importlib

SUBCOMMANDS = {
    "serve": ("paraflash.bench.serve", "load on an OpenAI-compatible server"),
    "sweep": ("paraflash.bench.sweep", "start the server for each topology, measure a matrix, write one report"),
    "offline": ("paraflash.bench.offline", "prefill and decode rates of the engine itself, without a server"),
    "rank": ("paraflash.bench.rank", "one rank's share of a topology on one GPU, with modelled exchange"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="bench_command", metavar="WHAT", required=True)
    for name, (module, text) in SUBCOMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        importlib.import_module(module).add_arguments(sub)


def run(args: argparse.Namespace) -> int:
    """Runs the chosen subcommand; returns its exit status."""
    return int(importlib.import_module(SUBCOMMANDS[args.bench_command][0]).run(args))
