"""Whatever goes wrong, as the one form OpenAI's clients understand: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from moesaic.errors import UserError
from moesaic.serve.api.wrong_field import wrong_field
from moesaic.serve.core.engine_loop import ReplicaDied
from moesaic.serve.core.request import TooLong

logger = logging.getLogger("moesaic.serve")

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_unavailable_error",
}


class ErrorFacts(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    error: ErrorFacts


class ApiError(Exception):
    """A request that cannot be answered as it was meant."""

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
        self.answer = ErrorAnswer(
            error=ErrorFacts(message=message, type=TYPES.get(status, "invalid_request_error"), param=param, code=code)
        )

    def response(self) -> JSONResponse:
        return JSONResponse(self.answer.model_dump(), self.status, headers=self.headers)


def api_error(error: BaseException) -> ApiError:
    """Any exception as the answer to give; what nobody foresaw is logged, and not told."""
    match error:
        case ApiError():
            return error
        case UserError():
            # Places that are files of this machine are not the client's business.
            named = "/" not in error.place
            text = str(error) if named else f"{error.problem}. {error.remedy}".strip()
            code = "context_length_exceeded" if isinstance(error, TooLong) else "invalid_value"
            return ApiError(400, text, param=error.place if named else None, code=code)
        case RequestValidationError():
            place, problem, code = wrong_field(error.errors(), error.body)
            return ApiError(400, f"{place}: {problem}" if place else problem, param=place or None, code=code)
        case HTTPException():
            return _http(error)
        case ReplicaDied():
            return ApiError(503, str(error), code="replica_died", headers={"retry-after": "1"})
        case TimeoutError():
            return ApiError(408, "the request took longer than this server allows", code="timeout")
    logger.error("internal error", exc_info=error)
    return ApiError(500, "internal error", code="internal_error")


@contextmanager
def called(names: Callable[[str], str]) -> Iterator[None]:
    """Errors name what is wrong as the client does, not as whoever found it."""
    try:
        yield
    except UserError as error:
        error.place = names(error.place)
        raise


def install(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> JSONResponse:
        return api_error(error).response()

    for kind in (ApiError, UserError, RequestValidationError, HTTPException, TimeoutError, Exception):
        app.add_exception_handler(kind, answer)


def _http(error: HTTPException) -> ApiError:
    """What the framework itself refuses: routes, methods, unreadable bodies."""
    codes = {404: "unknown_route", 405: "method_not_allowed"}
    messages = {
        404: "no such route (those of OpenAI's API begin with /v1)",
        405: "this route does not take this method",
    }
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, code=codes.get(error.status_code, "bad_request"), headers=error.headers)
