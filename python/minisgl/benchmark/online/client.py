"""One client: its connections, and requests on them.

llhttp (through httptools) parses answers and uvloop reads sockets, because a client must cost less
than the server that it measures. A chunk takes 18 µs of processor time here, and 40 to 60 with
aiohttp.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from minisgl.benchmark.online.records import RequestRecord
from minisgl.benchmark.online.sse import EventReader
from minisgl.errors import ConfigError

_MAX_IDLE_S = 1.0  # servers close idle connections after a few seconds
_MAX_ERROR_BYTES = 300


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server, and options of the requests to it.

    Attributes:
        url: up to and including /v1, without a user, a query or a fragment.
        extra: further fields of each request's body.
        timeout_s: how long a whole answer may take.
    """

    url: str
    model: str
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    has_continuous_usage: bool = False
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not _is_url(self.url):
            raise ConfigError(
                f"--url is {self.url}; it must be http://HOST or https://HOST, which a port and a "
                "path may follow"
            )
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("OPENAI_API_KEY has a character that no header can carry")

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or (443 if self.is_encrypted else 80)

    @property
    def is_encrypted(self) -> bool:
        return urlsplit(self.url).scheme == "https"

    def request(self, prompt: list[int] | str, num_output: int) -> bytes:
        """All bytes of a request for a streamed completion."""
        usage = {"include_usage": True}
        if self.has_continuous_usage:
            usage["continuous_usage_stats"] = True
        body = msgspec.json.encode(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": num_output,
                "stream": True,
                "stream_options": usage,
                **self.extra,
            }
        )
        return self._head(len(body)) + body

    def _head(self, num_bytes: int) -> bytes:
        path = urlsplit(self.url).path.rstrip("/")
        lines = [
            f"POST {path}/completions HTTP/1.1",
            f"Host: {urlsplit(self.url).netloc}",
            "Content-Type: application/json",
            f"Content-Length: {num_bytes}",
        ]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "\r\n"]).encode()


def _is_url(url: str) -> bool:
    """Whether a URL has a host that can be looked up, and no part that would be left out."""
    if not url.isascii() or not url.isprintable() or " " in url:
        return False
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        host.encode("idna")  # as connections do; a UnicodeError for a label of 0 or 64 letters
        is_port = parts.port != 0  # a ValueError beyond 65535
    except ValueError:  # a UnicodeError is one, too
        return False
    has_more = "@" in parts.netloc or "?" in url or "#" in url
    return parts.scheme in ("http", "https") and host != "" and is_port and not has_more


class _HungUp(Exception):
    """The client has read all that it is to read."""


class Client:
    """Sends requests, each on an idle connection or on a new one."""

    def __init__(self, endpoint: Endpoint, origin_s: float) -> None:
        """
        Args:
            origin_s: the start of the load, on the monotonic clock.
        """
        self._endpoint = endpoint
        self._origin_s = origin_s
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if endpoint.is_encrypted else None

    def now_s(self) -> float:
        """The time since the start of the load."""
        return time.monotonic() - self._origin_s

    async def send(self, request: bytes, record: RequestRecord) -> None:
        """Send a request and read its whole answer. Failures go into the record, too."""
        record.sent_s = self.now_s()
        try:
            async with asyncio.timeout(self._endpoint.timeout_s):
                connection = await self._connection()
                await connection.exchange(request, record)
        except _HungUp:
            record.has_hung_up = True
            record.error = None  # of what came later in the same read
        except TimeoutError:
            late = f"no whole answer within {self._endpoint.timeout_s} s"
            record.error = record.error or late  # the server's own words first
        except (OSError, httptools.HttpParserError) as error:
            record.error = record.error or f"{type(error).__name__}: {error}"
        else:
            self._idle.append(connection)
        record.ended_s = self.now_s()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable(self.now_s()):
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self._origin_s),
            self._endpoint.host,
            self._endpoint.port,
            ssl=self._tls,
        )
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


