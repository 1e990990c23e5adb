"""uvicorn's server, with this package's connections.

Accepts a few connections at a time, so that a flood of them does not delay other clients, and
limits the log records that clients can cause. When no file descriptor is left, asyncio pauses
accepting for a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn
from fastapi import FastAPI

from minisgl.processes.shared_numbers import SharedNumbers
from minisgl.server.capacity import BACKLOG
from minisgl.server.http.connection import Connection
from minisgl.server.http.connection_table import ConnectionLimits, ConnectionTable
from minisgl.utils.logger import limit_repeats

_READ_S = 3.0  # that clients have to read their answers when the server ends
_CLOSE_S = 5  # after which uvicorn cancels tasks that still run because of a bug, and logs them
_ACCEPTS_AT_ONCE = 8  # of 0.1 ms each; a turn parses fewer
_MAX_HEAD_BYTES = 2**14


def create_server(
    app: FastAPI,
    limits: ConnectionLimits,
    keep_alive_timeout_s: int,
    shared: SharedNumbers | None = None,
) -> uvicorn.Server:
    """The server of an application; `serve([listener])` of it runs in the caller's loop.

    Args:
        shared: numbers that all API processes share.
    """
    limit_repeats("asyncio", "uvicorn.error", "minisgl.server.http.connection_table")
    table = ConnectionTable(limits, app.state.frontend.metrics, shared or SharedNumbers())
    config = uvicorn.Config(
        app,
        http=partial(Connection, table=table),  # type: ignore[arg-type]
        ws="none",  # a WebSocket would leave these connections and their limits
        lifespan="off",  # the application has none; uvicorn logs a trace if one is cut short
        log_config=None,
        access_log=False,
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
        backlog=_ACCEPTS_AT_ONCE,
        timeout_keep_alive=keep_alive_timeout_s,
        timeout_graceful_shutdown=_CLOSE_S,
    )
    return _Server(config)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers; the caller has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Set the backlog here: asyncio would also accept as many connections at once."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the last answers. A client that has not read its answer in time is cut off."""
        timer = asyncio.get_running_loop().call_later(_READ_S, self._cut_off)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            assert isinstance(connection, Connection)
            connection.transport.abort()
