"""Starts one worker process per rank, hands each step to all of them, and notices when one dies or gets stuck.

Every failure of a worker ends the engine: the others are killed, and this call and all later ones raise the same
`EngineDeadError`. No call waits longer than `config.step_timeout` without progress of some rank.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import ORIGINAL_DIR, BaseProcess  # type: ignore[attr-defined]
from typing import Any

from paraflash.config.engine import EngineConfig
from paraflash.config.model import ModelConfig
from paraflash.engine import worker
from paraflash.engine.messages import StepInput, StepOutput
from paraflash.engine.worker import MESH, RUNNER, START_TIMEOUT, WorkerSpec

logger = logging.getLogger(__name__)

_POLL = 0.25  # seconds between looks at the progress counters
_SETTLE = 0.3  # seconds in which ranks that fail because of another one are heard, so that the first cause is named
_STOP_TIMEOUT = 5.0  # seconds a worker has to end by itself
_NO_GUARD = (
    "paraflash starts worker processes, which import the main script again: put what creates the LLM under "
    'if __name__ == "__main__": and call it from there'
)


class EngineDeadError(RuntimeError):
    """A worker died or got stuck; the engine cannot go on. The message names the rank and what is known."""


@dataclass
class _Worker:
    rank: int
    process: BaseProcess
    pipe: Connection
    lifeline: Connection
    open: bool = True  # the pipe has not ended
    began: bool = False  # its first message has arrived
    error: str | None = None  # traceback it sent
    exception: BaseException | None = None
    answers: list[Any] = field(default_factory=list)  # to messages in flight, in order

    def describe(self) -> str:
        return f"rank {self.rank} (pid {self.process.pid})"


class Executor:
    """Workers of one engine. Not thread-safe: one thread calls it.

    `runner_factory` and `mesh_factory` are "package.module:name" of what a worker builds; see `WorkerSpec`.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        runner_factory: str = RUNNER,
        mesh_factory: str | None = MESH,
        start_timeout: float = START_TIMEOUT,
    ):
        refuse_in_worker_import()
        self.config = config
        self._dead: EngineDeadError | None = None
        self._workers: list[_Worker] = []
        self._steps_out = 0  # sent and not received
        self._folder = tempfile.mkdtemp(prefix="paraflash-")
        # Also runs when the executor is collected, and at exit before multiprocessing waits for its children.
        self._cleanup = util.Finalize(self, _end_all, (self._workers, self._folder), exitpriority=100)
        self._stacks = [WorkerSpec(r, config, model, self._folder).stack_file() for r in range(config.world_size)]
        method = "spawn" if config.device == "cuda" else "forkserver"
        context = mp.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["paraflash.engine.preload", runner_factory.partition(":")[0]])
        self._progress = context.RawArray("q", config.world_size)
        try:
            for rank in range(config.world_size):
                spec = WorkerSpec(
                    rank, config, model, self._folder, runner_factory, mesh_factory, logger.getEffectiveLevel()
                )
                self._workers.append(_start_worker(context, spec, self._progress))
            self._collect(start_timeout, "start-up")  # "hello": the process runs
            self._collect(start_timeout, "start-up")  # the model is loaded
        except BaseException as error:
            if self._dead is None:
                self._end(EngineDeadError(f"the engine did not start: {error!r}"))
            raise

    @property
    def pids(self) -> list[int]:
        """Process id of each rank."""
        return [int(w.process.pid or 0) for w in self._workers]

    def execute(self, step: StepInput) -> StepOutput:
        """Runs one step on all ranks; the answer is rank 0's. Raises `EngineDeadError`."""
        self.send(step)
        return self.receive()

    def send(self, step: StepInput) -> None:
        """Hands out a step, also while the one before runs. Each must be received, in order."""
        self._post("execute", step)
        self._steps_out += 1

    def receive(self) -> StepOutput:
        """Waits for the oldest step that was sent. Raises `EngineDeadError`."""
        output: StepOutput = self._await("execute")[0]
        self._steps_out -= 1
        return output

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every rank's runner; one result per rank. Raises `EngineDeadError`."""
        if self._dead is None and self._steps_out:
            raise RuntimeError(f"{method} cannot be called while {self._steps_out} steps are in flight")
        self._post("call", method, args)
        return self._await("call")

    def check(self) -> None:
        """Raises `EngineDeadError` if a worker has died since the last call."""
        if self._dead is not None:
            raise self._dead
        if any(not w.process.is_alive() for w in self._workers):
            self._fail("while idle")

    def shutdown(self) -> None:
        """Ends the workers, by force if they do not end by themselves. May be called again."""
        if self._dead is None:
            self._dead = EngineDeadError("the engine has been shut down")
            for w in self._workers:
                with contextlib.suppress(OSError):
                    w.pipe.send_bytes(pickle.dumps(("shutdown",)))
            deadline = time.monotonic() + _STOP_TIMEOUT
            for w in self._workers:
                w.process.join(max(0.0, deadline - time.monotonic()))
        self._cleanup()

    def _post(self, *message: Any) -> None:
        """Sends a message to every worker."""
        with self._ends_if_interrupted(message[0]):
            payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
            for w in self._workers:
                try:
                    w.pipe.send_bytes(payload)  # bounded by SO_SNDTIMEO
                except BlockingIOError:
                    self._fail(f"during {message[0]}", stuck=True)
                except OSError:
                    self._fail(f"during {message[0]}")

    def _await(self, doing: str) -> list[Any]:
        """The answers to the oldest message that has not been answered, one per rank."""
        with self._ends_if_interrupted(doing):
            return self._collect(self.config.step_timeout, doing)

    @contextlib.contextmanager
    def _ends_if_interrupted(self, doing: str) -> Iterator[None]:
        if self._dead is not None:
            raise self._dead
        try:
            yield
        except BaseException as error:  # Ctrl-C too: the workers are in the middle of something
            if self._dead is None:
                self._end(EngineDeadError(f"the engine was interrupted during {doing}: {error!r}"))
            raise

    def _collect(self, timeout: float, doing: str) -> list[Any]:
        """One answer per rank. Ends the engine if a rank fails, or if no counter of any rank moves for `timeout`."""
        waiting = {w.pipe: w for w in self._workers if not w.answers}
        seen, since = list(self._progress), time.monotonic()
        while waiting:
            for item in wait([*waiting, *(w.process.sentinel for w in self._workers)], _POLL):
                if isinstance(item, Connection):
                    _receive(waiting[item])
            if any(w.error is not None or not w.process.is_alive() for w in self._workers):
                self._fail(f"during {doing}")
            answered = [pipe for pipe, w in waiting.items() if w.answers]
            for pipe in answered:
                del waiting[pipe]
            if answered or list(self._progress) != seen:
                seen, since = list(self._progress), time.monotonic()
            elif time.monotonic() - since > timeout:
                self._fail(f"during {doing}", stuck=True)
        return [w.answers.pop(0) for w in self._workers]

    def _fail(self, when: str, stuck: bool = False) -> None:
        """Finds the first cause, kills all workers and raises."""
        if stuck:
            error = self._stuck_error(when)
        else:
            _settle(self._workers)
            error = self._death_error(when)
        self._end(error)
        raise error

    def _death_error(self, when: str) -> EngineDeadError:
        # A rank that died without a word is the cause of what its peers complain about.
        silent = [w for w in self._workers if w.error is None and not w.process.is_alive()]
        if silent:
            lines = [f"{w.describe()} ended {when} with {_exit_text(w.process.exitcode)}" for w in silent]
            if not silent[0].began and _main_file() is not None:
                lines.append(_NO_GUARD)
            return EngineDeadError("; ".join(lines))
        failed = [w for w in self._workers if w.error is not None]
        first = failed[0]
        others = "".join(f", {w.describe()}" for w in failed[1:])
        error = EngineDeadError(f"{first.describe()} failed {when}{others and ' as did' + others[1:]}:\n{first.error}")
        if when == "during start-up" and isinstance(first.exception, (ValueError, OSError, MemoryError)):
            self._end(error)
            raise first.exception from error  # a wrong setting or checkpoint: its own sentence says it best
        return error

    def _stuck_error(self, when: str) -> EngineDeadError:
        """Names the ranks that are stopped, else those whose counters are behind, else all that have not answered."""
        pending = [w for w in self._workers if not w.answers]
        stopped = [w for w in pending if _process_state(w.process.pid) in "Tt"]
        least = min(self._progress[w.rank] for w in pending)
        blamed = stopped or [w for w in pending if self._progress[w.rank] == least]
        for w in pending:
            if w not in stopped and w.process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(w.process.pid, signal.SIGUSR1)
        time.sleep(_SETTLE)
        what = "is stopped (SIGSTOP)" if stopped else "made no progress"
        counts = ", ".join(f"rank {w.rank}: {self._progress[w.rank]}" for w in self._workers)
        text = (
            f"{' and '.join(w.describe() for w in blamed)} {what} {when}: nothing moved for "
            f"{self.config.step_timeout:g} s (progress counters {counts})"
        )
        for w in blamed:
            with contextlib.suppress(OSError), open(self._stacks[w.rank]) as file:
                stack = file.read().strip()
                text += f"\n{w.describe()} was at:\n{stack}" if stack else ""
        return EngineDeadError(text)

    def _end(self, error: EngineDeadError) -> None:
        self._dead = error
        self._cleanup()


