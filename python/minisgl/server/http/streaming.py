"""Answers as server-sent events, and clients that go away before their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from minisgl.server.frontend import Generation
from minisgl.server.http.access_log import note_error
from minisgl.server.http.metrics import Metrics
from minisgl.server.openai.builder import AnswerBuilder

T = TypeVar("T")


class EventStream(StreamingResponse):
    """An answer as server-sent events. However the stream ends, it closes its generation."""

    def __init__(self, builder: AnswerBuilder, generation: Generation, metrics: Metrics) -> None:
        super().__init__(
            builder.stream_events(generation),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )
        self._generation = generation
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()
            if self._generation.error:
                self._metrics.count_error(self._generation.error.code)
                note_error(scope, self._generation.error.code)


async def run_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do the work and return its result.

    Raises:
        ClientDisconnect: the client went away first; the work was cancelled.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
