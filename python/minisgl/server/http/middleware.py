"""ASGI middleware, which sees a request before its body is read: counts, keys, the body limit."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.errors import InvalidApiKey
from minisgl.server.http.metrics import Metrics
from minisgl.server.openai.common import error_response

_OPEN_PATHS = {"/health"}


class RequestCount:
    """Counts every response by the path of its route; paths without a route count as "other"."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        def count(status: int) -> None:
            self._metrics.count_request(getattr(scope.get("route"), "path", "other"), status)

        async def count_and_send(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, count_and_send)
        except Exception:  # the handler that answers it runs outside of this middleware
            if not has_started:
                count(500)
            raise


class ApiKey:
    """Requires one of the keys in every request but those for /health: `Authorization: Bearer KEY`.

    Keeps digests of one length and compares with all of them, so that the time it takes says
    nothing about the keys.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = InvalidApiKey()
        self._metrics.count_error(error.code)
        response = JSONResponse(
            error_response(error).model_dump(), error.status, headers={"WWW-Authenticate": "Bearer"}
        )
        await response(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if scope["type"] == "lifespan" or scope["path"] in _OPEN_PATHS:
            return True
        authorization = Headers(scope=scope).get("authorization", "")
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip().encode("latin-1"))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class BodyLimit:
    """Answers a body larger than `max_bytes` with 413, whatever its Content-Length says."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(
                    413, f"the body is larger than the limit of {self._max_bytes} bytes"
                )
            return message

        is_http = scope["type"] == "http"
        await self._app(scope, receive_limited if is_http else receive, send)
