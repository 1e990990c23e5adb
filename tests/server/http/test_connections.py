"""Connections of the real server on the loopback: deadlines, the limit, and when one is closed."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import re
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from minisgl.message import AbortMsg, UserReply
from minisgl.processes.shared_numbers import SharedNumbers
from minisgl.server.capacity import NUM_RESERVED
from minisgl.server.frontend import Frontend
from minisgl.server.http import access_log, connection, listener
from minisgl.server.http.connection import Connection
from minisgl.server.http.connection_table import RUNS_A_TURN, ConnectionLimits
from minisgl.server.http.listener import create_server
from minisgl.server.http.loop_turns import TurnQueue
from minisgl.server.key_limits import KeyLimits
from minisgl.server.openai.completions import CompletionBuilder
from tests.server.harness import (
    BODIES,
    CHAT,
    CONFIG,
    MAX_BODY,
    RESPONSES,
    TEXT,
    App,
    run,
    running_app,
    token_replies,
    wait_until,
)

SOON_S = 1.0  # on a loaded machine, too, a client has sent its request until then
LATE_S = 60
HASTY = replace(CONFIG, body_timeout_s=1)
HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n"


class Client:
    """One connection to the server, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next response, which has a Content-Length."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, body

    async def rest(self) -> bytes:
        """What comes until the server closes the connection.

        It is reset if the server has not read all that had come.
        """
        received = b""
        with suppress(ConnectionResetError):
            while piece := await self.reader.read(65536):
                received += piece
        return received

    @asynccontextmanager
    async def dripping(self, data: bytes) -> AsyncIterator[None]:
        """Send a byte now and then while the block runs."""

        async def drip() -> None:
            for number in range(len(data)):
                self.send(data[number : number + 1])
                await asyncio.sleep(0.01)

        task = asyncio.create_task(drip())
        try:
            yield
        finally:
            task.cancel()

    def close(self) -> None:
        self.writer.close()

    def abort(self) -> None:
        self.writer.transport.abort()


class Served:
    """The application behind a real server."""

    def __init__(self, app: App, server: uvicorn.Server, port: int) -> None:
        self.app = app
        self.server = server
        self.port = port
        self._clients: list[Client] = []

    async def connect(self) -> Client:
        """A connection that the server has accepted or refused."""
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self._clients.append(client)
        return client

    async def connect_many(self, number: int) -> list[Client]:
        return [await self.connect() for _ in range(number)]

    @property
    def num_open(self) -> int:
        return len(self.server.server_state.connections)

    async def close_clients(self) -> None:
        for client in self._clients:
            client.close()
        await wait_until(lambda: self.num_open == 0)

    def abort_clients(self) -> None:
        """Those of a failed test: as garbage they would warn, and fail a later one."""
        for client in self._clients:
            client.abort()


@asynccontextmanager
async def serving(
    header_timeout_s: float, keep_alive_timeout_s: int, max_connections: int, **options: Any
) -> AsyncIterator[Served]:
    limits = ConnectionLimits(max_connections, header_timeout_s)
    async with running_app(**options) as app:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server = create_server(app.app, limits, keep_alive_timeout_s)
        task = asyncio.create_task(server.serve([listener]))
        await wait_until(lambda: server.started)
        served = Served(app, server, port)
        try:
            yield served
            await served.close_clients()
            assert app.frontend.num_open == 0, "a request outlived its connection"
        finally:
            served.abort_clients()
            server.should_exit = True
            await task


def run_served(
    scenario: Callable[[Served], Coroutine[Any, Any, None]],
    header_timeout_s: float = LATE_S,
    keep_alive_timeout_s: int = LATE_S,
    max_connections: int = 100,
    **options: Any,
) -> None:
    async def run_scenario() -> None:
        async with serving(
            header_timeout_s, keep_alive_timeout_s, max_connections, **options
        ) as served:
            await scenario(served)

    run(run_scenario())


