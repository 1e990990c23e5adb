"""From an error to a response: a status, and the error object of the API that was asked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from minisgl.errors import ClientGone, EngineFailed, RequestError
from minisgl.server.answers.errors import ErrorBody, ErrorResponse, error_body
from minisgl.server.anthropic.errors import error_object, is_for_anthropic
from minisgl.server.http.access_log import CLIENT_CLOSED_REQUEST, note_error, record_of, route_of
from minisgl.server.metrics import Metrics

logger = logging.getLogger(__name__)

_LOGGED = "(logged with the id of its request)"  # a note of a bug


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(RequestError, _on_minisgl_error)
    app.add_exception_handler(EngineFailed, _on_minisgl_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(ClientGone, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)


@contextmanager
def errors_name_fields(field_of: Callable[[str | None], str | None]) -> Iterator[None]:
    """Replace the engine's parameters in errors with the fields that the client sent."""
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


def error_response(
    scope: Scope,
    metrics: Metrics,
    error: RequestError | EngineFailed,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The response to a request that ends with one of our errors.

    A 429 and a 503 say in `Retry-After` when to try again. The error is counted and logged.
    """
    given = dict(headers or {})
    if error.status in (429, 503):
        given["Retry-After"] = str(error.retry_after_s)
    return _response(scope, metrics, error.status, error_body(error), given)


def _response(
    scope: Scope, metrics: Metrics, status: int, error: ErrorBody, headers: Mapping[str, str]
) -> Response:
    """An error in OpenAI's form, but for clients of Anthropic's API."""
    code = error.code or f"http_{status}"
    metrics.count_error(code)
    note_error(scope, code)
    if is_for_anthropic(scope):
        content = error_object(error, status, record_of(scope).request_id)
    else:
        content = ErrorResponse(error=error).model_dump()
    return JSONResponse(content, status, headers)


def _metrics_of(request: Request) -> Metrics:
    metrics: Metrics = request.app.state.frontend.metrics
    return metrics


async def _on_minisgl_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError | EngineFailed)
    return error_response(request.scope, _metrics_of(request), error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    target = _without_last_slash(request)
    if error.status_code == 404 and target is not None:
        return RedirectResponse(target)
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
    return _response(request.scope, _metrics_of(request), error.status_code, body, headers)


def _without_last_slash(request: Request) -> str | None:
    """The path of a route to which a slash was added, relative to the one with the slash.

    A proxy before this server may have another scheme, another host and a longer path.
    """
    path = request.scope["raw_path"].decode("latin-1")  # `..` does not leave an encoded slash
    route = path.removesuffix("/")
    if route == path or route not in request.app.state.methods_of_path:
        return None
    target = "../" + route.rpartition("/")[2]
    query = request.scope["query_string"].decode("latin-1")
    return f"{target}?{query}" if query else target


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_bug(request: Request, error: Exception) -> Response:
    request_id = record_of(request.scope).request_id
    message = "%s %s fails, request_id=%s"
    logger.error(message, request.method, request.url.path, request_id, exc_info=error)
    error.add_note(_LOGGED)
    body = ErrorBody(message="internal server error", type="server_error")
    return _response(request.scope, _metrics_of(request), 500, body, {})


def was_logged(error: Exception) -> bool:
    """Whether an error is a bug that was logged before it was answered."""
    return _LOGGED in getattr(error, "__notes__", ())
