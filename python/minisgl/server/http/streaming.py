"""Answers as responses: as server-sent events, whole, or whole in pieces.

Next to read: `answers/builder.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import msgspec
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from minisgl.errors import ClientGone, EngineFailed, RequestError
from minisgl.server.answers.builder import AnswerBuilder
from minisgl.server.generation import Generation
from minisgl.server.http.access_log import note_error
from minisgl.server.http.body_writer import BodyWriter, body_writer_of
from minisgl.server.http.client_watch import ClientWatch
from minisgl.server.metrics import Metrics

_MAX_LOGPROBS_IN_LOOP = 50  # each with up to 20 others
_PIECE = 2**17  # bytes, of which a connection takes a copy


class EventStream(Response):
    """An answer as server-sent events. However it ends, it closes its generation.

    The events of a reply are written while it is delivered (`Frontend.run`). If the client is slow,
    or the server has no writer for the body, they become parts of the body, which wait until they
    are sent. Replies that come meanwhile are joined.

    Args:
        watch: of the client; this response stops it at the end.
    """

    def __init__(
        self, builder: AnswerBuilder, generation: Generation, metrics: Metrics, watch: ClientWatch
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]  # it is not known yet
        self._builder = builder
        self._generation = generation
        self._metrics = metrics
        self._watch = watch
        self._writer: BodyWriter | None = None
        self._error: EngineFailed | RequestError | None = None  # that the stream has ended with

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        self._writer = body_writer_of(scope)
        try:
            with suppress(ClientGone):
                await self._send(send)
        finally:
            self._watch.stop()
            self._generation.close()
            error = self._error or self._generation.error
            if error:
                self._metrics.count_error(error.code)
                note_error(scope, error.code)

    async def _send(self, send: Send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for part in self._parts():
            if part:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _parts(self) -> AsyncIterator[bytes]:
        try:
            yield self._builder.begin_stream(self._generation)
            while not self._generation.has_ended:
                await self._generation.wait_for_more(self._write_events)
                if self._writer is not None:  # what comes until then is joined
                    await self._writer.wait_until_ready()
                yield self._builder.read_events(self._generation)
        except (EngineFailed, RequestError) as error:
            self._error = error
            yield self._builder.fail_stream(error)
            return
        yield self._builder.end_stream()

    def _write_events(self) -> None:
        """Write the events of all waiting replies, if the client is ready for them."""
        if self._writer is not None and self._writer.is_ready:
            self._writer.write(self._builder.read_events(self._generation))


class JsonInPieces(Response):
    """A whole answer that is made and sent in pieces; the event loop serves others between them."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__(media_type="application/json")
        self.headers["Content-Length"] = str(sum(map(len, pieces)))
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})


async def whole_answer(builder: AnswerBuilder) -> Response:
    """The response with a whole answer.

    An answer with many log probabilities takes up to seconds to encode, so a thread does it.
    """
    if builder.num_logprobs > _MAX_LOGPROBS_IN_LOOP:
        return JsonInPieces(await asyncio.to_thread(_encode_in_pieces, builder))
    return Response(_encode(builder), media_type="application/json")


def _encode_in_pieces(builder: AnswerBuilder) -> list[bytes]:
    content = _encode(builder)
    return [content[at : at + _PIECE] for at in range(0, len(content), _PIECE)]


def _encode(builder: AnswerBuilder) -> bytes:
    answer = builder.build()
    if isinstance(answer, BaseModel):
        return answer.model_dump_json().encode()
    return msgspec.json.encode(answer)
