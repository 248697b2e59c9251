"""A server process on a free port, with a scripted engine or the real one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SCRIPTED = "fake_core:ScriptedCore"


class RunningServer:
    """A server process; `log` is what it has printed so far."""

    def __init__(self, arguments: list[str], factory: str | None):
        paths = [str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "OMP_NUM_THREADS": "1"}
        environment.pop("VLLM_API_KEY", None)
        if factory is None:
            command = [sys.executable, "-m", "paraflash.cli", "serve"]
        else:
            command = [sys.executable, str(HERE / "serve_scripted.py"), factory]
        self.process = subprocess.Popen(
            [*command, *arguments, "--port", "0"],
            stderr=subprocess.STDOUT,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_ready(self, timeout: float = 60) -> RunningServer:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            found = re.search(r"listening on (http://\S+)", self.log)
            if found:
                self.url = found.group(1)
                return self
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"the server did not start:\n{self.log}")

    def wait_exit(self, timeout: float = 15) -> int:
        status = self.process.wait(timeout)
        self._reader.join(2)
        return status

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        if self.process.poll() is None:
            self.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise

    def stat(self, name: str) -> Any:
        return httpx.get(f"{self.url}/status.json").json()["stats"][name]

    def wait_idle(self, timeout: float = 10, empty: bool = False) -> None:
        """Until no request is left in the engine; empty: and no KV block is in use. Fails if one stays.

        A request whose client has gone may be taken up only after a moment in which the engine is idle.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            stats = httpx.get(f"{self.url}/status.json").json()["stats"]
            if stats["running"] == 0 and stats["waiting"] == 0 and not (empty and stats["kv_usage"]):
                return
            time.sleep(0.02)
        raise AssertionError(f"the engine is not idle: {stats}")


def events(response: httpx.Response) -> list[str]:
    """The data of the server-sent events of an answer."""
    return [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
