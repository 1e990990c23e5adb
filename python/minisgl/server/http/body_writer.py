"""Writes the parts of a streamed body without ASGI: from a callback to the socket.

Usually a part is an ASGI message, which passes through every middleware, and then an h11 event.
That takes several times as long as all other work on a token, and needs a task. So a connection
offers a `BodyWriter` to the application, as an extension of the ASGI scope. An application may use
it between the start and the end of a response, which are ASGI messages. Without the extension, or
while the client is slow, parts are ASGI messages, too, and wait there.
"""

from __future__ import annotations

from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

_EXTENSION = "minisgl.body_writer"


class BodyWriter:
    """Writes parts of one response's body in the chunked encoding (RFC 9112, section 7.1)."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        """Whether the client is connected, and most of the written bytes are sent."""
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.disconnected or cycle.transport.is_closing())

    async def wait_until_ready(self) -> None:
        """Wait until the client reads more, or is gone."""
        await self._cycle.flow.drain()

    def write(self, part: bytes) -> None:
        if part:  # an empty chunk would end the body
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


def offer_body_writer(scope: Scope, cycle: RequestResponseCycle) -> None:
    """Offer a writer to the application if the body of a streamed answer will be chunked."""
    if scope["http_version"] == "1.1" and scope["method"] == "POST":
        scope.setdefault("extensions", {})[_EXTENSION] = BodyWriter(cycle)


def withdraw_body_writer(scope: Scope) -> None:
    """Take the offer back at the end.

    The scope and its cycle would refer to each other, and all that belongs to the request would
    wait for a collection of garbage.
    """
    scope.get("extensions", {}).pop(_EXTENSION, None)


def body_writer_of(scope: Scope) -> BodyWriter | None:
    writer: BodyWriter | None = scope.get("extensions", {}).get(_EXTENSION)
    return writer
