"""ASGI middleware, which sees a request before its body is read: keys, HEAD, the body limit."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.errors import InvalidApiKey, KeyLimitExceeded
from minisgl.server.anthropic.errors import is_for_anthropic
from minisgl.server.http.access_log import charge_late_prompts, num_tokens
from minisgl.server.http.errors import error_response
from minisgl.server.http.key_salts import KEY_SALT, key_digest
from minisgl.server.http.paths import OPEN_PATHS
from minisgl.server.key_limits import KeyLimits
from minisgl.server.metrics import Metrics

_KEY_DIGEST = "key_digest"  # the name in a request's state


class ApiKey:
    """Requires one of the keys in every request but those for /health.

    A key comes as `Authorization: Bearer KEY` or, from Anthropic's clients, as `X-Api-Key: KEY`, or
    in both, if they are equal. Each header may occur once, with one space behind the scheme.

    Keys are compared byte by byte. Only their digests are kept, and a digest is compared with all
    of them, so that the time it takes says nothing about the keys. A request's state gets the
    digest of its key, and the key's salt if it has one.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], metrics: Metrics, salt_of_key: dict[bytes, bytes]
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._salt_of_key = salt_of_key
        self._digests = [key_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        digest = self._digest_of_key(scope)
        if digest is not None:
            state = scope.setdefault("state", {})
            state[_KEY_DIGEST] = digest
            if digest in self._salt_of_key:
                state[KEY_SALT] = self._salt_of_key[digest]
            await self._app(scope, receive, send)
            return
        error = InvalidApiKey(_header_of_key(scope))
        headers = {"WWW-Authenticate": "Bearer"}
        response = error_response(scope, self._metrics, error, headers)
        await response(scope, receive, send)

    def _digest_of_key(self, scope: Scope) -> bytes | None:
        """The digest of the key that a request brings; None if it brings no known one."""
        key = _key(Headers(scope=scope))
        if key is None:
            return None
        digest = key_digest(key.encode("latin-1"))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest if any(matches) else None


def _key(headers: Headers) -> str | None:
    """The key of a request.

    None if there is none, or another scheme, or more than one: a proxy and this server might read
    different ones.
    """
    own_headers = headers.getlist("x-api-key")
    credentials = headers.getlist("authorization")
    if len(own_headers) > 1 or len(credentials) > 1:
        return None
    keys = {*own_headers, *map(_bearer_key, credentials)}
    return keys.pop() if len(keys) == 1 else None


def _bearer_key(credentials: str) -> str | None:
    scheme, _, key = credentials.partition(" ")
    return key if scheme.lower() == "bearer" else None


def _header_of_key(scope: Scope) -> str:
    """The header in which clients of the API send a key."""
    if is_for_anthropic(scope):
        return "X-Api-Key: KEY"
    return "Authorization: Bearer KEY"


class KeyQuota:
    """Refuses requests above the limits of their key, unread. Only POST counts."""

    def __init__(self, app: ASGIApp, limits: KeyLimits, metrics: Metrics) -> None:
        self._app = app
        self._limits = limits
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        digest = scope.get("state", {}).get(_KEY_DIGEST)
        account = self._limits.account_of(digest) if digest else None
        if account is None or scope.get("method") != "POST":
            await self._app(scope, receive, send)
            return
        try:
            account.open()
        except KeyLimitExceeded as error:
            response = error_response(scope, self._metrics, error)
            await response(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            account.close(num_tokens(scope))
            charge_late_prompts(scope, account.charge)


class HeadAsGet:
    """Answers HEAD as GET (RFC 9110, section 9.3.2). `Connection` leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "HEAD":
            scope["method"] = "GET"
        await self._app(scope, receive, send)


class BodyLimit:
    """Answers a body larger than `max_bytes` with 413, whatever its Content-Length says.

    A body whose Content-Length is larger is refused unread, and a client that asks first (`Expect:
    100-continue`) does not send it. A body that is not complete after `timeout_s` gets a 408, even
    if bytes still come.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            length = int(Headers(scope=scope).get("content-length", "0"))
            receive = _LimitedBody(receive, length, self._max_bytes, self._timeout_s).receive
        await self._app(scope, receive, send)


class _LimitedBody:
    """The messages of one request. Its deadline counts from the request's head.

    Args:
        length: the body's length in bytes, from the head; 0 if it is not given.
    """

    def __init__(self, receive: Receive, length: int, max_bytes: int, timeout_s: float) -> None:
        self._receive = receive
        self._length = length
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._deadline: float | None = asyncio.get_running_loop().time() + timeout_s
        self._num_bytes = 0

    async def receive(self) -> Message:
        """
        Raises:
            HTTPException: the body is too large or too slow.
        """
        self._check_length(self._length)
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(
                408, f"the body did not come within {self._timeout_s:g} s"
            ) from None
        self._num_bytes += len(message.get("body", b""))
        self._check_length(self._num_bytes)
        if not message.get("more_body", False):
            self._deadline = None  # a later message says that the client has gone
        return message

    def _check_length(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise HTTPException(
                413, f"the body is larger than the limit of {self._max_bytes} bytes"
            )
