"""A real frontend over real queues, with a worker behind it that says what the test tells it to say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from minisgl.message import (
    BatchFrontendMsg,
    FrontendMsg,
    TokenizeMsg,
    TokenizerMsg,
    UserReply,
    decoder,
    encode,
)
from minisgl.server.frontend import Frontend
from minisgl.utils.mp import Addresses, AsyncPullQueue, PushQueue, private_folder

T = TypeVar("T")
PATIENCE_S = 20.0
Script = Callable[[TokenizeMsg], Iterable[UserReply]]


def run(work: Coroutine[Any, Any, T]) -> T:
    """In a loop of its own, and not for ever."""

    async def limited() -> T:
        async with asyncio.timeout(PATIENCE_S):
            return await work

    return asyncio.run(limited())


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop go on until something holds; `run` sets the deadline."""
    while not holds():
        await asyncio.sleep(0.001)


class FakeWorker:
    """Tokenizers, scheduler and detokenizer in one. It says only what the test tells it to."""

    def __init__(self, addresses: Addresses) -> None:
        decode = decoder(TokenizerMsg)
        self._inboxes: list[AsyncPullQueue[TokenizerMsg]] = [
            AsyncPullQueue(a, decode) for a in addresses.tokenizers
        ]
        self._frontend = PushQueue[FrontendMsg](addresses.frontend, encode)
        self._tasks: list[asyncio.Task[None]] = []

    async def take(self, tokenizer: int = 0) -> Any:
        """The next message to one of the tokenizers."""
        return await self._inboxes[tokenizer].get()

    def say(self, *replies: UserReply) -> None:
        """One reply as it is, several as those of one step."""
        self.put(replies[0] if len(replies) == 1 else BatchFrontendMsg(list(replies)))

    def put(self, msg: FrontendMsg) -> None:
        """Any message."""
        self._frontend.put(msg)

    def answer_with(self, script: Script) -> None:
        """From now on, answer every prompt by itself."""

        async def serve() -> None:
            while True:
                msg = await self.take()
                for reply in script(msg) if isinstance(msg, TokenizeMsg) else ():
                    self.say(reply)

        self._tasks.append(asyncio.create_task(serve()))

    async def stop(self) -> None:
        """Answer nobody any more."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._frontend.close()

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.close()


@asynccontextmanager
async def office(
    max_open_requests: int = 8, num_tokenizer: int = 1
) -> AsyncIterator[tuple[Frontend, FakeWorker]]:
    """A running frontend and the worker that it talks to."""
    with private_folder() as folder:
        addresses = Addresses(folder, num_tokenizer)
        queues = [PushQueue[TokenizerMsg](address, encode) for address in addresses.tokenizers]
        replies: AsyncPullQueue[FrontendMsg] = AsyncPullQueue(
            addresses.frontend, decoder(FrontendMsg)
        )
        frontend = Frontend(queues, replies, max_open_requests)
        worker = FakeWorker(addresses)
        running = asyncio.create_task(frontend.run())
        try:
            yield frontend, worker
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            await worker.stop()
            for (
                queue
            ) in queues:  # writers before readers: they wait for what they have put to be taken
                queue.close()
            worker.close()
            replies.close()


def spell(*pieces: str, num_prompt: int = 3, num_cached: int = 0) -> Script:
    """A script that answers every prompt with these pieces, each of one token."""

    def script(msg: TokenizeMsg) -> list[UserReply]:
        return [
            UserReply(
                msg.uid,
                piece,
                finish="stop" if number == len(pieces) else None,
                num_prompt=num_prompt,
                num_cached=num_cached,
                num_output=number,
            )
            for number, piece in enumerate(pieces, start=1)
        ]

    return script


Asgi = Callable[..., Awaitable[None]]


class Call:
    """One HTTP request put to an application by hand, and what it sends back."""

    def __init__(
        self,
        app: Asgi,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        parts: int = 1,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []
        self.num_received = 0
        self._hung_up = asyncio.Event()
        size = -(-len(body) // parts) or 1
        self._body = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"test"), (b"content-type", b"application/json"), *headers],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self.done = asyncio.create_task(self._run(app, scope))

    async def _run(self, app: Asgi, scope: dict[str, Any]) -> None:
        await app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        self.num_received += 1
        if self._body:
            part = self._body.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._body)}
        await self._hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif message.get("body"):
            self.chunks.append(bytes(message["body"]))

    def hang_up(self) -> None:
        self._hung_up.set()

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)
