"""Traces: the span of a request and those of its stages, whatever becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from minisgl.message import ReplyError, UserReply
from minisgl.server.http import tracing
from minisgl.server.http.tracing import Tracer, open_tracer
from tests.server.harness import (
    BODIES,
    CHAT,
    CONFIG,
    RESPONSES,
    TEXT,
    App,
    HttpCall,
    answer_in_pieces,
    run_with_app,
    token_replies,
    wait_until,
)

LOGGER = "minisgl.server.http.tracing"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01".encode()
PREFILL_S = 1e-6  # less than the real time since the arrival


def traces_of(
    scenario: Callable[[App], Coroutine[Any, Any, None]], **options: Any
) -> dict[str, ReadableSpan]:
    """The spans of one request by their names, after the flush."""
    exporter = InMemorySpanExporter()
    tracer = Tracer(exporter, "m")
    run_with_app(scenario, tracer=tracer, **options)
    tracer.shut_down()
    spans = exporter.get_finished_spans()
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


def admitted(uid: int, num_output: int, **fields: Any) -> UserReply:
    """A reply of a request that was admitted a moment ago."""
    return UserReply(
        uid, "a", num_prompt=7, num_cached=4, num_output=num_output, prefill_s=PREFILL_S, **fields
    )


async def answer_twice(app: App, call: HttpCall, num_answers: int = 1) -> None:
    """A first token for every answer, then the last."""
    uids = [(await app.worker.receive()).uid for _ in range(num_answers)]
    app.worker.send(*(admitted(uid, 1) for uid in uids))
    await wait_until(lambda: call.status is not None)
    app.worker.send(*(admitted(uid, 2, finish="stop") for uid in uids))
    await call.done


def stream(app: App, route: str, **fields: Any) -> HttpCall:
    return app.post(route, stream=True, **fields)


@pytest.mark.parametrize("route", [CHAT, TEXT, RESPONSES])
def test_a_request_has_a_span_with_its_stages_in_order(route: str) -> None:
    async def scenario(app: App) -> None:
        await answer_twice(app, stream(app, route))

    spans = traces_of(scenario)
    root = spans[f"POST {route}"]
    assert root.kind == SpanKind.SERVER
    assert root.parent is None
    assert root.status.status_code == StatusCode.UNSET

    stages = [spans[name] for name in ("queue", "prefill", "decode")]
    assert len(spans) == 4
    assert [stage.parent.span_id for stage in stages] == [root.context.span_id] * 3
    times = [root.start_time]
    for stage in stages:
        times += [stage.start_time, stage.end_time]
    times.append(root.end_time)
    assert times == sorted(times)
    for before, after in pairwise(stages):
        assert before.end_time == after.start_time


def test_a_span_says_what_was_asked_and_no_text() -> None:
    async def scenario(app: App) -> None:
        await answer_twice(app, stream(app, CHAT, user="secret"))

    root = traces_of(scenario)[f"POST {CHAT}"]
    assert dict(root.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.response.finish_reasons": ("stop",),
    }


def test_several_answers_are_one_trace() -> None:
    async def scenario(app: App) -> None:
        await answer_twice(app, stream(app, TEXT, n=3), num_answers=3)

    spans = traces_of(scenario)
    assert list(spans) == ["queue", "prefill", "decode", f"POST {TEXT}"]
    attributes = spans[f"POST {TEXT}"].attributes or {}
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",) * 3
    assert attributes["gen_ai.usage.output_tokens"] == 6


def parent_of(*headers: tuple[bytes, bytes]) -> ReadableSpan | None:
    """The span of a request with these headers."""

    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("a"))
        body = json.dumps(BODIES[TEXT]).encode()
        await app.call("POST", TEXT, body, headers=headers).done

    return traces_of(scenario).get(f"POST {TEXT}")


def test_the_clients_span_is_the_parent_and_its_state_is_kept() -> None:
    span = parent_of((b"traceparent", SAMPLED), (b"tracestate", b"a=1"), (b"tracestate", b"b=2"))
    assert span is not None
    assert span.parent is not None
    assert format_trace_id(span.context.trace_id) == TRACE_ID
    assert format_span_id(span.parent.span_id) == SPAN_ID
    assert dict(span.context.trace_state) == {"a": "1", "b": "2"}


def test_what_the_client_does_not_sample_is_not_traced() -> None:
    assert parent_of((b"traceparent", SAMPLED[:-1] + b"0")) is None


@pytest.mark.parametrize(
    "headers",
    [
        [b""],
        [b"nonsense"],
        [b"00-" + b"0" * 32 + b"-00f067aa0ba902b7-01"],
        [b"ff" + SAMPLED[2:]],
        [SAMPLED + b"0" * 600],
        [b"\xff\xfe"],
        [SAMPLED, SAMPLED],
    ],
)
def test_an_invalid_header_is_ignored(headers: list[bytes]) -> None:
    span = parent_of(*((b"traceparent", value) for value in headers))
    assert span is not None
    assert span.parent is None


def test_a_refused_request_has_its_error_and_no_stages() -> None:
    async def scenario(app: App) -> None:
        await app.post(CHAT, temperature=-1).done

    (root,) = traces_of(scenario).values()
    attributes = root.attributes or {}
    assert attributes["http.response.status_code"] == 400
    assert attributes["error.type"] == "invalid_value"
    assert "gen_ai.request.model" not in attributes
    assert root.status.status_code == StatusCode.UNSET


def test_a_request_without_a_key_has_its_error() -> None:
    async def scenario(app: App) -> None:
        await app.post(CHAT).done

    (root,) = traces_of(scenario, config=replace(CONFIG, api_key=("sk-a",))).values()
    assert (root.attributes or {})["error.type"] == "invalid_api_key"


def test_an_error_in_a_stream_ends_its_span() -> None:
    async def scenario(app: App) -> None:
        call = stream(app, TEXT)
        uid = (await app.worker.receive()).uid
        app.worker.send(admitted(uid, 1))
        await wait_until(lambda: bool(call.chunks))
        app.worker.send(UserReply(uid, error=ReplyError(400, "bad_grammar", "no")))
        await call.done

    spans = traces_of(scenario)
    root = spans[f"POST {TEXT}"]
    assert (root.attributes or {})["error.type"] == "bad_grammar"
    assert (root.attributes or {})["http.response.status_code"] == 200
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "bad_grammar")
    assert set(spans) == {"queue", "prefill", f"POST {TEXT}"}


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_away_ends_its_span(streams: bool) -> None:
    async def scenario(app: App) -> None:
        call = app.post(TEXT, stream=streams)
        await app.worker.receive()
        call.disconnect()
        await call.done

    (root,) = traces_of(scenario).values()
    assert (root.attributes or {})["error.type"] == "disconnected"
    assert root.status.status_code == StatusCode.UNSET


def test_other_routes_leave_no_trace() -> None:
    async def scenario(app: App) -> None:
        await app.call("GET", "/v1/models").done
        await app.call("GET", CHAT).done
        await app.call("POST", "/nowhere").done

    assert traces_of(scenario) == {}


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(logging.getLogger("minisgl"), "propagate", True)
    monkeypatch.setattr(logging.getLogger(LOGGER), "filters", [])  # nothing was written before
    caplog.set_level("WARNING", LOGGER)
    yield caplog


def test_a_collector_that_is_away_is_one_line_and_no_failed_request(log: Any) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        tracer = open_tracer(f"http://127.0.0.1:{nobody.getsockname()[1]}/", "m")

        async def scenario(app: App) -> None:
            call = stream(app, CHAT)
            await answer_in_pieces(app.worker, call, "a", "b")
            assert call.status == 200

        run_with_app(scenario, tracer=tracer)
        asyncio.run(asyncio.to_thread(tracer.shut_down))
    lines = [record for record in log.records if record.name == LOGGER]
    assert len(lines) == 1


@contextlib.contextmanager
def collector(answer: bytes, then: bytes, pause_s: float) -> Iterator[str]:
    """One that answers each request so, and then sends more, for ever. Yields its address."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(2**20)
            with contextlib.suppress(OSError):
                self.request.sendall(answer)
                while then:
                    self.request.sendall(then)
                    time.sleep(pause_s)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LONG = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n"


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("answer", "then", "pause_s"),
    [
        (CHUNKED, b"10000\r\n" + b"x" * 65536 + b"\r\n", 0),
        (LONG, b"x" * 65536, 0),
        (CHUNKED, b"1\r\nx\r\n", 0.01),
        (LONG, b"x", 0.01),
    ],
)
def test_an_answer_of_the_collector_without_an_end_is_cut(
    answer: bytes, then: bytes, pause_s: float, log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_ANSWER_TIMEOUT_S", 0.2)
    with collector(answer, then, pause_s) as url, tracing.bounded_session() as session:
        response = session.post(url, b"spans", timeout=5)
    assert response.status_code == 200
    assert len(response.content) <= 4096
    assert "its answer is cut" in log.text


def test_a_short_answer_of_the_collector_is_read() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\n\0"
    with collector(answer, b"", 0) as url, tracing.bounded_session() as session:
        assert session.post(url, b"spans", timeout=5).content == b"\n\0"
