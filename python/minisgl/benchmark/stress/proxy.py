"""A minimal reverse proxy: a request goes to one server, or to the next if that cannot take it.

It does what a proxy has to do for a rolling restart. If a server refuses the connection, closes it
before it answers, or answers with 503, the request is sent to the next one. An answer that has
begun is passed on as it comes. It has no limits, so it must not face untrusted clients.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Self

_TIMEOUT_S = 600.0
_MAX_READ = 1 << 16
_PASSED_HEADERS = ("Content-Type", "Retry-After", "X-Request-Id")


class Proxy(ThreadingHTTPServer):
    """Serves on a free port of this machine, from the beginning of a `with` block to its end.

    Args:
        hosts: of the servers, with their ports.

    Attributes:
        num_sent_again: requests that a server did not take.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, hosts: Sequence[str], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.num_sent_again = 0
        self._hosts = list(hosts)
        self._turn = count()

    @property
    def host(self) -> str:
        """Its own address and port."""
        return f"127.0.0.1:{self.server_port}"

    def hosts_in_turn(self) -> list[str]:
        """All servers, beginning with a different one each time."""
        first = next(self._turn) % len(self._hosts)
        return self._hosts[first:] + self._hosts[:first]

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_GET(self) -> None:
        self._pass(None)

    def do_POST(self) -> None:
        self._pass(self.rfile.read(int(self.headers["Content-Length"])))

    def log_message(self, *_arguments: object) -> None:
        """Write nothing."""

    def _pass(self, body: bytes | None) -> None:
        for host in self.server.hosts_in_turn():
            with closing(HTTPConnection(host, timeout=_TIMEOUT_S)) as connection:
                try:
                    connection.request(self.command, self.path, body, dict(self.headers))
                    response = connection.getresponse()
                except (OSError, HTTPException):
                    self.server.num_sent_again += 1
                    continue
                if response.status != 503:
                    self._answer(response)
                    return
                self.server.num_sent_again += 1
        self.send_error(503, "no server takes requests")

    def _answer(self, response: HTTPResponse) -> None:
        self.send_response(response.status)
        for name in _PASSED_HEADERS:
            if name in response.headers:
                self.send_header(name, response.headers[name])
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            while part := response.read1(_MAX_READ):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        except (OSError, HTTPException):
            self.close_connection = True  # without a last chunk: the answer is cut off
            return
        if response.isclosed() or response.length == 0:
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.close_connection = True
