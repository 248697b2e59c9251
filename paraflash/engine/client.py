"""The HTTP process's view of the engine: `AsyncEngine` starts the engine process and streams what it produces.

engine = await AsyncEngine.start(config)
stream = await engine.submit([Submission(id, prompt_ids, params)])
async for delta in stream: ...
stream.close()  # aborts whatever has not finished
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from paraflash.config.engine import EngineConfig
from paraflash.engine import wire
from paraflash.engine.request import Delta
from paraflash.engine.sampling_params import SamplingParams

logger = logging.getLogger("paraflash.server")

CORE = "paraflash.engine.engine:EngineCore"


class EngineGone(RuntimeError):
    """The engine has ended, or the server is ending; the message says why."""


class StartFailed(RuntimeError):
    """The engine did not start. `refused`: because of the configuration."""

    def __init__(self, message: str, refused: bool):
        super().__init__(message)
        self.refused = refused


class NotTaken(RuntimeError):
    """The engine did not take a request. kind: `bad`, `busy` or `failed`; `field` names what is wrong."""

    def __init__(self, kind: str, message: str, field: str | None):
        super().__init__(message)
        self.kind, self.field = kind, field


@dataclass
class Submission:
    request_id: str  # unique among all requests that are alive
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None


Item = Delta | wire.Added | Exception


class Stream:
    """What the engine says of a group of requests that were submitted together."""

    def __init__(self, engine: AsyncEngine, request_ids: list[str]):
        self._engine = engine
        self._open = set(request_ids)
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        self._early: deque[Delta] = deque()  # deltas that came while others of the group were being taken

    def put(self, item: Item) -> None:
        self._queue.put_nowait(item)

    async def accepted(self) -> None:
        """Waits until the engine has taken every request. Raises `NotTaken` or `EngineGone`."""
        for _ in range(len(self._open)):
            item = await self._queue.get()
            while isinstance(item, Delta):
                self._early.append(item)
                item = await self._queue.get()
            if isinstance(item, Exception):
                raise item

    def close(self) -> None:
        """Aborts what has not finished."""
        self.abort(list(self._open))

    def abort(self, request_ids: list[str]) -> None:
        """Ends some of the requests; no further delta of them is seen."""
        gone = [name for name in request_ids if name in self._open]
        self._open.difference_update(gone)
        self._engine.forget(gone, abort=True)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Deltas in order, until every request has finished. Raises `EngineGone`."""
        while self._open:
            item = self._early.popleft() if self._early else await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if not isinstance(item, Delta) or item.request_id not in self._open:
                continue
            if item.finish_reason is not None:
                self._open.discard(item.request_id)
                self._engine.forget([item.request_id], abort=False)
            yield item


def _tokens(stats: dict[str, Any]) -> int:
    """Tokens that the engine has processed since it started."""
    return int(stats.get("prompt_tokens", 0) + stats.get("generation_tokens", 0))


