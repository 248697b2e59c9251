"""The process of one rank: joins the mesh, loads its shard, then answers messages until it is told to stop.

Messages come on a pipe and each is answered on it, in order: ("execute", StepInput), ("call", method, args),
("shutdown",) -> ("ok", value) or ("error", text, exception or None). A worker never outlives the process that started
it, whatever state it is in.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import logging
import os
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from paraflash.config.engine import EngineConfig
from paraflash.config.model import ModelConfig

RUNNER = "paraflash.engine.runner:ModelRunner"
MESH = "paraflash.parallel.mesh:init_mesh"
START_TIMEOUT = 1800.0  # seconds: a large checkpoint on a slow disk takes minutes to load
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is told at its start; pickled once per rank."""

    rank: int
    config: EngineConfig
    model: ModelConfig
    folder: str  # private to this engine: rendezvous file, stack dumps
    runner_factory: str = RUNNER
    mesh_factory: str | None = MESH  # None: no process groups; the runner gets None for its mesh
    log_level: int = logging.WARNING

    def stack_file(self) -> str:
        """Where the worker writes the stacks of its threads on SIGUSR1."""
        return os.path.join(self.folder, f"stack-{self.rank}")


def load_factory(path: str) -> Callable[..., Any]:
    """The object that "package.module:name" names."""
    module, _, name = path.partition(":")
    factory: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return factory


def main(spec: WorkerSpec, pipe: Connection, lifeline: Connection, progress: Any, from_fork_server: bool) -> None:
    """Entry of the process. `lifeline` reads end-of-file when the parent is gone; `progress` is int64 [world]."""
    # Signals of the whole group are the parent's to understand; it ends this process by message or SIGKILL.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent(lifeline, from_fork_server)
    stacks = open(spec.stack_file(), "w")  # noqa: SIM115  (open for as long as the process lives)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    logging.basicConfig(
        level=spec.log_level,
        format=f"%(levelname)s %(asctime)s rank {spec.rank}: %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    _send(pipe, "ok", "hello")
    try:
        runner, mesh = _start(spec, progress)
        _send(pipe, "ok", None)
        _serve(_reader(pipe) if spec.config.async_scheduling else lambda: _receive(pipe), pipe, runner, mesh)
    except BaseException as error:
        _send(pipe, "error", traceback.format_exc(), _picklable(error))
        os._exit(1)  # at once: the peers may wait for this rank in a collective


def _send(pipe: Connection, *message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        pipe.send_bytes(data)
    except OSError:
        os._exit(1)  # the parent is gone


def _receive(pipe: Connection) -> tuple[Any, ...]:
    try:
        data = pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)  # the parent is gone
    message: tuple[Any, ...] = pickle.loads(data)
    return message


def _picklable(error: BaseException) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


def _start(spec: WorkerSpec, progress: Any) -> tuple[Any, Any]:
    """Joins the mesh and builds and loads the runner. Returns (runner, mesh)."""
    import torch

    config, rank = spec.config, spec.rank
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // config.world_size)
    torch.set_num_threads(min(threads, torch.get_num_threads()))  # OMP_NUM_THREADS may ask for fewer
    mesh = None
    if spec.mesh_factory is not None:
        # All ranks are on this machine, whatever its host name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        mesh = load_factory(spec.mesh_factory)(
            rank,
            config.tensor_parallel_size,
            config.prefill_context_parallel_size,
            config.device,
            f"file://{spec.folder}/rendezvous",
        )
    runner = load_factory(spec.runner_factory)(config, spec.model, mesh)

    def bump() -> None:
        progress[rank] += 1

    runner.progress = bump
    runner.load()
    return runner, mesh


def _reader(pipe: Connection) -> Callable[[], tuple[Any, ...]]:
    """Takes messages off the pipe as they come, so that a step which is sent while another runs does not wait in its
    sender. The result gives the next one."""
    messages: queue.SimpleQueue[tuple[Any, ...] | BaseException] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                messages.put(_receive(pipe))
        except BaseException as error:
            messages.put(error)

    def take() -> tuple[Any, ...]:
        message = messages.get()
        if isinstance(message, BaseException):
            raise message
        return message

    threading.Thread(target=read, name="reader", daemon=True).start()
    return take


def _serve(take: Callable[[], tuple[Any, ...]], pipe: Connection, runner: Any, mesh: Any) -> None:
    while True:
        kind, *args = take()
        if kind == "execute":
            _send(pipe, "ok", runner.execute(args[0]))
        elif kind == "call":
            _send(pipe, "ok", getattr(runner, args[0])(*args[1]))
        else:
            if mesh is not None:
                mesh.close()
            return


def _die_with_parent(lifeline: Connection, from_fork_server: bool) -> None:
    """Ends this process when the parent ends, even by SIGKILL and even while this one is stopped or deep in a kernel.

    The fork server dies with the parent, and the kernel kills its children then. A spawned process watches a pipe
    instead: the kernel's signal would come when the *thread* that spawned it ends.
    """
    if from_fork_server:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            lifeline.recv_bytes()
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
