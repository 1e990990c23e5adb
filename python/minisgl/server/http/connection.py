"""One HTTP connection: how long a client may take, and when it is closed.

A served connection has a deadline for the head of each request. Uvicorn's timer ends a connection
that is idle between two requests, and `BodyLimit` has the deadline for a body. An answer that is
being written has no deadline: when a client is slow, uvicorn waits before it writes more. A client
that reads nothing at all for five minutes loses its connection.

A reserved connection (`connection_table.py`) has one second for a head. It gets an answer to
/health and a 503 to anything else, and is closed.

Bytes that a client sends while its answer is written stay unread, and so does the end of its
connection. While something is unread, the kernel is asked once per second whether the client has
gone.

While the server drains, each answer announces that its connection closes. At the end an idle
connection is kept for half a second more: a request that is on its way then gets such an answer.

The content of a head is checked in `request_head.py`. Reference: RFC 9112, sections 2.2 and 9.6.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from minisgl.errors import InvalidRequest, RequestError, TooManyConnections
from minisgl.server.http.access_log import AccessLog
from minisgl.server.http.body_writer import offer_body_writer, withdraw_body_writer
from minisgl.server.http.connection_table import ConnectionTable
from minisgl.server.http.errors import error_response, was_logged
from minisgl.server.http.paths import HEALTH_PATH, OPEN_PATHS
from minisgl.server.http.request_head import refusal_of_head, with_origin_form

logger = logging.getLogger(__name__)

_RESERVED_HEAD_S = 1.0
_DROPPING_S = 2.0
_LAST_REQUEST_S = 0.5
_STALLED_S = 300.0
_LOOK_S = 1.0
_TCP_CLOSE = 7  # of linux/tcp_states.h
_TCP_CLOSE_WAIT = 8
# Bytes that are read at a time. h11 takes 20 µs for a chunk of six bytes, or for a line of a head.
_CAREFUL_READ = 2**9
_PLAIN_READ = 2**18
_CHECKS = (f"GET {HEALTH_PATH} ".encode(), f"HEAD {HEALTH_PATH} ".encode())
_CLOSE = (b"connection", b"close")
_HEAD_REFUSAL = (
    b"HTTP/1.1 %b\r\nconnection: close\r\n"
    b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n\r\n%b"
)


class Connection(H11Protocol):
    """uvicorn's connection with deadlines.

    The deadline is that of a head, or of a body that is dropped. A second timer runs while the
    client does not read what was written. Both are cleared when the connection is lost.
    """

    def __init__(self, *args: Any, table: ConnectionTable, **options: Any) -> None:
        super().__init__(*args, **options)
        self._table = table
        self._served_app = self.app
        self.app = self._run_app
        self._is_reserved = False
        self._is_last_request = False
        self._drops_input = False
        self._body_is_malformed = False
        self._unparsed = b""  # bytes whose turn has not come
        self._deadline: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None

    # Methods that uvicorn and asyncio call.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_reserved = self._table.add(self)
        self._fit_reads()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.other_turns.run(partial(self._end, exc))

    def _end(self, exc: Exception | None) -> None:
        self._clear_deadline()
        self._clear_stall_timer()
        if self._look_timer is not None:
            self._look_timer.cancel()
        self._unset_keepalive_if_required()  # uvicorn leaves it set after an error
        self._table.discard(self)
        super().connection_lost(exc)
        self._let_go()

    def _let_go(self) -> None:
        """Drop references back to this connection, so that it is freed without the collector."""
        self.app = self._served_app
        self.cycle = None  # type: ignore[assignment]  # as it is before the first request

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: the request is answered, and uvicorn would advise to install a library."""

    def data_received(self, data: bytes) -> None:
        if self._drops_input:
            return
        if self._unparsed:  # uvicorn has resumed reading for a reason of its own
            self._unparsed += data
            return
        self._unparsed = data
        is_check = self.conn.their_state is h11.IDLE and data.startswith(_CHECKS)
        turns = self._table.health_turns if is_check else self._table.other_turns
        if not turns.run(self._parse):
            self.transport.pause_reading()

    def _parse(self) -> None:
        """Parse the bytes that have come. A client that has gone needs no answer."""
        data = self._unparsed
        self._unparsed = b""
        if self._drops_input or self.transport.is_closing():
            return
        cycle = self.cycle
        super().data_received(data)
        if self.cycle is not cycle and self.cycle is not None:
            self._watch_cycle()
        if self._drops_input:  # the head was too large, the body is malformed, or all has come
            self.transport.resume_reading()
            return
        self._fit_reads()
        if self.transport.is_closing():  # uvicorn has answered something malformed
            self._end_when_stalled()
        elif self.conn.their_state is not h11.IDLE:
            self._clear_deadline()
        elif self._deadline is None:
            self._await_head()
        elif self._deadline.when() <= self.loop.time():  # it passed while these bytes waited
            self._end_without_head()
        if self.flow.read_paused:
            self._look_later()
        else:
            self.transport.resume_reading()

    def handle_events(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self._skip_empty_lines()
        super().handle_events()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, or a head that is too large.

        For a malformed body the application answers: it gets an error when it reads the body. All
        bytes after the body of a connection that closes after its answer are dropped.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self._drops_input = True
            self._clear_deadline()  # the head has come, maybe in one piece with this
            if self.cycle.more_body:
                self._body_is_malformed = True
                self.cycle.message_event.set()
            return
        # Uvicorn handles h11's error by this call. To keep the error would be a cycle.
        is_too_large = getattr(sys.exception(), "error_status_hint", None) == 431
        if is_too_large:
            reason = b"the head of the request has more than %d bytes" % self._max_head_bytes
            self._refuse_head(b"431 Request Header Fields Too Large", reason)
        else:
            super().send_400_response(msg)

    @property
    def _max_head_bytes(self) -> int:
        size = self.config.h11_max_incomplete_event_size
        assert size is not None  # `listener.py` sets it
        return size

    def _skip_empty_lines(self) -> None:
        """Drop empty lines before a request: some clients send one after a body."""
        received, has_ended = self.conn.trailing_data
        if not received.startswith((b"\r", b"\n")):
            return
        rest = received.lstrip(b"\r\n")
        self.conn = h11.Connection(h11.SERVER, self._max_head_bytes)  # as idle as the old one
        if rest:
            self.conn.receive_data(rest)
        if has_ended:
            self.conn.receive_data(b"")

    def on_response_complete(self) -> None:
        cycle = self.cycle
        super().on_response_complete()
        self._fit_reads()
        if self.cycle is not cycle:  # the next request had come already
            self._watch_cycle()
        if self.flow.read_paused:  # and the one after it
            self._look_later()

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = self._after_a_look(self._end_idle)

    def _end_idle(self) -> None:
        if self._unparsed:  # a request came in time
            return
        super().timeout_keep_alive_handler()
        self._end_when_stalled()

    def shutdown(self) -> None:
        """Close after the answer that is being made, or the one to a request that comes soon."""
        self._is_last_request = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
        elif not self._drops_input:
            self._set_deadline(_LAST_REQUEST_S, self._end_without_head)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_when_stalled()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._clear_stall_timer()

    def _fit_reads(self) -> None:
        """Read little at a time where few bytes can cost much, so that others have their turn."""
        has_plain_body = self.conn.their_state is h11.SEND_BODY and not any(
            name == b"transfer-encoding" for name, _ in self.headers
        )
        read_size = _PLAIN_READ if has_plain_body else _CAREFUL_READ
        self.transport.max_size = read_size  # type: ignore[attr-defined]  # of asyncio's own loop

    # Deadlines.

    def _await_head(self) -> None:
        timeout_s = self._table.limits.header_timeout_s
        if self._is_reserved:
            timeout_s = min(timeout_s, _RESERVED_HEAD_S)
        self._set_deadline(timeout_s, self._end_without_head)

    def _end_without_head(self) -> None:
        """Close. A client that has begun a head gets a 408; a silent one needs no answer.

        Bytes whose turn has not come may be the rest of a head: `_parse` calls this again if not.
        """
        if self._unparsed:
            return
        has_begun = bool(self.conn.trailing_data[0])
        if has_begun and not self.transport.is_closing():
            self._refuse_head(
                b"408 Request Timeout", b"the head of the request did not come in time"
            )
        else:
            self._close(is_client_sending=False)

    def _refuse_head(self, status: bytes, reason: bytes) -> None:
        self.transport.write(_HEAD_REFUSAL % (status, len(reason), reason))
        self._close(is_client_sending=True)

    def close_after_answer(self) -> None:
        self._close(is_client_sending=self._is_in_body)

    @property
    def _is_in_body(self) -> bool:
        """Whether the client may still be sending a body."""
        return self._body_is_malformed or self.conn.their_state is h11.SEND_BODY

    def _close(self, *, is_client_sending: bool) -> None:
        """Close, but let a client that is still sending read the answer.

        To close a socket with unread bytes resets the connection, and the client may then lose the
        answer. So only our side is closed, and what comes is dropped for two seconds.
        """
        if self._is_reserved or not is_client_sending:
            self.transport.close()
            self._end_when_stalled()
            return
        self._drops_input = True
        self.flow.resume_reading()
        self._set_deadline(_DROPPING_S, self.transport.abort)
        try:
            self.transport.write_eof()
        except OSError:  # the client has reset the connection, and does not read the answer
            self.transport.abort()

    def _set_deadline(self, timeout_s: float, action: Callable[[], None]) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(timeout_s, self._meet_deadline, action)

    def _meet_deadline(self, action: Callable[[], None]) -> None:
        self._deadline = self._after_a_look(action)

    def _after_a_look(self, action: Callable[[], None]) -> asyncio.TimerHandle:
        """Do something after the loop has read what has come, which cancels it if that matters.

        A process that was stopped (SIGSTOP) runs its timers first when it goes on. The loop runs a
        timer after what it reads in the same turn; a `call_soon` would be before that.
        """
        return self.loop.call_later(0, action)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_when_stalled(self, num_unsent_before: int | None = None) -> None:
        """Abort once the client has read nothing for five minutes."""
        self._clear_stall_timer()
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent == num_unsent_before:
            self.transport.abort()
        else:
            self._stall_timer = self.loop.call_later(_STALLED_S, self._end_when_stalled, num_unsent)

    def _clear_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    # Clients that go away while nothing is read.

    def _look_later(self) -> None:
        if self._look_timer is None:
            self._look_timer = self.loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """End the connection if the client has gone; the end itself is behind unread bytes."""
        self._look_timer = None
        if self.transport.is_closing() or not self.flow.read_paused:
            return
        if _has_gone(self.transport.get_extra_info("socket")):
            self.transport.abort()
        else:
            self._look_later()

    # Requests.

    def _watch_cycle(self) -> None:
        """Let a new request's cycle close this connection through `close_after_answer`."""
        self.cycle.transport = _CycleTransport(self)  # type: ignore[assignment]

    async def _run_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, or refuse; announce that the connection closes if it does.

        The application has a scope of its own. It changes the method of HEAD, while uvicorn needs
        the original one to leave out the body.
        """
        cycle = self.cycle  # the next request may have one before this one's application ends
        scope = with_origin_form(scope)
        refusal = self._refusal(scope)

        async def send_closing(message: Message) -> None:
            must_close = refusal is not None or self._is_last_answer or self._is_in_body
            if message["type"] == "http.response.start" and must_close:
                message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
            await send(message)

        async def receive_well_formed() -> Message:
            message = await receive()
            if self._body_is_malformed:
                raise InvalidRequest("the chunks of the body are malformed", code="invalid_request")
            return message

        offer_body_writer(scope, cycle)
        app = self._served_app
        if refusal is not None:
            app = AccessLog(partial(self._refuse, refusal), self._table.metrics)
        try:
            await app(scope, receive_well_formed, send_closing)
        except Exception as error:
            # Uvicorn would log it, and close. Starlette raises a bug again after it was answered.
            if not cycle.response_complete:
                raise
            if not was_logged(error):
                message = "%s %s fails behind its answer"
                logger.exception(message, scope["method"], scope["path"])
        finally:
            withdraw_body_writer(scope)

    @property
    def _is_last_answer(self) -> bool:
        """Whether the connection closes after an answer that begins now, whatever it is."""
        return self._is_reserved or self._is_last_request or self._table.acceptance.will_end

    async def _refuse(
        self, error: RequestError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        response = error_response(scope, self._table.metrics, error)
        await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> RequestError | None:
        refusal = refusal_of_head(scope)
        if refusal is not None:
            return refusal
        if self._is_reserved and scope["path"] not in OPEN_PATHS:
            return TooManyConnections(self._table.limits.max_connections)
        return None


def _has_gone(connected: socket.socket) -> bool:
    """Whether the other end of a TCP connection has closed it, by tcpi_state of tcp(7)."""
    (state,) = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return state in (_TCP_CLOSE, _TCP_CLOSE_WAIT)


class _CycleTransport:
    """The part of a transport that a cycle of uvicorn uses; `close` lets a client read on."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        if not self.is_closing():  # the end of a lost connection may wait for its turn
            self._connection.transport.write(data)

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()

    def close(self) -> None:
        self._connection.close_after_answer()
