"""The application over a real frontend and real queues; a fake worker sends what the test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import unquote

import pytest
import zmq
from fastapi import FastAPI
from starlette.routing import BaseRoute

from minisgl.message import (
    BatchFrontendMsg,
    FrontendMsg,
    TokenizeMsg,
    TokenizerMsg,
    UserReply,
    decoder,
    encode,
)
from minisgl.processes.addresses import Addresses
from minisgl.processes.private_folder import private_folder
from minisgl.processes.queues import AsyncPullQueue, PushQueue
from minisgl.server.args import ServerConfig
from minisgl.server.frontend import Frontend
from minisgl.server.http.application import create_app
from minisgl.server.served_model import ServedModel

T = TypeVar("T")
DEADLINE_S = 60.0  # a loaded machine takes seconds to start a process for large bodies
Script = Callable[[TokenizeMsg], Iterable[UserReply]]


def run(work: Coroutine[Any, Any, T]) -> T:
    """In a loop of its own, and not for ever."""

    async def limited() -> T:
        async with asyncio.timeout(DEADLINE_S):
            return await work

    return asyncio.run(limited())


async def wait_until(holds: Callable[[], bool]) -> None:
    """Let the loop go on until something holds; `run` sets the deadline."""
    while not holds():
        await asyncio.sleep(0.001)


class FakeWorker:
    """Tokenizers, scheduler and detokenizer in one. It sends only what the test says.

    Args:
        only: the one tokenizer that it is; it is all of them without.
    """

    def __init__(self, addresses: Addresses, only: str | None = None) -> None:
        decode = decoder(TokenizerMsg)
        queues = zip(addresses.tokenizer_names, addresses.tokenizers, strict=True)
        self._inboxes: list[AsyncPullQueue[TokenizerMsg]] = [
            AsyncPullQueue(address, decode) for name, address in queues if only in (None, name)
        ]
        self._frontend = PushQueue[FrontendMsg](addresses.frontends[0], encode)
        self._tasks: list[asyncio.Task[None]] = []

    async def receive(self, tokenizer: int = 0) -> Any:
        """The next message to one of the tokenizers."""
        return await self._inboxes[tokenizer].get()

    def send(self, *replies: UserReply) -> None:
        """One reply as it is, several as those of one step."""
        self.send_message(replies[0] if len(replies) == 1 else BatchFrontendMsg(list(replies)))

    def send_message(self, msg: FrontendMsg) -> None:
        """Any message."""
        self._frontend.put(msg)

    def answer_with(self, script: Script) -> None:
        """From now on, answer every prompt by itself."""

        async def serve() -> None:
            while True:
                msg = await self.receive()
                for reply in script(msg) if isinstance(msg, TokenizeMsg) else ():
                    self.send(reply)

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
async def _running(frontend: Frontend, workers: Sequence[FakeWorker]) -> AsyncIterator[None]:
    """Run a frontend. At the end it shuts its workers down; there may be more of them by then."""
    running = asyncio.create_task(frontend.run())
    try:
        yield
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        frontend.shut_down()
        for worker in workers:
            await worker.stop()
            worker.close()


@asynccontextmanager
async def restartable_frontend() -> AsyncIterator[
    tuple[Frontend, FakeWorker, Callable[[], Awaitable[FakeWorker]]]
]:
    """A running frontend, its worker, and a function that replaces the worker in an outage."""
    with private_folder() as folder:
        replies: AsyncPullQueue[FrontendMsg] = AsyncPullQueue(
            Addresses(folder).frontends[0], decoder(FrontendMsg)
        )
        frontend = Frontend(Addresses(folder), replies, max_open_requests=8)
        workers = [FakeWorker(Addresses(folder))]

        async def restart() -> FakeWorker:
            addresses = Addresses(folder, epoch=len(workers))
            workers.append(FakeWorker(addresses))
            frontend.resume(addresses)
            return workers[-1]

        async with _running(frontend, workers):
            yield frontend, workers[0], restart


@asynccontextmanager
async def replaceable_frontend(
    num_tokenizer: int = 1,
) -> AsyncIterator[tuple[Frontend, list[FakeWorker], Callable[[str], Awaitable[FakeWorker]]]]:
    """A running frontend, its workers, and a function that replaces one of them by its name.

    The first of the workers goes on; the function returns one with the successor's queue.
    """
    with private_folder() as folder:
        addresses = Addresses(folder, num_tokenizer)
        replies: AsyncPullQueue[FrontendMsg] = AsyncPullQueue(
            addresses.frontends[0], decoder(FrontendMsg)
        )
        frontend = Frontend(addresses, replies, max_open_requests=8)
        workers = [FakeWorker(addresses)]

        async def replace_worker(name: str) -> FakeWorker:
            nonlocal addresses
            addresses = addresses.in_life(name, addresses.life_of(name) + 1)
            workers.append(FakeWorker(addresses, only=name))
            frontend.replace_worker(name, addresses, f"{name} died")
            return workers[-1]

        async with _running(frontend, workers):
            yield frontend, workers, replace_worker


@asynccontextmanager
async def running_frontend(
    max_open_requests: int = 8,
    num_tokenizer: int = 1,
    request_timeout_s: float | None = None,
    *,
    num_api: int = 1,
    **options: Any,
) -> AsyncIterator[tuple[Frontend, FakeWorker]]:
    """A running frontend and the worker that it talks to.

    Args:
        options: of `Frontend`.
    """
    with private_folder() as folder:
        addresses = Addresses(folder, num_tokenizer, num_api=num_api)
        replies: AsyncPullQueue[FrontendMsg] = AsyncPullQueue(
            addresses.frontends[0], decoder(FrontendMsg)
        )
        frontend = Frontend(addresses, replies, max_open_requests, request_timeout_s, **options)
        worker = FakeWorker(addresses)
        running = asyncio.create_task(frontend.run())
        try:
            yield frontend, worker
        finally:
            running.cancel()
            # ZMQError: a test has closed its queues.
            with contextlib.suppress(asyncio.CancelledError, zmq.ZMQError):
                await running
            await worker.stop()
            frontend.close()  # writers before readers: they wait for what they have put to be taken
            worker.close()


def token_replies(*pieces: str, num_prompt: int = 3, num_cached: int = 0) -> Script:
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


async def answer_in_pieces(worker: FakeWorker, call: HttpCall, *pieces: str, **counts: int) -> None:
    """Answer a stream's prompt, each piece once the last was read, so that none are joined."""
    for reply in token_replies(*pieces, **counts)(await worker.receive()):
        worker.send(reply)
        if not reply.text:
            continue
        event_text = json.dumps(reply.text, ensure_ascii=False).replace("\u2028", r"\u2028")
        await wait_until(lambda event_text=event_text: event_text in call.body.decode())
    await call.done


