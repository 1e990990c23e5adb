"""What stands before the routes: ASGI middleware, which sees a request before its body is read."""

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
from minisgl.server.openai.builder import error_response

_OPEN_PATHS = {"/health"}


class RequestCount:
    """Counts every response by the route that gave it, as the routes are written; the rest is one more route."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        def count(status: int) -> None:
            self._metrics.count_request(getattr(scope.get("route"), "path", "other"), status)

        async def counted(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:  # what answers it stands before this
            if not has_begun:
                count(500)
            raise


class ApiKey:
    """Every request but those for the server's health brings one of the keys: `Authorization: Bearer KEY`.

    Keeps digests, which are all of one length, and compares with every one of them: the time it takes tells nothing.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "lifespan"
            or scope["path"] in _OPEN_PATHS
            or self._is_allowed(Headers(scope=scope))
        ):
            await self._app(scope, receive, send)
            return
        error = InvalidApiKey()
        self._metrics.count_error(error.code)
        response = JSONResponse(
            error_response(error).model_dump(), error.status, headers={"WWW-Authenticate": "Bearer"}
        )
        await response(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1"))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class BodyLimit:
    """A body larger than max_bytes is a 413, whatever its header says."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(
                    413, f"the body is larger than the limit of {self._max_bytes} bytes"
                )
            return message

        await self._app(scope, limited if scope["type"] == "http" else receive, send)
