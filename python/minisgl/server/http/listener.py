"""uvicorn's server, with this package's connections.

Accepts a few connections at a time, so that a flood of them does not delay other clients, gives
connections to API processes that have fewer (`handover.py`), and limits the log records that
clients can cause. When no file descriptor is left, asyncio pauses
accepting for a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI

from minisgl.processes.shared_numbers import SharedNumbers
from minisgl.server.capacity import BACKLOG
from minisgl.server.http.connection import Connection
from minisgl.server.http.connection_table import ConnectionLimits, ConnectionTable
from minisgl.server.http.handover import BEAT_INTERVAL_S, Handover
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
    handover: Handover | None = None,
) -> uvicorn.Server:
    """The server of an application; `serve([listener])` of it runs in the caller's loop.

    Args:
        shared: numbers that all API processes share.
        handover: to the other ones; None if there are none. The server closes it.
    """
    limit_repeats("asyncio", "uvicorn.error", "minisgl.server.http.connection_table")
    table = ConnectionTable(limits, app.state.frontend, shared or SharedNumbers(), handover)
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
    return _Server(config, handover)


class _SharedListener(socket.socket):
    """The socket that all API processes accept connections from.

    Args:
        listener: stays open beside this one.
    """

    def __init__(self, listener: socket.socket, handover: Handover) -> None:
        super().__init__(fileno=os.dup(listener.fileno()))
        self._handover = handover

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept connections until one is for this process.

        Raises:
            BlockingIOError: there is none, or those of this turn of the loop went to others.
        """
        for _ in range(_ACCEPTS_AT_ONCE):
            connection, address = super().accept()
            if self._handover.keeps(connection):
                return connection, address
            connection.close()
        raise BlockingIOError


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers; the caller has its own.

    Also serves connections that other API processes have accepted.
    """

    def __init__(self, config: uvicorn.Config, handover: Handover | None) -> None:
        super().__init__(config)
        self._handover = handover
        self._beat_timer: asyncio.TimerHandle | None = None
        self._connecting: set[asyncio.Task[Any]] = set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Set the backlog here: asyncio would also accept as many connections at once."""
        listeners = sockets or []
        if self._handover is not None:
            listeners = [_SharedListener(listener, self._handover) for listener in listeners]
            asyncio.get_running_loop().add_reader(self._handover, self._serve_received)
            self._beat()
        await super().startup(listeners)
        for listener in listeners:
            listener.listen(BACKLOG)

    def _beat(self) -> None:
        assert self._handover is not None
        self._handover.beat()
        number = self._serve_connections(self._handover.left_by_others())
        delay_s = 0 if number else BEAT_INTERVAL_S  # there may be more
        self._beat_timer = asyncio.get_running_loop().call_later(delay_s, self._beat)

    def _serve_received(self) -> None:
        assert self._handover is not None
        self._serve_connections(self._handover.received())

    def _serve_connections(self, connections: Iterable[socket.socket]) -> int:
        """Returns how many they were."""
        loop = asyncio.get_running_loop()
        number = 0
        for connection in connections:
            number += 1
            connecting = loop.connect_accepted_socket(self._make_protocol, connection)
            task = loop.create_task(connecting)
            self._connecting.add(task)  # the loop has a weak reference alone
            task.add_done_callback(self._connecting.discard)
        return number

    def _make_protocol(self) -> asyncio.Protocol:
        """As uvicorn does for a connection that it has accepted."""
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the last answers. A client that has not read its answer in time is cut off."""
        if self._handover is not None and self._beat_timer is not None:
            self._beat_timer.cancel()
            asyncio.get_running_loop().remove_reader(self._handover)
            self._handover.close()
        timer = asyncio.get_running_loop().call_later(_READ_S, self._cut_off)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            assert isinstance(connection, Connection)
            connection.transport.abort()
