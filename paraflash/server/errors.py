"""Errors as OpenAI's JSON: `{"error": {"message", "type", "param", "code"}}` with the matching HTTP status.

Whatever goes wrong with a request becomes an `ApiError` here; what is left over is a fault of ours and gives 500.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from paraflash.engine.client import EngineGone, NotTaken
from paraflash.engine.sampling_params import BadField

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "BadRequestError",
    415: "BadRequestError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
_MAX_SHOWN = 200  # characters of a user's value that an error repeats


class ApiError(Exception):
    """An answer that is an error. `param` names the field of the request that is at fault."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param = status, message, param


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param)


def error_body(error: ApiError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "InternalServerError" if error.status >= 500 else "BadRequestError")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.status}}


def json_bytes(body: Any) -> bytes:
    """UTF-8 JSON. Lone surrogates, which UTF-8 cannot hold, are replaced; NaN and infinities are not allowed."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(body), status, headers, media_type="application/json")


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    retry = {"Retry-After": "1"} if error.status in (429, 503) else {}
    return json_response(error_body(error), error.status, {**retry, **(headers or {})})


def shorten(value: Any) -> str:
    """A user's value for an error message, cut to a bearable length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def first_line(reason: object) -> str:
    """What clients are told of the engine's end; the traceback is for the log."""
    return str(reason).strip().partition("\n")[0].rstrip(":")


def as_api_error(error: BaseException) -> ApiError | None:
    """The answer for an exception of the engine's side; None if it is none that we know."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadField):
        return bad_request(f"{error.field} is {shorten(error.value)}; {error.allowed} is needed", error.field)
    if isinstance(error, NotTaken):
        return ApiError({"bad": 400, "busy": 503}.get(error.kind, 500), str(error), error.field)
    if isinstance(error, EngineGone):
        return ApiError(503, f"the engine is not available: {first_line(error)}")
    return None


def validation_error(error: RequestValidationError, content_type: str) -> ApiError:
    """The first faulty field that pydantic found, with its path as `param`."""
    found = error.errors()
    # Each alternative of a union reports its own fault: the value is nearest to the one that got furthest into it, and
    # to one that a range refuses rather than a type.
    same = [e for e in found if e.get("loc", ())[:2] == found[0].get("loc", ())[:2]]
    first = max(same, key=lambda e: (not e["type"].endswith("_type"), _depth(e)))
    where = [str(part) for part in first.get("loc", ()) if part != "body"]
    if first.get("type") == "json_invalid":
        return bad_request(f"the body is not valid JSON: {first.get('ctx', {}).get('error', first.get('msg'))}")
    if not where:
        if "json" not in content_type:
            given = shorten(content_type) if content_type else "missing"
            return ApiError(415, f"Content-Type is {given}; application/json is needed")
        return bad_request("the body must be one JSON object")
    # A union of types reports each alternative with its name appended; the field itself is what stands before it.
    path = ".".join(part for part in where if _is_field(part))
    message = f"{path}: {first.get('msg', 'not valid')}"
    if "input" in first and first.get("type") != "missing":
        message += f" (got {shorten(first['input'])})"
    return bad_request(message, path)


_ALTERNATIVES = {"str", "int", "float", "bool", "dict", "constrained-int", "constrained-str", "NamedTool"}


def _is_field(part: str) -> bool:
    return not (part.endswith("]") or part in _ALTERNATIVES)


def _depth(fault: Any) -> int:
    return sum(_is_field(str(part)) for part in fault.get("loc", ()))
