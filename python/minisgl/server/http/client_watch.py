"""Clients that go away before their answer: the work for them is ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from minisgl.errors import ClientGone
from minisgl.server.generation import Generation

T = TypeVar("T")


class ClientWatch:
    """Abandons a generation when the client of its request goes away.

    Its creator must stop it at the end.
    """

    def __init__(self, request: Request, generation: Generation) -> None:
        self._task = asyncio.create_task(_abandon_at_the_end(request, generation))

    def stop(self) -> None:
        self._task.cancel()


async def run_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do the work and return its result.

    Raises:
        ClientGone: the client went away first; the work was cancelled.
        InvalidRequest, HTTPException: likewise, if the part of the body that came is refused.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            watcher.result()
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        # An error refers to this frame, which would keep all that belongs to the request until a
        # collection of garbage.
        del task, watcher


async def _abandon_at_the_end(request: Request, generation: Generation) -> None:
    """Wait for the client to go away.

    It knows nothing of its watch: a task that is cancelled keeps these frames, and a watch among
    them would refer to itself. The whole request would then wait for a collection of garbage.
    """
    await _wait_for_disconnect(request)
    generation.abandon()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