def post(route: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [f"POST {route} HTTP/1.1", "host: a", "content-type: application/json", *headers]
    lines.append(f"content-length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


# ---- bugs


@pytest.mark.parametrize("is_pipelined", [True, False])
def test_a_connection_goes_on_after_a_500_and_the_bug_is_logged_once(
    is_pipelined: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("minisgl"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "filters", [])  # nothing was logged yet

    async def scenario(served: Served) -> None:
        monkeypatch.setattr(Frontend, "refusal", property(lambda self: 1 / 0))
        client = await served.connect()
        client.send(HEALTH + (MODELS if is_pipelined else b""))
        status, headers, _ = await client.response()
        assert status == 500
        assert "connection" not in headers
        if not is_pipelined:
            client.send(MODELS)
        assert (await client.response())[0] == 200

    run_served(scenario)
    assert caplog.text.count("ZeroDivisionError: ") == 1


def test_a_bug_behind_an_answer_is_logged_and_the_connection_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The access log is outside of what answers a bug with a 500."""
    monkeypatch.setattr(logging.getLogger("minisgl"), "propagate", True)

    async def scenario(served: Served) -> None:
        client = await served.connect()
        with monkeypatch.context() as bug:
            bug.setattr(access_log, "_write_line", lambda *_: 1 / 0)
            client.send(MODELS)
            assert (await client.response())[0] == 200
            await wait_until(lambda: "ZeroDivisionError: " in caplog.text)
        client.send(MODELS)
        assert (await client.response())[0] == 200

    run_served(scenario)
    assert caplog.text.count("ZeroDivisionError: ") == 1
    assert "GET /v1/models fails behind its answer" in caplog.text


def test_a_bug_of_the_log_of_a_bug_is_logged_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("minisgl"), "propagate", True)

    async def scenario(served: Served) -> None:
        monkeypatch.setattr(Frontend, "refusal", property(lambda self: 1 / 0))
        monkeypatch.setattr(access_log, "_write_line", lambda *_: [][0])
        client = await served.connect()
        client.send(HEALTH)
        assert (await client.response())[0] == 500
        await wait_until(lambda: "IndexError: " in caplog.text)

    run_served(scenario)


def test_a_stream_that_a_bug_ends_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("minisgl"), "propagate", True)

    async def scenario(served: Served) -> None:
        monkeypatch.setattr(CompletionBuilder, "last_events", lambda self: 1 / 0)
        client = await served.connect()
        client.send(post(TEXT, json.dumps({**BODIES[TEXT], "stream": True}).encode()))
        served.app.worker.answer_with(token_replies("a"))
        received = await client.rest()
        assert b'"text":"a"' in received
        assert not received.endswith(b"0\r\n\r\n"), "it is not complete"

    run_served(scenario)
    assert "ZeroDivisionError: " in caplog.text


# ---- deadlines


def test_a_silent_connection_is_closed_without_an_answer() -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        assert await client.rest() == b""

    run_served(scenario, header_timeout_s=SOON_S)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_head_that_drips_is_a_408(is_first: bool) -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        if not is_first:
            client.send(HEALTH)
            assert (await client.response())[0] == 200
        async with client.dripping(b"GET /health HTTP/1.1\r\nx: " + b"a" * 10_000):
            status, headers, _ = await client.response()
            assert (status, headers["connection"]) == (408, "close")
            assert await client.rest() == b""

    run_served(scenario, header_timeout_s=SOON_S)


@pytest.mark.parametrize("route", [CHAT, "/tokenize"])
def test_a_body_that_drips_is_a_408(route: str) -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(post(route, b"", length=4000))
        async with client.dripping(b" " * 4000):
            status, headers, body = await client.response()
            assert (status, headers["connection"]) == (408, "close")
            assert f"{HASTY.body_timeout_s} s" in json.loads(body)["error"]["message"]
            assert await client.rest() == b""

    run_served(scenario, config=HASTY)


def test_an_idle_connection_is_closed_after_its_answer() -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(HEALTH)
        assert (await client.response())[0] == 200
        assert await client.rest() == b""

    run_served(scenario, keep_alive_timeout_s=0)


class HeldTurns:
    """While it is held, no turn of any queue comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._waiting: list[Callable[[], None]] = []

    def hold(self) -> None:
        def wait(queue: TurnQueue, callback: Callable[[], None]) -> bool:
            self._waiting.append(callback)
            return False

        self._monkeypatch.setattr(TurnQueue, "run", wait)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def go_on(self) -> None:
        self._monkeypatch.undo()
        for callback in self._waiting:
            callback()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_deadline_that_passes_while_a_head_waits_for_its_turn_ends_no_request(
    is_first: bool, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldTurns(monkeypatch)

    async def scenario(served: Served) -> None:
        client, silent = await served.connect_many(2)  # the silent one's deadline is the later one
        await wait_until(lambda: served.num_open == 2)
        for each in () if is_first else (client, silent):
            each.send(HEALTH)
            assert (await each.response())[0] == 200
        held.hold()
        client.send(MODELS if is_whole else MODELS[:-1])
        await wait_until(lambda: held.num_waiting == 1)
        assert await silent.rest() == b""
        held.go_on()
        assert (await client.response())[0] == (200 if is_whole else 408)

    run_served(scenario, header_timeout_s=SOON_S, keep_alive_timeout_s=1)


def stop_for(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the loop find that so much time has passed, before it sees what has come meanwhile.

    So it is in a process that gets SIGSTOP and SIGCONT while it waits.
    """
    loop = asyncio.get_running_loop()
    selector = cast(Any, loop)._selector
    clock = loop.time

    def go_on(timeout: float) -> list[Any]:
        del selector.select
        monkeypatch.setattr(loop, "time", lambda: clock() + seconds)
        return []

    selector.select = go_on


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_head_that_came_while_the_process_was_stopped_is_read(
    is_first: bool, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        await wait_until(lambda: served.num_open == 1)
        if not is_first:
            client.send(HEALTH)
            assert (await client.response())[0] == 200
        client.send(MODELS if is_whole else MODELS[:-1])
        stop_for(2 * SOON_S, monkeypatch)
        assert (await client.response())[0] == (200 if is_whole else 408)

    run_served(scenario, header_timeout_s=SOON_S, keep_alive_timeout_s=1)


def test_an_answer_may_take_longer_than_any_deadline() -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(post(TEXT, json.dumps(BODIES[TEXT]).encode()))
        msg = await served.app.worker.receive()
        silent = await served.connect()
        assert await silent.rest() == b""  # its deadline began later and is over
        for reply in token_replies("ok")(msg):
            served.app.worker.send(reply)
        assert (await client.response())[0] == 200

    run_served(scenario, header_timeout_s=HASTY.body_timeout_s, config=HASTY)


def test_requests_follow_each_other_on_a_connection_one_by_one_and_at_once() -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(HEALTH)
        assert (await client.response())[0] == 200
        client.send(HEALTH + MODELS + HEALTH)
        assert [(await client.response())[0] for _ in range(3)] == [200, 200, 200]

    run_served(scenario)


@pytest.mark.parametrize("line", [b"\r\n", b"\n", b"\r\n" * 3])
def test_empty_lines_before_a_request_are_dropped(line: bytes) -> None:
    body = b'{"text": "a"}'
    head = b"POST /nowhere HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)

    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(line + HEALTH)
        assert (await client.response())[0] == 200
        client.send(head + body + line + HEALTH)
        assert [(await client.response())[0] for _ in range(2)] == [404, 200]
        for number in range(len(line)):  # alone, and in pieces
            client.send(line[number : number + 1])
            await asyncio.sleep(0.01)
        client.send(head + body + line)
        assert (await client.response())[0] == 404
        client.send(HEALTH)
        assert (await client.response())[0] == 200

    run_served(scenario)


def test_empty_lines_do_not_put_off_the_deadline_of_a_head() -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        async with client.dripping(b"\r\n" * 500):
            await client.rest()

    run_served(scenario, header_timeout_s=SOON_S)


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://a/health", 200),
        ("HTTP://a:80/health?x=/y", 200),
        ("https://[::1]:80/v1/models", 200),
        ("http://a", 404),
        ("http://a?x=/health", 404),
        ("http:///health", 404),
        ("/http://a/health", 404),
    ],
)
def test_a_target_may_have_a_scheme_and_a_host(target: str, status: int) -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        for _ in range(2):
            client.send(b"GET %b HTTP/1.1\r\nhost: b\r\n\r\n" % target.encode())
            assert (await client.response())[0] == status

    run_served(scenario)


def test_a_path_behind_a_host_needs_a_key_as_any_other() -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(b"GET http://a/v1/models HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await client.response())[0] == 401

    run_served(scenario, config=replace(CONFIG, api_key=("sk-one",)))


# ---- many at once


@pytest.mark.parametrize(
    ("path", "status"), [("/health", 200), ("/v1/models", 200), (TEXT, 405), ("/nowhere", 404)]
)
def test_an_answer_to_head_has_no_body_and_keeps_the_connection(
    path: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        for _ in range(2):
            client.send(b"HEAD %b HTTP/1.1\r\nhost: a\r\n\r\n" % path.encode())
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status)
        client.send(HEALTH)
        assert (await client.response())[0] == 200

    run_served(scenario)
    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == []


def test_a_failed_answer_to_head_has_no_body(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(served: Served) -> None:
        monkeypatch.setattr(Frontend, "refusal", property(lambda self: 1 / 0))
        client = await served.connect()
        client.send(b"HEAD /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 500 ")
        assert body == b""

    run_served(scenario)
    assert "Too much data" not in caplog.text


class TurnCounter:
    """What uvicorn's connections are called with, and in which turns of the loop."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.num_in_turn: Counter[int] = Counter()
        self._turn = 0

    def start(self) -> None:
        """Count turns until the loop ends, which keeps it busy."""
        self._turn += 1
        asyncio.get_running_loop().call_soon(self.start)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        receive = H11Protocol.data_received
        lose = H11Protocol.connection_lost

        def note_and_receive(connection: H11Protocol, data: bytes) -> None:
            self.received.append(data)
            self.num_in_turn[self._turn] += 1
            receive(connection, data)

        def note_and_lose(connection: H11Protocol, error: Exception | None) -> None:
            self.num_in_turn[self._turn] += 1
            lose(connection, error)

        monkeypatch.setattr(H11Protocol, "data_received", note_and_receive)
        monkeypatch.setattr(H11Protocol, "connection_lost", note_and_lose)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> TurnCounter:
    counter = TurnCounter()
    counter.watch(monkeypatch)
    return counter


def test_a_crowd_that_sends_and_hangs_up_gets_a_bounded_part_of_each_turn(
    turns: TurnCounter,
) -> None:
    num_clients = 8 * RUNS_A_TURN

    async def scenario(served: Served) -> None:
        clients = await served.connect_many(num_clients)
        turns.start()
        for client in clients:
            client.send(post(TEXT, b"[", length=1000))
        await wait_until(lambda: len(turns.received) == num_clients)
        for client in clients:
            client.close()
        await wait_until(lambda: served.num_open == 0)
        assert turns.num_in_turn.total() == 2 * num_clients
        assert max(turns.num_in_turn.values()) == RUNS_A_TURN

    run_served(scenario)


def test_a_health_check_passes_by_a_crowd_that_waits(turns: TurnCounter) -> None:
    async def scenario(served: Served) -> None:
        clients = await served.connect_many(8 * RUNS_A_TURN)
        check = await served.connect()
        for client in clients:
            client.send(MODELS)
        check.send(HEALTH)
        assert (await check.response())[0] == 200
        assert turns.received.index(HEALTH) <= 3 * RUNS_A_TURN
        for client in clients:
            assert (await client.response())[0] == 200

    run_served(scenario)


def test_a_body_that_waits_is_read_in_order() -> None:
    async def scenario(served: Served) -> None:
        clients = await served.connect_many(4 * RUNS_A_TURN)
        requests = [post(TEXT, b'{"prompt": 1.5}') + HEALTH for _ in clients]
        half = len(requests[0]) // 2
        for client, request in zip(clients, requests, strict=True):
            client.send(request[:half])
        await asyncio.sleep(0)
        for client, request in zip(clients, requests, strict=True):
            client.send(request[half:])
        for client in clients:
            assert [(await client.response())[0] for _ in range(2)] == [400, 200]

    run_served(scenario)


# ---- what costs much time a byte


@pytest.fixture
def read_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what h11 is given at a time."""
    sizes: list[int] = []
    parse = H11Protocol.data_received

    def note_and_parse(connection: H11Protocol, data: bytes) -> None:
        sizes.append(len(data))
        parse(connection, data)

    monkeypatch.setattr(H11Protocol, "data_received", note_and_parse)
    return sizes


def test_chunks_are_read_few_at_a_time(read_sizes: list[int]) -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        head = post(TEXT, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
        client.send(head + b"1\r\n \r\n" * 4_000 + b"0\r\n\r\n" + HEALTH)
        assert [(await client.response())[0] for _ in range(2)] == [400, 200]
        assert max(read_sizes) <= 2048

    run_served(scenario)


def test_a_body_of_known_length_is_read_by_large_pieces(read_sizes: list[int]) -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(post(TEXT, b" " * MAX_BODY) + HEALTH)
        assert [(await client.response())[0] for _ in range(2)] == [400, 200]
        assert max(read_sizes) > 2048

    run_served(scenario)


def test_a_head_of_more_than_16_kib_is_refused_and_its_client_reads_why() -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(HEALTH[:-2] + b"x: y\r\n" * 3_500 + b"\r\n")
        status, headers, body = await client.response()
        assert (status, headers["connection"]) == (431, "close")
        assert b"16384 bytes" in body
        assert await client.reader.read() == b""  # an end, and no reset

    run_served(scenario)


def test_a_short_head_that_is_none_is_not_said_to_be_large() -> None:
    """It came in one piece with the body before it, and with much that follows."""

    async def scenario(served: Served) -> None:
        client = await served.connect()
        body = post(TEXT, b" " * MAX_BODY)
        client.send(body[:-1000])
        await asyncio.sleep(0.01)
        client.send(body[-1000:] + b"BAD\r\n\r\n" + b"x" * 30_000)
        assert (await client.response())[0] == 400
        assert (await client.reader.readline()).startswith(b"HTTP/1.1 400")

    run_served(scenario)


def test_more_than_16_kib_of_trailers_are_refused() -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        begin = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
        client.send(begin + b"x: y\r\n" * 3_500 + b"\r\n")
        with suppress(ConnectionResetError):  # it has not read all of that
            assert (await client.rest()).startswith(b"HTTP/1.1 400")

    run_served(scenario)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"zz\r\nabc\r\n0\r\n\r\n"],
        [b"-5\r\nabcde\r\n"],
        [b"5\r\nabcdefgh\r\n0\r\n\r\n"],
        [b"5\r\n     \r\n", b"zz\r\n", b"and more"],
        [b"0\r\nno field\r\n\r\n"],
    ],
)
@pytest.mark.parametrize("route", [TEXT, "/v1/messages"])
def test_a_body_whose_chunks_are_malformed_is_a_400_for_its_client_and_in_the_log(
    route: str, pieces: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="minisgl.server.http.access_log")

    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(post(route, b"").replace(b"content-length: 0", b"transfer-encoding: chunked"))
        for piece in pieces:
            client.send(piece)
            await asyncio.sleep(0.01)
        status, headers, body = await client.response()
        assert (status, headers["connection"]) == (400, "close")
        assert "chunk" in json.loads(body)["error"]["message"]
        assert await client.reader.read() == b""  # an end, and no reset
        (line,) = [each.getMessage() for each in caplog.records if "ms" in each.getMessage()]
        assert line.startswith(f"POST {route} 400 ")
        assert line.endswith(f"error=invalid_request request_id={headers['x-request-id']}")
        await wait_until(lambda: served.num_open == 0)

    run_served(scenario)


@pytest.mark.parametrize(
    ("body", "status"), [(b"zz\r\n", 400), (b"200000\r\n" + b" " * 0x200000, 413)]
)
def test_a_bad_body_that_nobody_reads_is_refused_while_the_answer_is_made(
    body: bytes, status: int
) -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        head = post("/flush_cache", b"")
        client.send(head.replace(b"content-length: 0", b"transfer-encoding: chunked") + body)
        assert (await client.response())[0] == status

    run_served(scenario)


def test_a_body_that_is_malformed_behind_an_answer_changes_nothing_of_it() -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        head = MODELS.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n")
        client.send(head + b"zz\r\nabc")
        status, headers, _ = await client.response()
        assert (status, headers["connection"]) == (200, "close")
        assert await client.reader.read() == b""

    run_served(scenario)


def test_a_malformed_body_leaves_no_deadline_of_a_head() -> None:
    """It came in one piece with the head, nobody reads it, and the answer takes its time."""

    class SlowPeers:
        async def samples(self) -> list[Any]:
            await asyncio.sleep(2 * SOON_S)
            return []

    async def scenario(served: Served) -> None:
        served.app.app.state.peers = SlowPeers()
        client = await served.connect()
        head = b"GET /metrics HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        client.send(head + b"zz\r\nabc")
        assert (await client.response())[0] == 200
        assert await client.reader.read() == b""

    run_served(scenario, header_timeout_s=SOON_S)


# ---- what closes a connection


def test_a_length_beside_an_encoding_is_refused_and_what_follows_is_not_served() -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(post(TEXT, b"0\r\n\r\n", "transfer-encoding: chunked") + HEALTH)
        status, headers, body = await client.response()
        assert (status, headers["connection"]) == (400, "close")
        assert "Transfer-Encoding" in json.loads(body)["error"]["message"]
        assert await client.rest() == b""

    run_served(scenario)


@pytest.mark.parametrize(
    ("version", "status"),
    [("0.9", 505), ("1.0", 200), ("1.1", 200), ("1.2", 200), ("2.0", 505), ("3.0", 505)],
)
def test_a_request_of_another_major_version_of_http_is_a_505(version: str, status: int) -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(b"GET /v1/models HTTP/%b\r\nhost: a\r\n\r\n" % version.encode())
        given, headers, body = await client.response()
        assert given == status
        if status == 505:
            assert headers["connection"] == "close"
            assert f"HTTP/{version}" in json.loads(body)["error"]["message"]
            assert await client.rest() == b""

    run_served(scenario)


def test_a_401_before_the_body_closes() -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(post(TEXT, b"{", length=4000))
        status, headers, _ = await client.response()
        assert (status, headers["connection"]) == (401, "close")
        assert await client.rest() == b""
        await wait_until(lambda: served.num_open == 0)  # though the client keeps it open

    run_served(scenario, config=replace(CONFIG, api_key=("sk-one",)))


def test_a_client_that_resets_its_connection_while_it_is_refused_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer is written by then, and our side can no longer be closed."""
    close_after_answer = Connection.close_after_answer

    async def scenario(served: Served) -> None:
        client = socket.create_connection(("127.0.0.1", served.port))

        def reset_and_close(connection: Connection) -> None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            close_after_answer(connection)

        monkeypatch.setattr(Connection, "close_after_answer", reset_and_close)
        client.sendall(post(TEXT, b"{", length=4000))
        await wait_until(lambda: client.fileno() == -1)
        await wait_until(lambda: served.num_open == 0)

    run_served(scenario, config=replace(CONFIG, api_key=("sk-one",)))
    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == []


def test_a_client_that_sends_its_whole_body_first_still_reads_why_it_is_refused() -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(post(TEXT, b" " * 4_000_000))
        await client.writer.drain()
        status, headers, body = await client.response()
        assert (status, headers["connection"]) == (413, "close")
        assert str(MAX_BODY) in json.loads(body)["error"]["message"]
        assert await client.rest() == b""

    run_served(scenario)


def test_a_client_that_asks_before_it_sends_too_much_is_refused_at_once() -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(post(TEXT, b"", "expect: 100-continue", length=MAX_BODY + 1))
        status, headers, body = await client.response()  # no 100 before it
        assert (status, headers["connection"]) == (413, "close")
        assert str(MAX_BODY) in json.loads(body)["error"]["message"]

    run_served(scenario)


def test_a_refusal_after_the_body_keeps_the_connection() -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(post(TEXT, b"{}"))
        assert (await client.response())[0] == 401
        client.send(HEALTH)
        assert (await client.response())[0] == 200

    run_served(scenario, config=replace(CONFIG, api_key=("sk-one",)))


@pytest.mark.parametrize("garbage", [b"\r\n\r\nhello\r\n\r\n", b"\x16\x03\x01" * 100])
def test_what_is_not_http_is_closed(garbage: bytes) -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(garbage)
        assert (await client.rest()).startswith(b"HTTP/1.1 400")

    run_served(scenario)


def test_an_upgrade_to_a_websocket_is_not_made_and_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(
            b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        assert (await client.response())[0] == 200

    run_served(scenario)
    assert "pgrade" not in caplog.text
    assert "WebSocket" not in caplog.text


def test_what_a_connection_refuses_has_the_form_of_the_paths_api() -> None:
    """Anthropic's clients look for the type of an error, and for the request's id in it."""
    messages = "/v1/messages"

    async def refused(served: Served, request: bytes) -> dict[str, Any]:
        client = await served.connect()
        client.send(request)
        _, headers, body = await client.response()
        assert headers["request-id"].startswith("req_")
        content = json.loads(body)
        assert content["type"] == "error"
        assert content["request_id"] == headers["request-id"]
        return cast(dict[str, Any], content["error"])

    async def scenario(served: Served) -> None:
        ambiguous = post(messages, b"0\r\n\r\n", "transfer-encoding: chunked")
        assert (await refused(served, ambiguous))["type"] == "invalid_request_error"
        await served.close_clients()
        await served.connect_many(2)
        await wait_until(lambda: served.num_open == 2)
        assert (await refused(served, post(messages, b"{}")))["type"] == "overloaded_error"

    run_served(scenario, max_connections=2)


# ---- the limit


def test_above_the_limit_only_health_is_answered() -> None:
    async def scenario(served: Served) -> None:
        silent = await served.connect_many(2)
        await wait_until(lambda: served.num_open == 2)
        for request, expected in ((HEALTH, 200), (MODELS, 503), (post(TEXT, b"{}"), 503)):
            client = await served.connect()
            client.send(request + MODELS)
            status, headers, body = await client.response()
            assert (status, headers["connection"]) == (expected, "close")
            assert headers["x-request-id"].startswith("req_")
            if expected == 503:
                assert headers["retry-after"] == "1"
                assert json.loads(body)["error"]["code"] == "too_many_connections"
            assert await client.rest() == b""

        silent[0].close()
        await wait_until(lambda: served.num_open == 1)
        client = await served.connect()
        client.send(MODELS)
        assert (await client.response())[0] == 200
        metrics = served.app.frontend.metrics.expose().decode()
        assert 'minisgl_errors_total{code="too_many_connections"} 2.0' in metrics

    run_served(scenario, max_connections=2)


def test_silent_connections_do_not_keep_a_health_check_away() -> None:
    async def scenario(served: Served) -> None:
        await served.connect_many(2 + NUM_RESERVED + 10)
        client = await served.connect()
        client.send(HEALTH)
        assert (await client.response())[0] == 200
        assert served.num_open <= 2 + NUM_RESERVED

    run_served(scenario, max_connections=2)


def test_a_silent_connection_above_the_limit_ends_soon() -> None:
    async def scenario(served: Served) -> None:
        await served.connect_many(1)
        await wait_until(lambda: served.num_open == 1)
        client = await served.connect()
        assert await client.rest() == b""
        assert served.num_open == 1

    run_served(scenario, max_connections=1)


# ---- memory


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answered_request_leaves_no_garbage_to_collect(is_stream: bool) -> None:
    """A connection keeps its latest request; reference counts free those before."""

    async def scenario(served: Served) -> None:
        served.app.worker.answer_with(token_replies("a", "b"))
        client = await served.connect()
        body = json.dumps({**BODIES[CHAT], "stream": is_stream}).encode()
        gc.collect()
        gc.disable()
        try:
            for _ in range(10):
                client.send(post(CHAT, body))
                if is_stream:
                    await client.reader.readuntil(b"\r\n0\r\n\r\n")
                else:
                    await client.response()
                await wait_until(lambda: served.app.frontend.num_open == 0)
            num_cycles = sum(type(each) is RequestResponseCycle for each in gc.get_objects())
        finally:
            gc.enable()
        assert num_cycles <= 1

    run_served(scenario)


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_closed_connection_leaves_no_garbage_to_collect(is_answered: bool) -> None:
    """Nothing that the server keeps is young for long, so a collection would come late."""

    async def scenario(served: Served) -> None:
        if is_answered:
            served.app.worker.answer_with(token_replies("a", "b"))
        body = json.dumps({**BODIES[CHAT], "stream": True}).encode()
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                client = await served.connect()
                client.send(post(CHAT, body))
                if is_answered:
                    await client.reader.readuntil(b"\r\n0\r\n\r\n")
                else:
                    await wait_until(lambda: served.app.frontend.num_open == 1)
                client.close()
                await wait_until(lambda: served.app.frontend.num_open == served.num_open == 0)
            kinds = (Connection, RequestResponseCycle)
            await wait_until(lambda: not any(type(each) in kinds for each in gc.get_objects()))
        finally:
            gc.enable()

    run_served(scenario)


# ---- streams


@pytest.mark.parametrize("route", [CHAT, TEXT, RESPONSES, "/v1/messages", "/generate"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_stream_is_the_same_on_every_way_to_the_client(route: str, version: str) -> None:
    """Through a connection, chunked or not, and through the application alone."""
    fields: dict[str, dict[str, Any]] = {
        "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
        "/generate": {"prompt": "hi"},
    }
    body = {**BODIES.get(route, {}), **fields.get(route, {}), "max_tokens": 9, "stream": True}
    if route == RESPONSES:
        del body["max_tokens"]
    pieces = ["Hé", "", "\n\nline\r\u2028", *"many pieces", ""]

    async def scenario(served: Served) -> None:
        served.app.worker.answer_with(token_replies(*pieces))
        alone = served.app.post(route, **body)
        await alone.done
        client = await served.connect()
        request = post(route, json.dumps(body).encode(), "connection: close")
        client.send(request.replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
        head, _, rest = (await client.rest()).partition(b"\r\n\r\n")
        is_chunked = b"transfer-encoding: chunked" in head.lower()
        assert is_chunked == (version == "1.1")
        sent = b"".join(chunks_of(rest)) if is_chunked else rest
        assert joined_text(sent) == joined_text(alone.body)
        assert last_event(sent) == last_event(alone.body)

    run_served(scenario)


def chunks_of(data: bytes) -> list[bytes]:
    """The chunks of a body, which has to end with an empty one."""
    chunks: list[bytes] = []
    while not chunks or chunks[-1]:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        chunks.append(data[:length])
        assert data[length : length + 2] == b"\r\n"
        data = data[length + 2 :]
    assert data == b""
    return chunks


def joined_text(stream: bytes) -> str:
    """All text of an answer, however it is cut into events."""
    pattern = r'"(?:content|text|delta)":"((?:[^"\\]|\\.)*)"[,}]'
    return "".join(re.findall(pattern, stream.decode()))


def last_event(stream: bytes) -> str:
    """Without what differs from answer to answer."""
    event = stream.decode().split("\n\n")[-2]
    return re.sub(
        r'(resp|msg)_[0-9a-f]+|"(created_at|completed_at|sequence_number)":\d+', "", event
    )


# ---- clients that do not read


def test_a_stream_that_nobody_reads_waits_and_is_whole_when_it_is_read() -> None:
    large = "x" * 16_000_000  # more than sockets hold
    pieces = [str(number % 10) for number in range(1000)]

    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        body = json.dumps({**BODIES[TEXT], "stream": True}).encode()
        client.send(post(TEXT, body, "connection: close"))
        await wait_until(lambda: served.num_open == 1)
        (connection,) = served.server.server_state.connections
        first, *rest = token_replies(large, *pieces)(await served.app.worker.receive())
        served.app.worker.send(first)
        await wait_until(lambda: connection.flow is not None and connection.flow.write_paused)
        num_unsent = connection.transport.get_write_buffer_size()
        served.app.worker.send(*rest)
        await wait_until(lambda: served.app.frontend.num_open == 0)  # all has been generated
        assert connection.transport.get_write_buffer_size() == num_unsent

        silent = await served.connect()
        assert await silent.rest() == b""  # the deadlines are over
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        events = re.findall(rb'"text":"([^"]*)"', await client.rest())
        assert events == [large.encode(), "".join(pieces).encode()]

    run_served(
        scenario, header_timeout_s=HASTY.body_timeout_s, config=HASTY, keep_alive_timeout_s=0
    )


def test_tokens_that_a_client_has_not_read_count_for_its_key() -> None:
    """It could have thousands computed, and hang up before they are read."""
    limits = f"[a]\nsha256 = '{hashlib.sha256(b'sk-one').hexdigest()}'\ntokens_per_minute = 600"
    large = "x" * 16_000_000  # more than sockets hold

    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        body = json.dumps({**BODIES[TEXT], "stream": True}).encode()
        client.send(post(TEXT, body, "authorization: Bearer sk-one"))
        await wait_until(lambda: served.num_open == 1)
        (connection,) = served.server.server_state.connections
        first, *rest = token_replies(large, *["a"] * 1000)(await served.app.worker.receive())
        served.app.worker.send(first)
        await wait_until(lambda: connection.flow is not None and connection.flow.write_paused)
        served.app.worker.send(*rest)
        await wait_until(lambda: served.app.frontend.num_open == 0)  # all has been generated
        client.abort()
        await wait_until(lambda: served.num_open == 0)

        again = await served.connect()
        again.send(post(TEXT, body, "authorization: Bearer sk-one"))
        status, _, answer = await again.response()
        assert status == 429
        assert "600 tokens a minute" in json.loads(answer)["error"]["message"]

    run_served(
        scenario,
        config=replace(CONFIG, api_key=("sk-one",)),
        key_limits=KeyLimits(limits, SharedNumbers()),
    )


async def stream_that_is_not_read(served: Served) -> Any:
    """The request of a stream whose client leaves all of the answer in its socket."""
    client = await served.connect()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.send(post(TEXT, json.dumps({**BODIES[TEXT], "stream": True}).encode()))
    return await served.app.worker.receive()


def test_a_client_that_reads_nothing_for_long_loses_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_STALLED_S", SOON_S)

    async def scenario(served: Served) -> None:
        msg = await stream_that_is_not_read(served)
        for number in range(200):
            served.app.worker.send(UserReply(msg.uid, "x" * 100_000, num_output=number + 1))
        assert isinstance(await served.app.worker.receive(), AbortMsg)
        await wait_until(lambda: served.num_open == 0)

    run_served(scenario)


def test_at_the_end_a_client_that_reads_nothing_loses_its_stream_without_an_error_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "_READ_S", SOON_S)

    async def scenario(served: Served) -> None:
        msg = await stream_that_is_not_read(served)
        (connection,) = served.server.server_state.connections
        served.app.worker.send(UserReply(msg.uid, "x" * 16_000_000, num_output=1))
        await wait_until(lambda: connection.flow is not None and connection.flow.write_paused)
        served.app.worker.send(UserReply(msg.uid, "x", num_output=2))
        served.app.frontend.fail("the server is shutting down")
        served.server.should_exit = True
        await wait_until(lambda: not served.server.server_state.tasks)
        await wait_until(lambda: served.num_open == 0)

    run_served(scenario)
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert errors == []


def test_while_the_server_drains_answers_close_their_connections() -> None:
    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(MODELS)
        _, headers, _ = await client.response()
        assert "connection" not in headers
        served.app.frontend.refuse("the server is shutting down")
        client.send(post(TEXT, json.dumps(BODIES[TEXT]).encode()))
        status, headers, _ = await client.response()
        assert (status, headers["connection"]) == (503, "close")
        assert "retry-after" in headers
        assert await client.rest() == b""

    run_served(scenario)


def test_at_the_end_clients_that_send_all_the_time_get_answers_that_close() -> None:
    async def ask_until_closed(client: Client, pause_s: float) -> dict[str, str]:
        while True:
            client.send(MODELS)
            _, headers, _ = await client.response()
            if "connection" in headers:
                return headers
            await asyncio.sleep(pause_s)

    async def scenario(served: Served) -> None:
        clients = await served.connect_many(12)
        asking = [
            asyncio.create_task(ask_until_closed(client, number * 0.005))
            for number, client in enumerate(clients)
        ]
        await asyncio.sleep(0.2)
        served.server.should_exit = True
        for headers in await asyncio.gather(*asking):
            assert headers["connection"] == "close"
        for client in clients:
            assert await client.rest() == b""

    run_served(scenario)


@pytest.mark.parametrize("sent", [b"", HEALTH[:-2]], ids=["nothing", "half a head"])
def test_at_the_end_a_client_that_sends_nothing_more_does_not_keep_the_server(sent: bytes) -> None:
    async def scenario(served: Served) -> None:
        fresh = await served.connect()
        used = await served.connect()
        used.send(MODELS)
        await used.response()
        for client in (fresh, used):
            client.send(sent)
        served.server.should_exit = True
        for client in (fresh, used):
            answer = await asyncio.wait_for(client.rest(), 2)
            assert answer.startswith(b"HTTP/1.1 408 " if sent else b"")
            assert bool(answer) == bool(sent)
        await wait_until(lambda: served.num_open == 0)

    run_served(scenario)


# ---- clients that go away


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("more", [b"\r\n", HEALTH], ids=["blank line", "next request"])
def test_a_client_that_sends_more_during_its_answer_is_still_noticed_when_it_goes(
    more: bytes, resets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_LOOK_S", 0.01)

    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(post(TEXT, json.dumps(BODIES[TEXT]).encode()))
        await served.app.worker.receive()
        (connection,) = served.server.server_state.connections
        client.send(more)
        await wait_until(lambda: connection.flow is not None and connection.flow.read_paused)
        if resets:
            client.writer.transport.abort()
        else:
            client.close()
        assert isinstance(await served.app.worker.receive(), AbortMsg)
        await wait_until(lambda: served.num_open == 0)

    run_served(scenario)


def test_nothing_is_written_to_a_connection_whose_end_waits_for_its_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio warns of a few such writes, in words that say nothing to an operator."""
    connection_lost = Connection.connection_lost

    def lose_later(connection: Connection, exc: Exception | None) -> None:
        connection.loop.call_later(SOON_S, connection_lost, connection, exc)

    monkeypatch.setattr(Connection, "connection_lost", lose_later)

    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(post(TEXT, json.dumps({**BODIES[TEXT], "stream": True}).encode()))
        msg = await served.app.worker.receive()
        (connection,) = cast(set[Any], served.server.server_state.connections)
        for number in range(10):
            served.app.worker.send(UserReply(msg.uid, "x", num_output=number + 1))
            if number == 0:
                await client.reader.readuntil(b"data: ")
                client.abort()
                await wait_until(connection.transport.is_closing)
            await asyncio.sleep(0.001)
        await wait_until(lambda: served.app.frontend.num_open == served.num_open == 0)

    run_served(scenario)
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == []


@pytest.mark.parametrize("leaves", [False, True])
def test_a_line_behind_the_body_is_dropped_where_the_connection_closes_after_it(
    leaves: bool,
) -> None:
    """Nothing may follow there, but it is no part of the body, and its client may still go."""

    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(post(TEXT, json.dumps(BODIES[TEXT]).encode(), "connection: close"))
        msg = await served.app.worker.receive()
        client.send(b"\r\n")
        (connection,) = cast(set[Any], served.server.server_state.connections)
        await wait_until(lambda: connection._drops_input)
        if leaves:
            client.close()
            assert isinstance(await served.app.worker.receive(), AbortMsg)
        else:
            served.app.worker.send(*token_replies("ok")(msg))
            assert (await client.response())[0] == 200
            assert await client.reader.read() == b""  # an end, and no reset

    run_served(scenario)


def test_a_client_that_sends_more_during_its_answer_and_waits_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_LOOK_S", 0.01)

    async def scenario(served: Served) -> None:
        client = await served.connect()
        client.send(post(TEXT, json.dumps(BODIES[TEXT]).encode()))
        msg = await served.app.worker.receive()
        client.send(HEALTH)
        await asyncio.sleep(0.1)  # several looks
        served.app.worker.send(*token_replies("ok")(msg))
        assert (await client.response())[0] == 200
        assert (await client.response())[2] == b'{"status":"ok"}'

    run_served(scenario)
