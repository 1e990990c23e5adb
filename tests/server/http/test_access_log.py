"""The line that each request leaves in the log, and the id that its answer carries."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from typing import Any

import pytest

from minisgl.message import ReplyError, UserReply
from tests.server.harness import (
    BODIES,
    CHAT,
    CONFIG,
    MAX_BODY,
    TEXT,
    App,
    HttpCall,
    all_routes,
    run_with_app,
    token_replies,
    wait_until,
)

LOGGER = "minisgl.server.http.access_log"
LINE = re.compile(
    r"(?P<request>\S+ \S+) (?P<status>\S+) \d+\.\d ms(?P<more>.*) request_id=(?P<id>\S+)"
)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> LogLines:
    monkeypatch.setattr(logging.getLogger("minisgl"), "propagate", True)
    caplog.set_level("DEBUG", LOGGER)
    return LogLines(caplog)


class LogLines:
    """The lines of the log so far."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def __call__(self, level: int = logging.INFO) -> list[re.Match[str]]:
        own = [record for record in self._caplog.records if record.name == LOGGER]
        records = [record for record in own if record.levelno >= level]
        matches = [LINE.fullmatch(record.getMessage()) for record in records]
        assert None not in matches, [record.getMessage() for record in records]
        return [match for match in matches if match]

    def about(self, call: HttpCall) -> tuple[str, str, str]:
        """The method and route, the status, and what else is said of an answer."""
        (line,) = (line for line in self() if line["id"] == call.headers["x-request-id"])
        return line["request"], line["status"], line["more"]


def with_id(value: bytes) -> dict[str, Any]:
    return {"headers": [(b"x-request-id", value)]}


async def answered(call: HttpCall) -> HttpCall:
    await call.done
    return call


def test_a_line_has_the_method_that_the_client_sent(lines: LogLines) -> None:
    async def scenario(app: App) -> None:
        for method, path, status in (
            ("HEAD", "/v1/models", "200"),
            ("HEAD", TEXT, "405"),
            ("A" * 16, TEXT, "405"),
        ):
            call = await answered(app.call(method, path))
            request, given, _ = lines.about(call)
            assert (request.split()[0], given) == (method, status)

    run_with_app(scenario)


def test_a_long_method_is_cut(lines: LogLines) -> None:
    async def scenario(app: App) -> None:
        call = await answered(app.call("A" * 10_000, TEXT))
        assert lines.about(call)[0].split()[0] == "A" * 16

    run_with_app(scenario)


@all_routes
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_one_line_with_its_tokens_and_no_text(
    route: str, stream: bool, lines: LogLines
) -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("a", "b", num_prompt=7))
        call = await answered(app.post(route, stream=stream, user="secret"))
        assert len(lines()) == 1
        assert lines.about(call) == (f"POST {route}", "200", " prompt_tokens=7 completion_tokens=2")

    run_with_app(scenario)


def test_an_embedding_has_the_tokens_of_its_prompt(lines: LogLines) -> None:
    async def scenario(app: App) -> None:
        reply = {"finish": "length", "num_prompt": 7, "embedding": b"\0" * 8}
        app.worker.answer_with(lambda msg: [UserReply(msg.uid, **reply)])  # type: ignore[arg-type]
        call = await answered(app.post("/v1/embeddings", model="m", input="a"))
        assert lines.about(call) == (
            "POST /v1/embeddings",
            "200",
            " prompt_tokens=7 completion_tokens=0",
        )

    run_with_app(scenario)


def test_embeddings_that_nobody_waits_for_have_the_tokens_so_far(lines: LogLines) -> None:
    async def scenario(app: App) -> None:
        call = app.post("/v1/embeddings", model="m", input=["a", "b"])
        uid = (await app.worker.receive()).uid
        app.worker.send(UserReply(uid, finish="length", num_prompt=7, embedding=b"\0" * 8))
        await wait_until(lambda: app.frontend.num_open == 1)
        call.disconnect()
        await call.done
        tokens = " prompt_tokens=7 completion_tokens=0"
        assert lines.about(call) == ("POST /v1/embeddings", "499", tokens)

    run_with_app(scenario)


