"""The engine process of the server: one `EngineCore`, fed by messages, stepping as long as there is work.

It sleeps in a poll when idle, dies with its parent, and answers every `Add` with `Added` or `Refused` before the first
token of that request. If the engine ends, `Dead` is the last message.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import traceback
from typing import Any

import zmq

from paraflash.config.engine import Refused as ConfigRefused
from paraflash.config.model import ConfigError
from paraflash.engine import wire
from paraflash.engine.request import RequestRefused
from paraflash.engine.sampling_params import BadField
from paraflash.engine.scheduler import QueueFull
from paraflash.engine.worker import load_factory

logger = logging.getLogger("paraflash.engine")

IDLE_CHECK_S = 1.0  # how often an idle engine looks after its workers
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the call
        os._exit(1)


class EngineLoop:
    """Moves messages between the sockets and a core. `inbox` is a PULL socket, `outbox` a PUSH socket."""

    def __init__(self, core: Any, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]):
        self.core, self.inbox, self.outbox = core, inbox, outbox
        self.stopping = False

    def run(self) -> None:
        while not self.stopping:
            busy = self.core.has_unfinished()
            changed = self._receive(wait=not busy)
            if self.stopping:
                return
            if self.core.has_unfinished():
                deltas = self.core.step()
                self._send(wire.Updates(deltas, self.core.stats()))
            elif changed:
                self._send(wire.Updates([], self.core.stats()))

    def _receive(self, wait: bool) -> bool:
        """Handles all messages that are there; with `wait`, sleeps for the first. True if there were any."""
        if wait and not self.inbox.poll(int(IDLE_CHECK_S * 1000)):
            check = getattr(self.core, "check", None)
            if check is not None:
                check()  # raises if a worker has died
            return False
        changed = False
        while not self.stopping:
            try:
                data = self.inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._handle(wire.decode_to_engine(data))
            changed = True
        return changed

    def _handle(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.Add):
            self._send(self._add(message))
        elif isinstance(message, wire.Abort):
            for request_id in message.request_ids:
                self.core.abort(request_id)
        elif isinstance(message, wire.Stop):
            self.stopping = True

    def _add(self, message: wire.Add) -> wire.Added | wire.Refused:
        name = message.request_id
        try:
            self.core.add_request(
                name, wire.unpack_prompt(message.prompt), message.params, cache_salt=message.cache_salt
            )
        except QueueFull as error:
            return wire.Refused(name, "busy", str(error))
        except (RequestRefused, BadField) as error:
            return wire.Refused(name, "bad", str(error), error.field)
        except ValueError as error:
            return wire.Refused(name, "bad", str(error))
        except Exception as error:  # one request must not end the engine for the others
            logger.exception("request %s could not be added", name)
            return wire.Refused(name, "failed", f"{type(error).__name__}: {error}")
        return wire.Added(name)

    def _send(self, message: wire.FromEngine) -> None:
        self.outbox.send(wire.encode(message))


def _is_refusal(error: BaseException) -> bool:
    """Whether an error of the start is about the settings or the checkpoint: its own sentence says all."""
    from paraflash.checkpoint.files import CheckpointError  # imports torch, which a test's engine does without
    from paraflash.checkpoint.memory import NotEnoughMemory

    return isinstance(error, (ConfigRefused, ConfigError, CheckpointError, NotEnoughMemory))


def main(argv: list[str]) -> int:
    """argv: parent's process id, address to receive from, address to send to, log level."""
    die_with_parent(int(argv[0]))
    # A signal for the whole service must not take the engine away from requests that still run; the parent ends it.
    # Handlers rather than SIG_IGN, which the workers would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    logging.basicConfig(
        level=argv[3], format="%(levelname)s %(asctime)s %(name)s: %(message)s", datefmt="%m-%d %H:%M:%S"
    )
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, address in ((inbox, argv[1]), (outbox, argv[2])):
        socket.set_hwm(0)
        socket.connect(address)
    core = None
    status = 1
    try:
        start = wire.decode_to_engine(inbox.recv())
        if not isinstance(start, wire.Start):
            raise RuntimeError(f"first message is {type(start).__name__}; Start is needed")
        core = load_factory(start.factory)(start.config)
        outbox.send(wire.encode(wire.Ready(core.info(), core.stats())))
        EngineLoop(core, inbox, outbox).run()
        status = 0
    except BaseException as error:
        if core is None and _is_refusal(error):
            outbox.send(wire.encode(wire.Dead(str(error), refused=True)))
        else:
            logger.error("the engine ended:\n%s", traceback.format_exc())
            outbox.send(wire.encode(wire.Dead(f"{type(error).__name__}: {error}")))
    if core is not None:
        try:
            core.shutdown()
        except Exception:
            logger.exception("while shutting down")
    context.destroy(linger=2000)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
