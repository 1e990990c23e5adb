"""`benchmark/stress/faults.py`: its clients come back when the server says so."""

from __future__ import annotations

import json
import runpy
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from minisgl.benchmark.stress.target import Server

FAULTS = Path(__file__).parents[2] / "benchmark" / "stress" / "faults.py"


class Refusing(BaseHTTPRequestHandler):
    """Refuses the first requests for as many seconds as it is told, and ends streams then."""

    retry_after: list[str]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.retry_after:
            body = json.dumps({"error": {}}).encode()
            self.send_response(503)
            self.send_header("Retry-After", self.retry_after.pop(0))
        else:
            body = b"data: [DONE]\n\n"
            self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """It says nothing."""


def test_clients_wait_as_the_server_says_and_never_long(monkeypatch: pytest.MonkeyPatch) -> None:
    module = runpy.run_path(str(FAULTS))
    handler = type("Handler", (Refusing,), {"retry_after": ["1", "0", "60"]})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        clients = module["Clients"](Server("127.0.0.1", server.server_port, "m"))
        waits: list[float] = []

        def wait(timeout_s: float) -> bool:
            waits.append(timeout_s)
            return len(waits) == 3

        monkeypatch.setattr(clients.is_over, "wait", wait)
        monkeypatch.setattr(clients.is_over, "is_set", lambda: len(waits) == 3)
        clients.read_streams()
        server.shutdown()
    assert waits == [1.0, 0.1, 2.0]
    assert clients.outcomes["told"] == 3