Asgi = Callable[..., Awaitable[None]]


class HttpCall:
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
        self._disconnected = asyncio.Event()
        size = -(-len(body) // parts) or 1
        path, _, query = path.partition("?")
        self._body = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
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
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif message.get("body"):
            self.chunks.append(bytes(message["body"]))

    def disconnect(self) -> None:
        self._disconnected.set()

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)


CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
MODEL = ServedModel("m", 100, {"temperature": 0.25}, created=1234, width=2)
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"model": "m", "prompt": "hi"},
    RESPONSES: {"model": "m", "input": "hi"},
}
routes = pytest.mark.parametrize("route", [CHAT, TEXT])
all_routes = pytest.mark.parametrize("route", [CHAT, TEXT, RESPONSES])
MAX_BODY = 2**20  # bytes, as in the config below
CONFIG = ServerConfig(max_body_mb=1)


class App:
    """The application, the frontend below it, and the worker below that."""

    def __init__(self, app: FastAPI, frontend: Frontend, worker: FakeWorker) -> None:
        self.app = app
        self.frontend = frontend
        self.worker = worker
        self._calls: list[HttpCall] = []

    def call(self, method: str, path: str, body: bytes = b"", **options: Any) -> HttpCall:
        self._calls.append(HttpCall(self.app, method, path, body, **options))
        return self._calls[-1]

    def post(
        self, route: str, *, raw: bytes | None = None, parts: int = 1, **fields: Any
    ) -> HttpCall:
        body = json.dumps({**BODIES.get(route, {}), **fields}).encode() if raw is None else raw
        return self.call("POST", route, body, parts=parts)

    async def cancel_calls(self) -> None:
        """Those that a failed test left behind."""
        for call in self._calls:
            call.done.cancel()
        await asyncio.gather(*(call.done for call in self._calls), return_exceptions=True)


# FastAPI builds an application's routes at its first request, which takes longer than most tests.
# They depend on whether keys are wanted and on nothing else: those of the first application serve.
_routes: dict[bool, list[BaseRoute]] = {}


@asynccontextmanager
async def running_app(
    max_open_requests: int = 8,
    model: ServedModel = MODEL,
    num_tokenizer: int = 1,
    config: ServerConfig = CONFIG,
    **parts: Any,
) -> AsyncIterator[App]:
    """
    Args:
        parts: of the application, as `create_app` takes them.
    """
    timeout_s = config.request_timeout_s
    async with running_frontend(max_open_requests, num_tokenizer, timeout_s) as (frontend, worker):
        created = create_app(frontend, model, config, **parts)
        has_keys = bool(config.api_key)
        created.router.routes = _routes.setdefault(has_keys, created.router.routes)
        app = App(created, frontend, worker)
        try:
            yield app
        finally:
            await app.cancel_calls()
            created.state.body_reader.close()


def run_with_app(scenario: Callable[[App], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def run_scenario() -> None:
        async with running_app(**options) as app:
            await scenario(app)
            assert app.frontend.num_open == 0, "a request outlived its answer"

    run(run_scenario())


def assert_is_error(call: HttpCall, status: int, **fields: Any) -> dict[str, Any]:
    """The answer is OpenAI's error object with these fields."""
    assert call.status == status, call.body
    assert call.headers["content-type"] == "application/json"
    (error,) = json.loads(call.body).values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert {name: error[name] for name in fields} == fields
    return error  # type: ignore[no-any-return]


def events_of(call: HttpCall) -> list[Any]:
    """The data of each event; every byte of the stream belongs to one."""
    text = call.body.decode()
    assert re.fullmatch(r"(data: [^\n]+\n\n)*", text)
    data = [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]
    return [event if event == "[DONE]" else json.loads(event) for event in data]
