"""Every error as the clients of its route expect it: OpenAI's {"error": {"message", "type", "param", "code"}}, and
below the paths of another dialect that dialect's own form (`FORMS`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from moesaic.errors import UserError
from moesaic.serve.api.request_id import REQUEST_ID
from moesaic.serve.core.engine_loop import WorkerDied
from moesaic.serve.core.request import TooLong
from moesaic.strict import EXPECTED, either, sentence

Translation = TypeVar("Translation", bound=BaseModel)

logger = logging.getLogger("moesaic.serve")

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_unavailable_error",
}
# Kinds of validation error that only say that a value is none of the types that were tried.
TYPE_MISMATCH = {*EXPECTED, "missing", "literal_error", "union_tag_invalid", "union_tag_not_found"}


class TooLarge(TooLong):
    """A text so long that it is refused by its size, before anything is done with it."""


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    error: ErrorInfo


# The error responses of every route, for the OpenAPI document.
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "An error in the request, with its message."},
    503: {"model": ErrorResponse, "description": "The server is shutting down."},
}


class ApiError(Exception):
    """An error with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body = ErrorResponse(
            error=ErrorInfo(message=message, type=TYPES.get(status, "invalid_request_error"), param=param, code=code)
        )

    def content(self, path: str) -> dict[str, Any]:
        """The body of the response to a request for `path`."""
        form = next((form for prefix, form in FORMS if path.startswith(prefix)), openai_form)
        return form(self.status, self.body.error)

    def response(self, path: str = "") -> JSONResponse:
        return JSONResponse(self.content(path), self.status, headers=self.headers)


def openai_form(status: int, error: ErrorInfo) -> dict[str, Any]:
    return {"error": error.model_dump()}


def anthropic_form(status: int, error: ErrorInfo) -> dict[str, Any]:
    """The types are fewer, and one of them is another's name."""
    types = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
    types |= {429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error"}
    kind = types.get(status, "api_error" if status >= 500 else "invalid_request_error")
    # Its clients replay a thread that is gone.
    more = {"details": {"error_code": error.code}} if (error.code or "").startswith("thread_") else {}
    return {"type": "error", "error": {"type": kind, "message": error.message, **more}}


def ollama_form(status: int, error: ErrorInfo) -> dict[str, Any]:
    return {"error": error.message}


def llamacpp_form(status: int, error: ErrorInfo) -> dict[str, Any]:
    kind = {501: "not_supported_error", 503: "unavailable_error"}.get(status, error.type)
    return {"error": {"code": status, "message": error.message, "type": kind}}


# By how a path begins; all others: OpenAI's.
FORMS: tuple[tuple[str, Callable[[int, ErrorInfo], dict[str, Any]]], ...] = (
    ("/v1/messages", anthropic_form),
    ("/api/", ollama_form),
    ("/completion", llamacpp_form),
    ("/infill", llamacpp_form),
    ("/props", llamacpp_form),
    ("/slots", llamacpp_form),
    ("/embedding", llamacpp_form),
    ("/lora-adapters", llamacpp_form),
)


def api_error(error: BaseException) -> ApiError:
    """Any exception as the error to send; an unexpected one is logged, and its details are not sent."""
    match error:
        case ApiError():
            return error
        case UserError():
            # The client learns nothing about files of this machine.
            named = "/" not in error.place
            text = str(error) if named else f"{error.problem}. {error.remedy}".strip()
            code = "context_length_exceeded" if isinstance(error, TooLong) else "invalid_value"
            status = 413 if isinstance(error, TooLarge) else 400
            return ApiError(status, text, param=error.place if named else None, code=code)
        case RequestValidationError():
            place, problem, code = invalid_field(error.errors(), error.body)
            return ApiError(400, f"{place}: {problem}" if place else problem, param=place or None, code=code)
        case HTTPException():
            return _http(error)
        case WorkerDied():
            return ApiError(503, str(error), code="worker_died", headers={"retry-after": "1"})
        case TimeoutError():
            return ApiError(408, "the request took longer than this server allows", code="timeout")
    logger.error("internal error (request %s)", REQUEST_ID.get() or "unknown", exc_info=error)
    return ApiError(500, "internal error", code="internal_error")


def install(app: FastAPI) -> None:
    async def handle(request: Request, error: Exception) -> JSONResponse:
        return api_error(error).response(request.scope["path"])

    for kind in (ApiError, UserError, RequestValidationError, HTTPException, TimeoutError, Exception):
        app.add_exception_handler(kind, handle)


def _http(error: HTTPException) -> ApiError:
    """An error of the framework itself: unknown routes and methods, unreadable bodies."""
    codes = {404: "unknown_route", 405: "method_not_allowed"}
    messages = {
        404: "no such route (those of OpenAI's API begin with /v1)",
        405: "this route does not take this method",
    }
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, code=codes.get(error.status_code, "bad_request"), headers=error.headers)


def invalid_field(problems: Sequence[Any], body: Any) -> tuple[str, str, str]:
    """Which field of a request is invalid, by the name the client gave it, what is wrong with it, and the error's code.

    Where a field may have one of several types, each reports why it did not match. An error of a type that matched but
    for its bounds is the most specific one; otherwise the error that is deepest in the value is.
    """
    if problems[0]["type"] == "json_invalid":
        return "", f"the body is not JSON ({problems[0].get('ctx', {}).get('error', '')})", "invalid_json"
    if not isinstance(body, dict) and problems[0]["loc"][:1] == ("body",):
        return "", "the body must be a JSON object, sent with Content-Type: application/json", "invalid_type"
    paths = [_path(problem, body) for problem in problems]
    _, best = max(zip(problems, paths), key=lambda each: (each[0]["type"] not in TYPE_MISMATCH, len(each[1])))
    own = [problem for problem, path in zip(problems, paths) if path == best]
    chosen = next((problem for problem in own if problem["type"] not in TYPE_MISMATCH), None)
    chosen = chosen or next((problem for problem in own if problem["type"] not in EXPECTED), None)
    chosen = chosen or reduce(either, {EXPECTED[problem["type"]]: problem for problem in own}.values())
    code = "missing_required_parameter" if chosen["type"] == "missing" else "invalid_value"
    return ".".join(best), sentence(chosen), code


def translated(kind: type[Translation], fields: dict[str, Any]) -> Translation:
    """A request of another dialect as one of ours. What the other's schema allows and ours does not is the client's
    error, and no failure of the server."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors(include_url=False)]
        place, problem, _ = invalid_field(problems, fields)
        raise UserError(place, problem) from None


def _path(problem: Any, body: Any) -> tuple[str, ...]:
    """Where in the body a validation error is, without the names of the types that were tried there."""
    location = problem["loc"]
    if location[0] != "body":
        return tuple(str(part) for part in location)
    found: list[str] = []
    at = body
    for part in location[1:]:
        if part in (range(len(at)) if isinstance(at, list) else at if isinstance(at, dict) else ()):
            at = at[part]
            found.append(str(part))
    match problem["type"]:
        case "missing":
            found.append(str(location[-1]))
        case "union_tag_invalid" | "union_tag_not_found":
            found.append("type")
    return tuple(found)
