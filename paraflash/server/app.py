"""The routes, and what stands before them: request ids, API keys, the size limit of bodies, errors as JSON."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paraflash import __version__
from paraflash.server.chat import Chat
from paraflash.server.completions import Completion
from paraflash.server.errors import ApiError, bad_request, error_response, json_response, validation_error
from paraflash.server.protocol import ChatFields, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from paraflash.server.respond import ClientGone, EventStream, error_of, until_disconnect
from paraflash.server.state import ServerState
from paraflash.server.status import page, snapshot

_OPEN_PATHS = {"/health", "/ping", "/version", "/metrics", "/load", "/", "/status.json"}
_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class Gate:
    """Before every route: gives the request its id, asks for the API key, and limits the body."""

    def __init__(self, app: ASGIApp, state: ServerState):
        self.app, self.state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(raw=message["headers"])["x-request-id"] = request_id
            await send(message)

        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, send_with_id)
            return
        await self._limited(scope, receive, send_with_id)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        keys = self.state.options.api_keys
        if keys and scope["path"] not in _OPEN_PATHS and scope["method"] != "OPTIONS":
            scheme, _, given = headers.get("authorization", "").partition(" ")
            # Every key is compared, so that the time taken tells nothing.
            right = [hmac.compare_digest(given.encode("latin-1"), key.encode()) for key in keys]
            if scheme.lower() != "bearer" or not any(right):
                return json_response({"error": "Unauthorized"}, 401, {"WWW-Authenticate": "Bearer"})
        length = headers.get("content-length", "")
        if (
            length.isascii()
            and length.isdigit()
            and len(length) < 20
            and int(length) > self.state.options.max_body_bytes
        ):
            return self._too_large()
        return None

    def _too_large(self) -> Response:
        limit = self.state.options.max_body_bytes
        return error_response(ApiError(413, f"the body is larger than {limit} bytes (--max-body-bytes)"))

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A body of unknown length is counted as it comes; past the limit the route never sees the rest."""
        received, answered, too_large = 0, False, False

        async def limited_receive() -> Message:
            nonlocal received, too_large
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self.state.options.max_body_bytes:
                    too_large = True
                    return {"type": "http.disconnect"}
            return message

        async def guarded_send(message: Message) -> None:
            nonlocal answered
            if too_large and not answered:
                return  # the route's reaction to the disconnect; ours follows
            answered = True
            await send(message)

        try:
            await self.app(scope, limited_receive, guarded_send)
        except Exception:
            if not too_large:
                raise
        if too_large and not answered:
            await self._too_large()(scope, receive, send)


class _CheckedRequest(Request):
    """Refuses text with half a surrogate pair, wherever it is: it is no Unicode text, and no UTF-8 can hold it."""

    async def json(self) -> Any:
        body = await super().json()
        if b"\\ud" in (await self.body()).lower():
            try:
                json.dumps(body, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                raise bad_request("the body has a string with half a surrogate pair (\\ud800 to \\udfff)") from None
        return body


class _CheckedRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            return await handle(_CheckedRequest(request.scope, request.receive))

        return checked


def build_app(state: ServerState) -> Any:
    """The ASGI application."""
    app = FastAPI(
        title="paraflash", version=__version__, docs_url=None, redoc_url=None, default_response_class=Response
    )
    app.router.route_class = _CheckedRoute
    _add_error_handlers(app)
    _add_generation_routes(app, state)
    _add_token_routes(app, state)
    _add_operation_routes(app, state)
    return Gate(app, state)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(validation_error(error, request.headers.get("content-type", "")))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        detail = str(error.detail)
        if error.status_code == 404:
            detail = f"there is no {request.url.path[:200]}"
        elif error.status_code == 400:
            cause = error.__cause__
            detail = cause.message if isinstance(cause, ApiError) else "the body could not be read as JSON"
        return error_response(ApiError(error.status_code, detail), error.headers)

    @app.exception_handler(Exception)
    async def on_other(request: Request, error: Exception) -> Response:
        return error_response(error_of(error))


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {}}}
    for status, text in {
        400: "The request is wrong; `param` names the field.",
        401: "The API key is missing or wrong.",
        404: "No such model.",
        413: "The body is too large.",
        415: "The body is no JSON.",
        500: "A fault of the server.",
        503: "The queue is full, or the server is ending.",
    }.items()
}


def _add_generation_routes(app: FastAPI, state: ServerState) -> None:
    async def run(job: Completion | Chat, http: Request) -> Response:
        state.note_unknown(job.request.model_extra)
        try:
            state.check_open()
            await until_disconnect(http, job.start())
            if job.request.stream:
                return EventStream(job.stream(), job.generation.close)
            try:
                return json_response(await until_disconnect(http, job.answer()))
            finally:
                job.generation.close()
        except ClientGone:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            return error_response(error_of(error))

    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(body: CompletionRequest, http: Request) -> Response:
        try:
            job = Completion(state, body, http.state.request_id)
        except ApiError as error:
            return error_response(error)
        return await run(job, http)

    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat(body: ChatRequest, http: Request) -> Response:
        try:
            job = Chat(state, body, http.state.request_id)
        except ApiError as error:
            return error_response(error)
        return await run(job, http)

    @app.get("/v1/models", responses={401: _ERRORS[401]})
    async def models() -> Response:
        cards = [
            {
                "id": name,
                "object": "model",
                "created": int(state.started),
                "owned_by": "paraflash",
                "root": state.engine.config.model,
                "parent": None,
                "max_model_len": state.limits.max_model_len,
            }
            for name in state.options.served_names
        ]
        return json_response({"object": "list", "data": cards})


def _add_token_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/tokenize", responses=_ERRORS)
    async def tokenize(body: TokenizeRequest) -> Response:
        try:
            state.check_model(body.model)
            if (body.prompt is None) == (body.messages is None):
                raise bad_request("exactly one of prompt and messages is needed", "prompt")
            if body.messages is not None:
                fields = body.model_dump(
                    exclude={"prompt", "add_special_tokens", "return_token_strs", "model"}, exclude_none=True
                )
                ids = (await state.chat.prepare(ChatFields.model_validate(fields))).prompt_token_ids
            else:
                ids = await state.tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)
        except ApiError as error:
            return error_response(error)
        strings = [state.tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
        return json_response(
            {"count": len(ids), "max_model_len": state.limits.max_model_len, "tokens": ids, "token_strs": strings}
        )

    @app.post("/detokenize", responses=_ERRORS)
    async def detokenize(body: DetokenizeRequest) -> Response:
        try:
            state.check_model(body.model)
            if body.tokens and max(body.tokens) >= state.limits.vocab_size:
                raise bad_request(f"tokens: ids from 0 to {state.limits.vocab_size - 1} are allowed", "tokens")
        except ApiError as error:
            return error_response(error)
        return json_response({"prompt": await asyncio.to_thread(state.tokenizer.decode, body.tokens)})


def _add_operation_routes(app: FastAPI, state: ServerState) -> None:
    def health() -> Response:
        return Response(status_code=200 if state.engine.dead is None and not state.draining else 503)

    for path, method in (("/health", "GET"), ("/ping", "GET"), ("/ping", "POST")):
        app.add_api_route(path, health, methods=[method], responses={503: _ERRORS[503]})

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/load")
    async def load() -> Response:
        return json_response({"server_load": state.engine.num_open})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/status.json")
    async def status_json() -> Response:
        return json_response(snapshot(state, time.time()))

    @app.get("/", include_in_schema=False)
    async def status_page() -> Response:
        return Response(page(), media_type="text/html")