def refuse_in_worker_import() -> None:
    """Raises where a worker process is importing the main script, which then lacks the usual guard."""
    if getattr(mp.current_process(), "_inheriting", False):
        raise RuntimeError(_NO_GUARD)


def _main_file() -> str | None:
    """The file that workers import as their main module, unless main is a package's module or is typed in."""
    main = sys.modules.get("__main__")
    if main is None or getattr(main, "__spec__", None) is not None:
        return None
    return getattr(main, "__file__", None)


@contextlib.contextmanager
def _importable_main() -> Iterator[None]:
    """Hides the name of a main module that is no file (`python - < script` calls it <stdin>) from multiprocessing."""
    file = _main_file()
    if file is None or os.path.exists(os.path.join(ORIGINAL_DIR, file)):
        yield
        return
    main = sys.modules["__main__"]
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


def _start_worker(context: Any, spec: WorkerSpec, progress: Any) -> _Worker:
    ours, theirs = context.Pipe()
    watched, lifeline = context.Pipe(duplex=False)
    # Sends and receives of the parent are bounded: a stopped worker neither drains nor fills its pipe.
    limit = struct.pack("ll", max(1, round(spec.config.step_timeout)), 0)
    with socket.socket(fileno=os.dup(ours.fileno())) as handle:
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    fork_server = context.get_start_method() == "forkserver"
    process = context.Process(
        target=worker.main,
        args=(spec, theirs, watched, progress, fork_server),
        name=f"paraflash-rank-{spec.rank}",
        daemon=True,
    )
    with _importable_main():
        process.start()
    theirs.close()
    watched.close()
    return _Worker(spec.rank, process, ours, lifeline)


