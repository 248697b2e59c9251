"""What the commands share of the command line: value types, and a parser that is kind to who types."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """The parser of every command (argparse makes the parsers of subcommands of their parent's class).

    --max_model_len is as good as --max-model-len, as with vLLM; an unknown flag is answered with the closest one; help
    names the default of a flag, unless its own text does or there is nothing to name.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(
            [_dashes(word) for word in (sys.argv[1:] if args is None else args)], namespace
        )
        for word in unknown:
            if word.startswith("-"):
                flags = [flag for action in self._actions for flag in action.option_strings]
                close = difflib.get_close_matches(word.partition("=")[0], flags, n=1, cutoff=0.6)
                self.error(f"unknown flag {word}" + (f"; did you mean {close[0]}?" if close else ""))
        return found, unknown

    def format_help(self) -> str:
        for action in self._actions:
            text = action.help or ""
            if action.help != argparse.SUPPRESS and "default" not in text and (shown := _shown(action.default)):
                action.help = f"{text} (default {shown})" if text else f"default {shown}"
        return super().format_help()


def _dashes(word: str) -> str:
    """A word of the command line with dashes in a flag's name; values stay."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _shown(default: Any) -> str:
    """A default as one would type it; nothing for None, empty values, and switches that are off."""
    if default is None or default is False or default == argparse.SUPPRESS:
        return ""
    if isinstance(default, dict):
        return ""
    text = " ".join(map(str, default)) if isinstance(default, list) else str(default)
    return "on" if default is True else text.replace("%", "%%")


def json_object(text: str) -> dict[str, Any]:
    """A JSON object given on the command line."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value
