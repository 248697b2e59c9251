"""How loading is shown: a bar on a terminal, otherwise a log line every few seconds."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)
_LOG_SECONDS = 5.0


@contextmanager
def show_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a callback (bytes done, bytes in all) that shows the state on stderr; for one rank only."""
    started = time.monotonic()
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    last = started

    def log(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == total or now - last >= _LOG_SECONDS:
            last = now
            logger.info("%s: %.2f of %.2f GiB (%.1f s)", label, done / 2**30, total / 2**30, now - started)

    yield log