class _Connection(asyncio.Protocol):
    """A connection, with at most one request at a time on it."""

    def __init__(self, origin_s: float) -> None:
        self._origin_s = origin_s
        self._read_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._answer: _Answer | None = None
        self._keeps_alive = True

    def is_usable(self, now_s: float) -> bool:
        is_open = self._transport is not None and not self._transport.is_closing()
        return is_open and self._keeps_alive and now_s - self._read_s < _MAX_IDLE_S

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, request: bytes, record: RequestRecord) -> None:
        """Send a request; return when its answer is complete.

        Raises:
            OSError: the connection has ended before the answer.
            _HungUp: the client has ended it.
            httptools.HttpParserError: the answer is malformed.
        """
        assert self._transport is not None
        self._answer = _Answer(record)
        try:
            self._transport.write(request)
            await self._answer.completed
            self._keeps_alive = self._answer.keeps_alive
        except BaseException:
            self.close()
            raise
        finally:
            self._answer = None

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._read_s = time.monotonic() - self._origin_s
        if self._answer is None:
            self.close()  # nothing was asked
        else:
            self._answer.feed(data, self._read_s)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None:
            self._answer.end(error)


class _Answer:
    """An answer as it comes, which llhttp parses."""

    def __init__(self, record: RequestRecord) -> None:
        self.completed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.keeps_alive = False
        self._record = record
        self._events = EventReader(record)
        self._parser = httptools.HttpResponseParser(self)
        self._read_s = 0.0
        self._status = 0
        self._refusal = b""
        self._says_its_length = False
        self._may_end_with_connection = False

    def feed(self, data: bytes, now_s: float) -> None:
        self._read_s = now_s
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self.fail(ConnectionError(f"the answer is malformed: {error.__context__}"))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(ConnectionError(f"the answer is no HTTP/1.1: {error!r}"))

    def end(self, error: Exception | None) -> None:
        """Handle the end of the connection; some answers end with it (RFC 9112, 6.3)."""
        if error is None and self._may_end_with_connection:
            self.on_message_complete()
        else:
            self.fail(error or ConnectionError("closed before the end of the answer"))

    def fail(self, error: Exception) -> None:
        if not self.completed.done():
            self.completed.set_exception(error)

    # Called by httptools.

    def on_message_begin(self) -> None:
        self._says_its_length = False
        self._may_end_with_connection = False

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: ARG002
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._says_its_length = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._may_end_with_connection = not (self._says_its_length or self._is_interim)

    def on_body(self, data: bytes) -> None:
        if self._status == 200:
            self._events.feed(data, self._read_s)
            self._hang_up_if_enough()
        else:
            self._refusal += data

    def _hang_up_if_enough(self) -> None:
        num_read = self._record.num_read
        if num_read is not None and len(self._record.chunks_s) >= num_read:
            self.fail(_HungUp())

    @property
    def _is_interim(self) -> bool:
        """Whether another answer follows; after a change of protocol none does."""
        return 100 <= self._status < 200 and self._status != 101

    def on_message_complete(self) -> None:
        if self._is_interim:
            return
        if self._record.error is None:
            self._record.error = self._failure()
        self.keeps_alive = self._parser.should_keep_alive()
        if not self.completed.done():
            self.completed.set_result(None)

    def _failure(self) -> str | None:
        """The fault of the whole answer, if it has one."""
        if self._status != 200:
            text = self._refusal[:_MAX_ERROR_BYTES].decode(errors="replace")
            return f"HTTP {self._status}: {text}"
        if not self._events.is_done:
            return "the stream ended without [DONE]"
        num_output = self._record.num_output
        if num_output:
            if self._events.has_chunks:
                return None
            return f"usage counts {num_output} tokens, but no chunk of an answer came"
        if self._record.chunks_s:
            return "tokens came, but no usage counts them"
        return "no token came"