def _receive(w: _Worker) -> None:
    """Takes one message of a worker, if it can be read."""
    try:
        kind, *values = w.pipe.recv()
    except (EOFError, OSError):
        w.open = False
        w.process.join(1.0)  # the pipe closes a moment before the process is gone
        if w.process.is_alive():
            w.error = "its pipe broke"
        return
    w.began = True
    if kind == "ok":
        w.answers.append(values[0])
    else:
        w.error, w.exception = values


def _settle(workers: list[_Worker]) -> None:
    """Hears for a moment what else goes wrong; a rank that has answered may have failed since."""
    deadline = time.monotonic() + _SETTLE
    while (left := deadline - time.monotonic()) > 0:
        pipes = {w.pipe: w for w in workers if w.open and w.error is None}
        if not pipes:
            return
        for pipe in wait(list(pipes), left):
            _receive(pipes[pipe])  # type: ignore[index]


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"exit code {code} ({signal.Signals(-code).name})"
    return f"exit code {code}"


def _process_state(pid: int | None) -> str:
    """State letter of a process as in /proc/PID/stat; T is stopped. `?` where it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"


def _end_all(workers: list[_Worker], folder: str) -> None:
    """Kills what still runs and frees what the engine held."""
    for w in workers:
        if w.process.is_alive():
            w.process.kill()
    for w in workers:
        w.process.join(_STOP_TIMEOUT)
        w.pipe.close()
        w.lifeline.close()
    shutil.rmtree(folder, ignore_errors=True)
