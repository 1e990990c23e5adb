"""From an error to a response: a status, and the error object of the API whose path it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from minisgl.errors import ClientGone, EngineFailed, RequestError
from minisgl.server.answers.errors import ErrorBody, ErrorResponse, error_response
from minisgl.server.anthropic.errors import PATH as ANTHROPIC_PATH
from minisgl.server.anthropic.errors import error_object
from minisgl.server.http.access_log import CLIENT_CLOSED_REQUEST, note_error, record_of, route_of
from minisgl.server.metrics import Metrics

logger = logging.getLogger(__name__)


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(RequestError, _on_minisgl_error)
    app.add_exception_handler(EngineFailed, _on_minisgl_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(ClientGone, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)


@contextmanager
def errors_name_fields(field_of: Callable[[str | None], str | None]) -> Iterator[None]:
    """Errors of the engine name its parameters.

    Replace them with the fields that the client sent.
    """
    try:
        yield
    except RequestError as error:
        error.name_field(field_of)
        raise


def methods_of_path(routes: Iterable[BaseRoute]) -> dict[str, str]:
    """The methods of all routes of a path, as `Allow` has them. HEAD goes with GET."""
    methods: dict[str, set[str]] = {}
    for route in routes:
        if isinstance(route, Route) and route.methods:
            methods.setdefault(route.path, set()).update(route.methods)
    for names in methods.values():
        if "GET" in names:
            names.add("HEAD")
    return {path: ", ".join(sorted(names)) for path, names in methods.items()}


def error_content(scope: Scope, error: ErrorBody, status: int) -> dict[str, Any]:
    """The body of a response, in OpenAI's form but for the paths of Anthropic's API."""
    if scope["path"].startswith(ANTHROPIC_PATH):
        return error_object(error, status, record_of(scope).request_id)
    return ErrorResponse(error=error).model_dump()


def retry_after(seconds: int) -> dict[str, str]:
    """The header of an answer that tells its client to try again."""
    return {"Retry-After": str(seconds)}


def _respond(
    request: Request,
    status: int,
    error: ErrorBody,
    headers: Mapping[str, str] | None = None,
) -> Response:
    metrics: Metrics = request.app.state.frontend.metrics
    code = error.code or f"http_{status}"
    metrics.count_error(code)
    note_error(request.scope, code)
    return JSONResponse(error_content(request.scope, error, status), status, headers)


async def _on_minisgl_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError | EngineFailed)
    body = error_response(error).error
    if isinstance(error, EngineFailed):
        return _respond(request, 503, body, retry_after(RequestError.retry_after_s))
    headers = retry_after(error.retry_after_s) if error.status in (429, 503) else None
    return _respond(request, error.status, body, headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    headers = dict(error.headers or {})
    if error.status_code in (404, 405):
        message = f"{error.detail} ({request.method} {request.url.path})"
    if error.status_code == 405:
        given = sorted(headers.get("Allow", "").split(", "))
        allowed = request.app.state.methods_of_path.get(route_of(request.scope), ", ".join(given))
        headers["Allow"] = allowed
        message = f"{message}; allowed: {allowed}"
    body = ErrorBody(message=message, type="invalid_request_error")
    return _respond(request, error.status_code, body, headers)


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_bug(request: Request, error: Exception) -> Response:
    logger.error("%s %s fails", request.method, request.url.path, exc_info=error)
    body = ErrorBody(message="internal server error", type="server_error")
    return _respond(request, 500, body)
