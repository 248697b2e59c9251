"""A server started for a measurement: its output in a log file, and gone at the end with all that it started.

The server has a process group of its own. Parts of it may have left that group (an engine in its own session) and may
have lost their parent, so every process of the server is also known by a mark in its environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx

from paraflash.bench import client as http

T = TypeVar("T")
_MARK = "PARAFLASH_BENCH_SERVER"
_STOP_SECONDS = 20.0  # for the server to end by itself before it is killed


class ServerLost(RuntimeError):
    """The server did not start, ended, or stopped answering; the message says which and shows its last words."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class ServerProcess:
    def __init__(self, command: list[str], log: Path, base_url: str):
        self.command, self.log, self.base_url = command, log, base_url
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._mark = f"{_MARK}={uuid.uuid4().hex}"

    def start(self) -> None:
        """Starts the command. Raises ServerLost if there is no such program."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            log.write(f"\n$ {shlex.join(self.command)}\n".encode())
            log.flush()
            self._log_start = log.tell()
            name, value = self._mark.split("=")
            try:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, name: value},
                )
            except OSError as problem:
                raise ServerLost(f"cannot start {self.command[0]!r}: {problem.strerror}") from None

    def exit_reason(self) -> str | None:
        """None while the process runs, else how it ended and the last line of its log."""
        code = self._process.poll() if self._process else None
        if code is None:
            return None
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        last = self.last_line()
        return f"server {how}" + (f": {last}" if last else "")

    def last_line(self) -> str:
        """The last line that the server wrote since its start, cut to 300 characters."""
        with self.log.open("rb") as log:
            log.seek(max(self._log_start, self.log.stat().st_size - 8192))
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")[:300]

    async def wait_ready(self, client: httpx.AsyncClient, limit: float) -> float:
        """Seconds until /health answered 200. Raises ServerLost if the server ends or `limit` seconds pass."""
        begin = time.monotonic()
        while time.monotonic() - begin < limit:
            if reason := self.exit_reason():
                raise ServerLost(f"did not start: {reason}")
            if await http.healthy(client, timeout=5.0):
                return time.monotonic() - begin
            await asyncio.sleep(0.1)
        raise ServerLost(f"not ready after {limit:g} s; last log line: {self.last_line() or 'none'}")

    async def guard(self, work: Coroutine[Any, Any, T], limit: float) -> T:
        """The result of `work`, or ServerLost as soon as the server ends or `limit` seconds have passed."""
        task = asyncio.ensure_future(work)
        until = time.monotonic() + limit
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=0.2)
                if task.done():
                    break
                if reason := self.exit_reason():
                    raise ServerLost(reason)
                if time.monotonic() > until:
                    raise ServerLost(f"no result within {limit:g} s; last log line: {self.last_line() or 'none'}")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def check_alive(self, client: httpx.AsyncClient, limit: float = 15.0) -> None:
        """Raises ServerLost unless /health answers 200 within `limit` seconds; notes an end that is on its way."""
        until = time.monotonic() + limit
        while not await http.healthy(client, timeout=5.0):
            if reason := self.exit_reason():
                raise ServerLost(reason)
            if time.monotonic() > until:
                raise ServerLost(f"server unhealthy; last log line: {self.last_line() or 'none'}")
            await asyncio.sleep(0.2)

    def stop(self) -> None:
        """Ends the server and whatever it started: SIGTERM, then SIGKILL to its group and to all that bear its mark."""
        if self._process is None:
            return
        try:
            if self._process.poll() is None:
                self._signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_STOP_SECONDS)
        finally:  # also after a second interrupt, and for what a dead leader left behind
            self._signal(signal.SIGKILL)
            for pid in self._marked():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def _marked(self) -> list[int]:
        """Processes that inherited this server's mark (Linux; elsewhere none are found)."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if self._mark.encode() in entry.read_bytes().split(b"\0"):
                    found.append(int(entry.parent.name))
        return found

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