def test_an_error_has_its_code_and_the_route_no_name_of_the_client(lines: LogLines) -> None:
    async def scenario(app: App) -> None:
        for call, seen in (
            (app.post(CHAT, temperature=-1), (f"POST {CHAT}", "400", " error=invalid_value")),
            (
                app.call("GET", "/v1/models/secret"),
                ("GET /v1/models/{name:path}", "404", " error=model_not_found"),
            ),
            (app.call("GET", "/secret"), ("GET other", "404", " error=http_404")),
            (app.call("DELETE", CHAT), (f"DELETE {CHAT}", "405", " error=http_405")),
            (app.post(CHAT, raw=b" " * (MAX_BODY + 1)), (f"POST {CHAT}", "413", " error=http_413")),
        ):
            await call.done
            assert lines.about(call) == seen
        assert len(lines()) == 5

    run_with_app(scenario)


def test_a_request_without_a_key_leaves_a_line_and_no_key(lines: LogLines) -> None:
    async def scenario(app: App) -> None:
        for path, route in (
            ("/v1/models", "/v1/models"),
            ("/metrics", "/metrics"),  # who guesses keys is seen, though scrapes are not
            ("/v1/models/secret", "other"),
            ("/secret", "other"),
        ):
            call = await answered(app.call("GET", path, headers=[(b"authorization", b"sk-b")]))
            assert lines.about(call) == (f"GET {route}", "401", " error=invalid_api_key")

    run_with_app(scenario, config=replace(CONFIG, api_key=("sk-a",)))


def test_a_bug_is_a_line_too(lines: LogLines, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(app: App) -> None:
        monkeypatch.setattr(app.frontend.questions, "encode", lambda *_, **__: 1 / 0)
        call = app.post("/tokenize", prompt="a")
        with pytest.raises(ZeroDivisionError):
            await call.done
        assert lines.about(call) == ("POST /tokenize", "500", " error=http_500")

    run_with_app(scenario)


def test_an_error_in_a_stream_has_its_code(lines: LogLines) -> None:
    async def scenario(app: App) -> None:
        call = app.post(TEXT, stream=True)
        uid = (await app.worker.receive()).uid
        app.worker.send(UserReply(uid, "a", num_prompt=3, num_output=1))
        await wait_until(lambda: bool(call.chunks))
        app.worker.send(UserReply(uid, error=ReplyError(400, "bad_grammar", "no")))
        await call.done
        request, status, more = lines.about(call)
        assert (request, status) == (f"POST {TEXT}", "200")
        assert more == " error=bad_grammar prompt_tokens=3 completion_tokens=1"

    run_with_app(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_leaves_a_line(stream: bool, lines: LogLines) -> None:
    async def scenario(app: App) -> None:
        call = app.post(TEXT, stream=stream)
        witness = app.post(TEXT, stream=True)
        uids = [(await app.worker.receive()).uid for _ in range(2)]
        app.worker.send(*(UserReply(uid, "a", num_prompt=3, num_output=1) for uid in uids))
        await wait_until(lambda: b'"a"' in witness.body)
        call.disconnect()
        await call.done
        tokens = " prompt_tokens=3 completion_tokens=1"
        status = "200" if stream else "499"
        assert lines.about(call) == (f"POST {TEXT}", status, " disconnected" * stream + tokens)
        witness.disconnect()
        await witness.done

    run_with_app(scenario)


def test_probes_are_seen_at_debug_only(lines: LogLines) -> None:
    async def scenario(app: App) -> None:
        for path in ("/health", "/metrics"):
            await answered(app.call("GET", path))
        assert lines() == []
        assert [line["request"] for line in lines(logging.DEBUG)] == ["GET /health", "GET /metrics"]

    run_with_app(scenario)


@pytest.mark.parametrize("given", [b"abc-123", b"!" * 128, b'{"a":1}'])
def test_an_id_of_the_client_is_kept(given: bytes, lines: LogLines) -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("a"))
        body = json.dumps({**BODIES[TEXT], "stream": True}).encode()
        for call in (
            app.call("POST", TEXT, body, **with_id(given)),
            app.call("GET", "/nowhere", **with_id(given)),
        ):
            await call.done
            assert call.headers["x-request-id"] == given.decode()
            assert given.decode() in [line["id"] for line in lines()]

    run_with_app(scenario)


@pytest.mark.parametrize("given", [b"", b"a b", b"a\x7f", b"\xe9", b"a" * 129, b"a\tb"])
def test_another_one_takes_the_place_of_an_id_that_is_no_token(given: bytes) -> None:
    async def scenario(app: App) -> None:
        calls = [await answered(app.call("GET", "/version", **with_id(given))) for _ in range(2)]
        made = [call.headers["x-request-id"] for call in calls]
        assert all(re.fullmatch("req_[0-9a-f]{32}", name) for name in made)
        assert made[0] != made[1]

    run_with_app(scenario)