class AsyncEngine:
    """The engine process and the streams that are open on it. All methods belong to one event loop."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.info: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}
        self.dead: str | None = None  # why the engine is gone
        self.ended = asyncio.Event()
        self.on_step: Callable[[int], None] | None = None  # called with the tokens of each step
        self._streams: dict[str, Stream] = {}
        self._folder = tempfile.mkdtemp(prefix="paraflash-")  # mode 0700: only this user can talk to the engine
        self._context = zmq.asyncio.Context()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    @classmethod
    async def start(cls, config: EngineConfig, factory: str = CORE, log_level: str = "INFO") -> AsyncEngine:
        """Starts the process and waits until the model is loaded. Raises `StartFailed`."""
        self = cls(config)
        try:
            await self._start(factory, log_level)
        except BaseException:
            await self.stop(0)
            raise
        return self

    async def _start(self, factory: str, log_level: str) -> None:
        addresses = [f"ipc://{self._folder}/{name}" for name in ("in", "out")]
        self._outbox, self._inbox = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket, address in zip((self._outbox, self._inbox), addresses, strict=True):
            socket.set_hwm(0)
            socket.bind(address)
        # Its own session: a Ctrl-C in the terminal reaches the server alone, which then ends the engine in order.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "paraflash.engine.engine_process", str(os.getpid()), *addresses, log_level,
            start_new_session=True,
        )  # fmt: skip
        self._send(wire.Start(factory, self.config))
        exited = asyncio.create_task(self._process.wait())
        received = asyncio.ensure_future(self._inbox.recv())
        try:
            await asyncio.wait({exited, received}, return_when=asyncio.FIRST_COMPLETED)
            if not received.done():
                await asyncio.wait({received}, timeout=1)  # its last words may still be on the way
            message = wire.decode_from_engine(received.result()) if received.done() else None
        finally:
            received.cancel()
        if isinstance(message, wire.Dead):
            raise StartFailed(message.message, message.refused)
        if not isinstance(message, wire.Ready):
            raise StartFailed(f"the engine process ended with status {exited.result()} while it started", False)
        self.info, self.stats = message.info, message.stats
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch(exited))]

    async def _receive(self) -> None:
        while True:
            message = wire.decode_from_engine(await self._inbox.recv())
            if isinstance(message, wire.Updates):
                if self.on_step is not None:
                    self.on_step(_tokens(message.stats) - _tokens(self.stats))
                self.stats = message.stats
                for delta in message.deltas:
                    if delta.request_id in self._streams:
                        self._streams[delta.request_id].put(delta)
            elif isinstance(message, wire.Added) and message.request_id in self._streams:
                self._streams[message.request_id].put(message)
            elif isinstance(message, wire.Refused) and message.request_id in self._streams:
                refusal = NotTaken(message.kind, message.message, message.field)
                self._streams[message.request_id].put(refusal)
            elif isinstance(message, wire.Dead):
                self._end(message.message)

    async def _watch(self, exited: asyncio.Task[int]) -> None:
        status = await exited
        await asyncio.sleep(0.2)  # a `Dead` that says more may still be on the way
        if not self._stopping:
            self._end(f"the engine process ended with status {status}")

    def _end(self, reason: str) -> None:
        """Every open stream ends with an error; from now on nothing is taken."""
        if self.dead is None:
            self.dead = reason
            logger.error("engine: %s", reason)
            self.fail_open_streams(reason)
            self.ended.set()

    def fail_open_streams(self, reason: str) -> int:
        """Ends every open stream with `EngineGone(reason)`; returns how many requests were open."""
        names = list(self._streams)
        for stream in {id(s): s for s in self._streams.values()}.values():
            stream.put(EngineGone(reason))
        self.forget(names, abort=self.dead is None)
        return len(names)

    def _send(self, message: wire.ToEngine) -> None:
        self._outbox.send(wire.encode(message))  # no high-water mark: it is queued at once

    async def submit(self, submissions: list[Submission]) -> Stream:
        """Hands the requests to the engine, all or none. Raises `NotTaken` or `EngineGone`."""
        if self.dead is not None:
            raise EngineGone(self.dead)
        stream = Stream(self, [s.request_id for s in submissions])
        try:
            for s in submissions:
                self._streams[s.request_id] = stream
                self._send(wire.Add(s.request_id, wire.pack_prompt(s.prompt_token_ids), s.params, s.cache_salt))
            await stream.accepted()
        except BaseException:
            stream.close()
            raise
        return stream

    def forget(self, request_ids: list[str], abort: bool) -> None:
        """Drops the streams of these requests; `abort` also ends them in the engine."""
        for name in request_ids:
            self._streams.pop(name, None)
        if abort and request_ids and self.dead is None:
            self._send(wire.Abort(request_ids))

    @property
    def num_open(self) -> int:
        return len(self._streams)

    async def stop(self, timeout: float = 10.0) -> None:
        """Ends the engine process, by force after `timeout` seconds."""
        self._stopping = True
        process = getattr(self, "_process", None)
        if process is not None and process.returncode is None:
            if timeout > 0 and self.dead is None:
                self._send(wire.Stop())
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(process.wait(), timeout)
        if process is not None and process.returncode != 0:
            with contextlib.suppress(ProcessLookupError):  # the session holds the workers too
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        for task in self._tasks:
            task.cancel()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
