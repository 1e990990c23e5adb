"""From an error to a response: OpenAI's error object, with a status and the field at fault."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from minisgl.errors import EngineFailed, RequestError
from minisgl.server.http.metrics import Metrics
from minisgl.server.openai.common import ErrorBody, ErrorResponse, error_response

logger = logging.getLogger(__name__)

_CLIENT_CLOSED_REQUEST = 499
_RETRY_AFTER_S = 1


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(RequestError, _on_minisgl_error)
    app.add_exception_handler(EngineFailed, _on_minisgl_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)


@contextmanager
def errors_name_fields(field_of: Callable[[str | None], str | None]) -> Iterator[None]:
    """Errors of the engine name its parameters.

    Replace them with the fields that the client sent.
    """
    try:
        yield
    except RequestError as error:
        if error.status == 400:
            error.param = field_of(error.param)
        raise


def _respond(request: Request, status: int, content: ErrorResponse) -> Response:
    metrics: Metrics = request.app.state.frontend.metrics
    metrics.count_error(content.error.code or f"http_{status}")
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if status == 429 else None
    return JSONResponse(content.model_dump(), status, headers)


async def _on_minisgl_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError | EngineFailed)
    status = 503 if isinstance(error, EngineFailed) else error.status
    return _respond(request, status, error_response(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code in (404, 405):
        message = f"{error.detail} ({request.method} {request.url.path})"
    body = ErrorBody(message=message, type="invalid_request_error")
    return _respond(request, error.status_code, ErrorResponse(error=body))


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _on_bug(request: Request, error: Exception) -> Response:
    logger.error("%s %s fails", request.method, request.url.path, exc_info=error)
    body = ErrorBody(message="internal server error", type="server_error")
    return _respond(request, 500, ErrorResponse(error=body))
