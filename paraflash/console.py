"""Where tables are printed: as wide as the terminal, and wide enough for every column in a file or pipe."""

from __future__ import annotations

import sys

from rich.console import Console

PIPE_WIDTH = 160


def table_console() -> Console:
    """A console on standard output."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
