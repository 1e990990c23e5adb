"""The server that is attacked, as a client sees it: requests, raw bytes, and answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Server:
    """A server, its model and its limits.

    Attributes:
        context: tokens of the model's context.
        max_open: requests that may be open.
    """

    host: str
    port: int
    model: str
    api_key: str | None = None
    context: int = 4096
    max_open: int = 2048

    def connect(self, timeout_s: float) -> HTTPConnection:
        return HTTPConnection(self.host, self.port, timeout=timeout_s)

    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": _JSON}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers

    def post(self, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Send a body on a connection of its own; return the status and the answer."""
        connection = self.connect(timeout_s)
        try:
            response = _send(connection, path, body, self.headers())
            return response.status, response.read()
        finally:
            connection.close()

    def body(self, **fields: Any) -> bytes:
        """A body of JSON, with the model's name."""
        return json.dumps({"model": self.model, **fields}).encode()


def _send(
    connection: HTTPConnection, path: str, body: bytes, headers: dict[str, str]
) -> HTTPResponse:
    with suppress(BrokenPipeError, ConnectionResetError):  # it may answer before it has read all
        connection.request("POST", path, body, headers)
    return connection.getresponse()


@dataclass(frozen=True, slots=True)
class Target:
    """A server under attack.

    Attributes:
        report: gets every status that comes back, or the name of the error in its place.
        duration_s: the duration of an attack that does not end by itself.
        timeout_s: how long a client waits for an answer.
    """

    server: Server
    report: Callable[[str], None]
    duration_s: float = 5.0
    timeout_s: float = 60.0

    def post(self, path: str, body: bytes) -> None:
        try:
            status, _ = self.server.post(path, body, self.timeout_s)
            self.report(str(status))
        except (OSError, HTTPException) as error:
            self.report(type(error).__name__)

    def post_all(self, path: str, bodies: Iterable[bytes], at_once: int) -> None:
        """Post every body, at most `at_once` of them at a time."""
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(partial(self.post, path), bodies))

    def open_socket(self) -> socket.socket:
        return socket.create_connection((self.server.host, self.server.port), self.timeout_s)

    def head(self, path: str, num_bytes: int, *, has_key: bool = True) -> bytes:
        """The head of a request whose body has `num_bytes`."""
        headers = self.server.headers()
        if not has_key:
            headers.pop("Authorization", None)
        headers |= {"Host": self.server.host, "Content-Length": str(num_bytes)}
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items())]
        return "\r\n".join([*lines, "\r\n"]).encode()
