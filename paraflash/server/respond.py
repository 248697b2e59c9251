"""How answers leave: server-sent events, and work that stops at once when its client hangs up.

Both watch `http.disconnect` themselves, whether the answer is streamed or not, and cancel the work; cancelling closes
the engine stream, which aborts the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paraflash.server.errors import ApiError, as_api_error, error_body, json_bytes

logger = logging.getLogger("paraflash.server")
T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed its connection."""


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises `ClientGone` when the client hangs up first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(task, watch)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


def event(body: Any) -> bytes:
    return b"data: " + json_bytes(body) + b"\n\n"


def error_of(error: Exception) -> ApiError:
    """The error to show; one that we do not know is logged and becomes a 500."""
    known = as_api_error(error)
    if known is None:
        logger.error("request failed", exc_info=error)
        return ApiError(500, "internal error; the server's log has the details")
    return known


class EventStream(Response):
    """Sends `events`, which are ready-made SSE bytes; an exception in them becomes an error event, then [DONE]."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]):
        """`close` frees what the events come from; it is called at the end, whether they were read or not."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # not known
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.ensure_future(self._send_all(send))
        watch = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        except OSError:
            pass  # the client hung up while we wrote
        finally:
            await _cancel(task, watch)
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except OSError:
            raise
        except Exception as error:
            data = event(error_body(error_of(error))) + DONE
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
