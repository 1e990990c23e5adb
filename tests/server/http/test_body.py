"""Bodies of requests: parsed here or in another process, with one result, at a bounded cost."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import multiprocessing.util
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Self

import psutil
import pytest
from fastapi import Request
from starlette.types import Message

from minisgl.errors import InvalidRequest, RequestError, Unavailable
from minisgl.message import Conversation, TokenIds, open_prompt, pack_ids
from minisgl.server.anthropic.messages_request import CountTokensRequest, MessagesRequest
from minisgl.server.http import body_worker
from minisgl.server.http.body import _check_content_type
from minisgl.server.http.body_parser import (
    MAX_PARAMETERS,
    is_small,
    pack_body,
    parse_body,
    unpack_request,
)
from minisgl.server.http.body_worker import BodyWorker
from minisgl.server.http.client_watch import run_while_connected
from minisgl.server.native.generate import GenerateRequest
from minisgl.server.native.tokenize import DetokenizeRequest, TokenizeRequest
from minisgl.server.openai.chat import ChatRequest
from minisgl.server.openai.completions import CompletionRequest
from minisgl.server.openai.embeddings import EmbeddingRequest
from minisgl.server.openai.responses_request import ResponsesRequest
from minisgl.server.requests.generation_request import ConversationRequest
from minisgl.server.requests.prompts import PromptRequest
from minisgl.server.requests.validation import RequestBounds
from tests.processes.orphans import ends_with_its_program
from tests.server.harness import (
    BODIES,
    CHAT,
    MODEL,
    TEXT,
    App,
    assert_is_error,
    run,
    run_with_app,
    token_replies,
    wait_until,
)

MANY = 100_000
BOUNDS = RequestBounds(MANY, 8)
TURN = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be kind"}
BEGINNING = {"role": "assistant", "content": "The answer is"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"title": "é"}}}
REQUESTS: list[tuple[type[PromptRequest], dict[str, Any]]] = [
    (CompletionRequest, {"model": "m", "prompt": "hé", "temperature": 0.5}),
    (CompletionRequest, {"model": "m", "prompt": ["a", "b"], "stop": ["x"]}),
    (CompletionRequest, {"model": "m", "prompt": [[1, 2], [3]], "logit_bias": {"5": 1}}),
    (GenerateRequest, {"prompt": [1, 2, 2**31 - 1]}),
    (EmbeddingRequest, {"model": "m", "input": [1, 2]}),
    (ChatRequest, {"model": "m", "messages": [TURN, TURN], "tools": [TOOL], "seed": -5}),
    (ResponsesRequest, {"model": "m", "input": "hi", "instructions": "be kind"}),
    (MessagesRequest, {"model": "m", "messages": [TURN], "system": "be kind", "max_tokens": 3}),
    (MessagesRequest, {"model": "m", "messages": [TURN, BEGINNING], "max_tokens": 3}),
    (MessagesRequest, {"model": "m", "messages": [TURN, SYSTEM], "max_tokens": 3}),
    (CountTokensRequest, {"model": "m", "messages": [TURN], "thinking": {"type": "enabled"}}),
    (TokenizeRequest, {"messages": [TURN]}),
    (TokenizeRequest, {"prompt": "", "add_special_tokens": False}),
    (DetokenizeRequest, {"tokens": []}),
]


@pytest.fixture
def worker() -> Iterator[BodyWorker]:
    started = BodyWorker(BOUNDS, 2**25)
    yield started
    started.close()


def bytes_of(body: Any) -> bytes:
    return json.dumps(body).encode()


BODY = bytes_of({"model": "m", "prompt": "a"})
MORE_THAN_A_PIPE_HOLDS = bytes_of({"model": "m", "prompt": "a" * 2**22})


class BrokenRequest(CompletionRequest):
    """A request whose model has a bug."""

    @classmethod
    def read(cls, body: Any, bounds: RequestBounds) -> Self:
        raise KeyError(cls.__name__)


class EndingRequest(CompletionRequest):
    """A request that ends the process."""

    @classmethod
    def read(cls, body: Any, bounds: RequestBounds) -> Self:
        os._exit(5)


class Chunks(list[bytes]):
    """A list that a weak reference can point to."""


def process_of(worker: BodyWorker) -> SpawnProcess:
    process = worker._process._process
    assert process is not None
    return process


async def stop_process(worker: BodyWorker) -> None:
    """Let somebody stop the process once it runs."""
    await worker.pack([BODY], CompletionRequest)
    pid = process_of(worker).pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize(("model", "body"), REQUESTS, ids=str)
def test_half_a_pair_in_the_models_name_is_one_error_for_small_and_large_bodies(
    model: type[PromptRequest], body: dict[str, Any]
) -> None:
    raw = bytes_of({**body, "model": "x\ud83d"})
    for read in (parse_body, pack_body):
        with pytest.raises(InvalidRequest) as refusal:
            read(raw, model, BOUNDS)
        assert str(refusal.value) == "model: the text has half a surrogate pair at 1"
        assert refusal.value.param == "model"


@pytest.mark.parametrize(("model", "body"), REQUESTS, ids=str)
def test_a_packed_request_is_the_request(model: type[PromptRequest], body: dict[str, Any]) -> None:
    parsed = parse_body(bytes_of(body), model, BOUNDS)
    packed = unpack_request(pack_body(bytes_of(body), model, BOUNDS), model, BOUNDS)
    assert [open_prompt(prompt) for prompt in packed.prompts()] == parsed.prompts()
    prompt_fields = {model.prompt_field, *model.other_prompt_fields}
    assert packed.model_dump(exclude=prompt_fields) == parsed.model_dump(exclude=prompt_fields)
    if isinstance(parsed, ConversationRequest) and isinstance(packed, ConversationRequest):
        assert packed.allows_reasoning == parsed.allows_reasoning
        assert packed.template_variables == parsed.template_variables
        assert packed.tool_use == parsed.tool_use


@pytest.mark.parametrize(
    ("model", "field"), [(MessagesRequest, "system"), (ChatRequest, "messages")]
)
def test_every_part_of_a_prompt_may_be_large(model: type[PromptRequest], field: str) -> None:
    large = "a" * (MAX_PARAMETERS + 1)
    body = {"model": "m", "messages": [TURN], "max_tokens": 3}
    body[field] = large if field == "system" else [{"role": "user", "content": large}]
    packed = unpack_request(pack_body(bytes_of(body), model, BOUNDS), model, BOUNDS)
    (prompt,) = packed.prompts()
    conversation = open_prompt(prompt)
    assert isinstance(conversation, Conversation)
    assert conversation.messages[0]["content"] == large


def test_no_text_of_a_request_outlives_it() -> None:
    """The parser of JSON remembers strings. Those of requests would take some megabytes."""

    def parse(numbers: range) -> None:
        for number in numbers:
            body = {"model": "m", "prompt": f"text {number}", "stop": [f"end {number}"]}
            parse_body(bytes_of(body), CompletionRequest, BOUNDS)

    parse(range(100))
    before = sys.getallocatedblocks()
    parse(range(100, 2000))
    assert sys.getallocatedblocks() - before < 500


@pytest.mark.parametrize("padding", [0, MAX_PARAMETERS])
def test_a_large_body_is_answered_as_a_small_one(padding: int) -> None:
    fields = {"model": "m", "prompt": [5] * 60, "max_tokens": 3}

    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("ok"))
        call = app.post(TEXT, raw=bytes_of(fields) + b" " * padding)
        await call.done
        assert call.status == 200, call.body
        assert json.loads(call.body)["choices"][0]["text"] == "ok"
        refused = app.post(TEXT, raw=bytes_of({**fields, "suffix": "b"}) + b" " * padding)
        await refused.done
        assert_is_error(refused, 400, param="suffix", code="unsupported_parameter")

    run_with_app(scenario)


def test_the_process_packs_what_it_gets_and_names_what_is_wrong(worker: BodyWorker) -> None:
    async def scenario() -> None:
        ids = bytes_of({"model": "m", "prompt": [7] * MANY})
        packed = await worker.pack([ids[:1000], ids[1000:]], CompletionRequest)
        request = unpack_request(packed, CompletionRequest, BOUNDS)
        assert [open_prompt(prompt) for prompt in request.prompts()] == [
            TokenIds(pack_ids([7] * MANY))
        ]

        turns = bytes_of({"model": "m", "messages": [TURN] * 1000})
        packed = await worker.pack([turns], ChatRequest)
        (chat,) = unpack_request(packed, ChatRequest, BOUNDS).prompts()
        assert open_prompt(chat) == Conversation([TURN] * 1000)

        with pytest.raises(RequestError, match="must be >= 0") as refusal:
            await worker.pack([bytes_of({"model": "m", "prompt": [7, -1]})], CompletionRequest)
        assert (refusal.value.status, refusal.value.param) == (400, "prompt.1")

    run(scenario())


def test_a_worker_that_is_started_has_its_process_before_the_first_body(
    worker: BodyWorker,
) -> None:
    worker.start([CompletionRequest])
    worker._thread.submit(lambda: None).result()
    assert process_of(worker).is_alive()


def test_a_process_that_is_starting_is_deaf_to_ctrl_c(worker: BodyWorker) -> None:
    """It takes a second to import what it needs, and Ctrl-C reaches all of a terminal."""
    worker.start([CompletionRequest])
    worker._thread.submit(lambda: None).result()
    process = worker._process._process
    assert process is not None
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)

    async def scenario() -> None:
        await worker.pack([bytes_of({"model": "m", "prompt": "a"})], CompletionRequest)

    run(scenario())
    assert worker._process._process is process


def test_a_body_that_takes_too_long_ends_with_its_process_and_the_next_is_parsed(
    worker: BodyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(body_worker, "_TIMEOUT_S", 0.0)
            with pytest.raises(RequestError, match="MiB of memory or 0 s") as refusal:
                await worker.pack([BODY], CompletionRequest)
            assert (refusal.value.status, refusal.value.code) == (400, "body_too_costly")
        await worker.pack([BODY], CompletionRequest)

    run(scenario())


def test_a_body_that_takes_too_much_memory_ends_its_process_and_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_worker, "_MEMORY_BASE", 2**28)
    monkeypatch.setattr(body_worker, "_TIMEOUT_S", 100.0)
    worker = BodyWorker(BOUNDS, 0)
    process = worker._process
    started: list[SpawnProcess] = []
    start = process.start

    def start_and_note() -> None:
        start()
        started.append(process_of(worker))

    monkeypatch.setattr(process, "start", start_and_note)
    lists = b'{"model": "m", "prompt": [%b]}' % b",".join([b"[]"] * 2**22)

    async def scenario() -> None:
        with pytest.raises(RequestError, match="more than 256 MiB of memory") as refusal:
            await worker.pack([lists], CompletionRequest)
        assert (refusal.value.status, refusal.value.code) == (400, "body_too_costly")
        assert len(started) == 1
        await worker.pack([BODY], CompletionRequest)

    try:
        run(scenario())
    finally:
        worker.close()


def test_a_process_that_somebody_has_stopped_is_replaced(
    worker: BodyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        await stop_process(worker)
        with monkeypatch.context() as patch:
            patch.setattr(body_worker, "_TIMEOUT_S", 0.1)
            with pytest.raises(RequestError, match="MiB of memory or 0 s"):
                await worker.pack([MORE_THAN_A_PIPE_HOLDS], CompletionRequest)
        await worker.pack([BODY], CompletionRequest)

    run(scenario())


def test_a_body_whose_process_somebody_kills_is_parsed_by_another(
    worker: BodyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        await worker.pack([BODY], CompletionRequest)
        first = process_of(worker)
        connect = worker._process._connect

        def connect_and_kill() -> Connection:
            """Kill the first process between the look whether it lives and the body."""
            pipe = connect()
            first.kill()
            return pipe

        monkeypatch.setattr(worker._process, "_connect", connect_and_kill)
        packed = await worker.pack([MORE_THAN_A_PIPE_HOLDS], CompletionRequest)
        assert len(packed.prompts) == 1
        assert process_of(worker) is not first

    run(scenario())


def test_of_a_process_that_was_killed_nothing_stays(
    worker: BodyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No entry in the system's table, once the next body has come, or at the end."""
    pids: list[int] = []
    start = worker._process.start

    def start_and_note() -> None:
        start()
        pid = process_of(worker).pid
        assert pid is not None
        pids.append(pid)

    async def scenario() -> None:
        monkeypatch.setattr(worker._process, "start", start_and_note)
        await worker.pack([BODY], CompletionRequest)
        process_of(worker).kill()
        await worker.pack([BODY], CompletionRequest)
        await stop_process(worker)  # else its answer may come before anybody looks at the time
        with monkeypatch.context() as patch:
            patch.setattr(body_worker, "_TIMEOUT_S", 0.0)
            with pytest.raises(RequestError, match="MiB of memory or 0 s"):
                await worker.pack([BODY], CompletionRequest)
        # Two, or three if the time was over before anybody looked whether the second one lives.
        assert not any(map(psutil.pid_exists, pids))
        await worker.pack([BODY], CompletionRequest)

    run(scenario())
    worker.close()
    assert len(pids) >= 3
    assert not any(map(psutil.pid_exists, pids))


def test_a_process_that_somebody_kills_twice_is_not_the_clients_fault(
    worker: BodyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = worker._process._connect
    killed: list[SpawnProcess] = []

    def connect_and_kill() -> Connection:
        pipe = connect()
        killed.append(process_of(worker))
        killed[-1].kill()
        return pipe

    async def scenario() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(worker._process, "_connect", connect_and_kill)
            with pytest.raises(Unavailable, match="was killed twice"):
                await worker.pack([MORE_THAN_A_PIPE_HOLDS], CompletionRequest)
        assert len(killed) == 2
        await worker.pack([BODY], CompletionRequest)

    run(scenario())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (BrokenRequest, "(?s)large bodies fails:.*Traceback.*KeyError: 'BrokenRequest'"),
        (EndingRequest, "large bodies ends with exit code 5"),
    ],
)
def test_a_bug_in_the_process_is_no_refusal_and_the_next_body_is_parsed(
    model: type[PromptRequest], reason: str, worker: BodyWorker
) -> None:
    async def scenario() -> None:
        with pytest.raises(RuntimeError, match=reason):
            await worker.pack([BODY], model)
        await worker.pack([BODY], CompletionRequest)

    run(scenario())


def test_a_process_that_cannot_import_its_requests_is_a_bug(worker: BodyWorker) -> None:
    worker._process.model_names = ["minisgl.server.openai.completions:Gone"]

    async def scenario() -> None:
        with pytest.raises(RuntimeError, match="large bodies ends with exit code 1"):
            await worker.pack([BODY], CompletionRequest)

    run(scenario())


def test_a_bug_in_the_process_is_a_500_whose_id_leads_to_its_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("minisgl"), "propagate", True)
    name = body_worker._name_of(BrokenRequest)
    monkeypatch.setattr(body_worker, "_name_of", lambda _: name)

    async def scenario(app: App) -> None:
        call = app.post(TEXT, raw=BODY + b" " * MAX_PARAMETERS)
        with pytest.raises(RuntimeError, match="KeyError"):
            await call.done
        error = assert_is_error(call, 500, message="internal server error", type="server_error")
        assert "KeyError" not in str(error)
        request_id = call.headers["x-request-id"]
        assert f"POST {TEXT} fails, request_id={request_id}\n" in caplog.text
        assert "KeyError: 'BrokenRequest'" in caplog.text

    run_with_app(scenario)


def test_the_memory_of_its_parent_does_not_count_as_the_processs() -> None:
    """Each large body would get a new process as soon as its API process is large."""
    child = "from minisgl.server.http.body_process import _peak_memory; print(_peak_memory())"
    parent = f"""
import subprocess, sys
large = b"x" * 2**29
subprocess.run([sys.executable, "-c", {child!r}], check=True)
"""
    output = subprocess.run([sys.executable, "-c", parent], check=True, capture_output=True).stdout
    assert 2**20 < int(output) < 2**29


def test_the_process_ends_with_its_server_even_if_that_is_killed() -> None:
    program = f"""
import asyncio, signal
from minisgl.server.http.body_worker import BodyWorker
from minisgl.server.openai.completions import CompletionRequest
from minisgl.server.requests.validation import RequestBounds
worker = BodyWorker(RequestBounds(100, 8), 2**25)
asyncio.run(worker.pack([{BODY!r}], CompletionRequest))
print(worker._process._process.pid, flush=True)
signal.pause()
"""
    assert ends_with_its_program(program)


def test_a_process_that_cannot_be_started_is_not_the_clients_fault(
    worker: BodyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spawn(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    async def scenario() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(multiprocessing.util, "spawnv_passfds", spawn)
            for _ in range(5):
                with pytest.raises(Unavailable, match="cannot be started: "):
                    await worker.pack([BODY], CompletionRequest)
        await worker.pack([BODY], CompletionRequest)

    run(scenario())


def test_bodies_that_wait_when_the_server_closes_are_not_the_clients_fault(
    worker: BodyWorker,
) -> None:
    async def scenario() -> None:
        await stop_process(worker)
        waiting = [asyncio.create_task(worker.pack([BODY], CompletionRequest)) for _ in range(3)]
        await asyncio.sleep(0)
        worker.close()
        waiting.append(asyncio.create_task(worker.pack([BODY], CompletionRequest)))
        for task in waiting:
            with pytest.raises(Unavailable, match="the server is shutting down"):
                await asyncio.wait_for(task, 10)

    run(scenario())


def test_a_client_that_goes_away_takes_its_body_along(worker: BodyWorker) -> None:
    """Nobody counts its bytes any more, and the body before it may take long."""

    async def scenario() -> None:
        first = asyncio.create_task(worker.pack([BODY], CompletionRequest))
        chunks = Chunks([BODY])
        second = asyncio.create_task(worker.pack(chunks, CompletionRequest))
        held = weakref.ref(chunks)
        del chunks
        await asyncio.sleep(0)
        assert held() is not None
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        del second
        await asyncio.sleep(0)  # this task was woken by the second, which the loop holds until then
        gc.collect()
        assert not first.done()
        assert held() is None
        await first

    run(scenario())


def test_a_body_does_not_wait_for_a_larger_one_that_came_before(worker: BodyWorker) -> None:
    """But for the one that is being parsed."""

    async def scenario() -> None:
        bodies = [BODY, BODY + b" " * 10_000, BODY]
        ended: list[int] = []
        for index, body in enumerate(bodies):
            task = asyncio.create_task(worker.pack([body], CompletionRequest), name=str(index))
            task.add_done_callback(lambda task: ended.append(int(task.get_name())))
        await wait_until(lambda: len(ended) == 3)
        assert ended == [0, 2, 1]

    run(scenario())


def test_a_body_whose_client_has_just_gone_is_not_parsed(
    worker: BodyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task that waits for it has not run since."""
    parsed: list[list[bytes]] = []
    pack = worker._process.pack

    def note(job: Any, chunks: list[bytes], deadline: float) -> Any:
        parsed.append(chunks)
        return pack(job, chunks, deadline)

    async def scenario() -> None:
        monkeypatch.setattr(worker._process, "pack", note)
        bodies = [[BODY] for _ in range(2)]
        first, second = [
            asyncio.create_task(worker.pack(body, CompletionRequest)) for body in bodies
        ]
        await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            patch.setattr(worker, "_start_next", lambda: None)
            await first
        second.cancel()
        worker._start_next()
        with pytest.raises(asyncio.CancelledError):
            await second

    run(scenario())
    assert len(parsed) == 1


def never_disconnected() -> Request:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    return Request({"type": "http"}, receive)


def test_a_refused_body_leaves_no_cycle_that_keeps_it(worker: BodyWorker) -> None:
    """Its bytes would stay, and nobody counts them, until a collection of garbage."""

    async def scenario() -> None:
        await worker.pack([BODY], CompletionRequest)
        chunks = Chunks([b"{"])
        held = weakref.ref(chunks)
        gc.collect()
        gc.disable()
        try:
            packing = worker.pack(chunks, CompletionRequest)
            task = asyncio.create_task(run_while_connected(never_disconnected(), packing))
            del chunks, packing
            await asyncio.wait((task,))
            assert isinstance(task.exception(), RequestError)
            del task
            # The tasks of the request end, and the worker's thread lets go of it.
            await wait_until(lambda: held() is None)
        finally:
            gc.enable()

    run(scenario())


def test_a_client_that_goes_away_gives_its_turn_to_the_next(worker: BodyWorker) -> None:
    async def scenario() -> None:
        waiting = [asyncio.create_task(worker.pack([BODY], CompletionRequest)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[1].cancel()
        await waiting[2]

    run(scenario())


@pytest.mark.parametrize(
    ("raw", "small"),
    [
        (b"[" + b"1," * 100 + b"1]", True),
        (b"[" + b"1," * 5000 + b"1]", False),
        (b"[" * 5000, False),
        (b'"' + b"a" * (MAX_PARAMETERS - 2) + b'"', True),
        (b'"' + b"a" * MAX_PARAMETERS + b'"', False),
    ],
    ids=lambda value: str(len(value)) if isinstance(value, bytes) else str(value),
)
def test_what_is_small_has_few_bytes_and_few_values(raw: bytes, small: bool) -> None:
    assert is_small(raw) == small


def test_parameters_are_bounded() -> None:
    for fields in ({"user": "a" * MAX_PARAMETERS}, {"guided_json": {"enum": [0] * 20_000}}):
        body = bytes_of({"model": "m", "prompt": "a", **fields})
        with pytest.raises(InvalidRequest, match=f"at most {MAX_PARAMETERS} bytes"):
            pack_body(body, CompletionRequest, BOUNDS)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "JSON"),
        (b"[" * 10**6, "JSON"),
        (b'{"a":' * 10**5, "JSON"),
        (b"[" * 10**6 + b'"\\ud800"', "JSON"),
        (b"\xff\xfe", "JSON"),
        (b"9" * 10**6, "JSON"),
    ],
    ids=lambda value: str(value)[:10],
)
def test_what_is_no_json_is_an_error(raw: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        parse_body(raw, ChatRequest, BOUNDS)


def test_bodies_of_many_requests_are_bounded_together() -> None:
    async def scenario(app: App) -> None:
        reader = app.app.state.body_reader
        reader._num_held_bytes = reader._max_held_bytes
        call = app.post(CHAT)
        await call.done
        assert_is_error(call, 429, code="too_many_bodies")
        reader._num_held_bytes = 0
        body = json.dumps(BODIES[CHAT]).encode()
        refused = app.call("POST", CHAT, body[:-1])
        await refused.done
        assert_is_error(refused, 400, code="json_invalid")
        assert reader._num_held_bytes == 0

    run_with_app(scenario)


@pytest.mark.parametrize(
    ("content_type", "is_json"),
    [
        ("application/json", True),
        ("application/JSON; charset=utf-8", True),
        ("application/problem+json", True),
        ("text/plain", False),
        ("application/x-www-form-urlencoded", False),
        ("", False),
    ],
)
def test_a_body_of_another_type_is_refused_by_its_type(content_type: str, is_json: bool) -> None:
    headers = [(b"content-type", content_type.encode())]
    request = Request({"type": "http", "headers": headers})
    if is_json:
        _check_content_type(request)
        return
    given = f"has the Content-Type '{content_type}'" if content_type else "has no Content-Type"
    with pytest.raises(InvalidRequest, match=given) as refusal:
        _check_content_type(request)
    assert "header 'Content-Type: application/json'" in str(refusal.value)
    assert refusal.value.code == "invalid_content_type"


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        (["gzip"], "gzip"),
        (["BR"], "BR"),
        (["identity, zstd"], "identity, zstd"),
        (["identity", "gzip"], "identity, gzip"),
        ([""], None),
        (["identity"], None),
        (["Identity"], None),
        ([], None),
    ],
)
def test_a_compressed_body_is_refused_by_its_encoding(
    headers: list[str], named: str | None
) -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("ok"))
        sent = [(b"content-encoding", value.encode()) for value in headers]
        body = b"\x1f\x8b\x08" if named else json.dumps(BODIES[CHAT]).encode()
        call = app.call("POST", CHAT, body, headers=sent)
        await call.done
        if named is None:
            assert call.status == 200, call.body
            return
        error = assert_is_error(call, 400, code="invalid_content_encoding")
        assert f"the Content-Encoding {named!r}" in error["message"]

    run_with_app(scenario)


@pytest.mark.parametrize("padding", [0, 2 * MAX_PARAMETERS])
def test_the_error_of_a_body_that_nests_too_deep_names_the_bound(padding: int) -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("ok"))
        for depth, status in ((199, 200), (210, 400)):
            deep = '{"a": ' * depth + "1" + "}" * depth
            text = json.dumps({**BODIES[TEXT], "prompt": "hi" + " " * padding})
            call = app.call("POST", TEXT, f'{text[:-1]}, "unknown": {deep}}}'.encode())
            await call.done
            assert call.status == status, call.body
        error = assert_is_error(call, 400, code="json_invalid")
        assert "it may nest 200 deep" in error["message"]

    run_with_app(scenario, model=replace(MODEL, max_seq_len=4 * MAX_PARAMETERS))


@pytest.mark.parametrize("padding", [0, 2 * MAX_PARAMETERS])
def test_a_byte_order_mark_before_json_is_dropped(padding: int) -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("ok"))
        text = json.dumps({**BODIES[TEXT], "prompt": "hi" + " " * padding})
        call = app.call("POST", TEXT, b"\xef\xbb\xbf" + text.encode())
        await call.done
        assert call.status == 200, call.body
        alone = app.call("POST", TEXT, b"\xef\xbb\xbf")
        await alone.done
        assert "the body is empty" in assert_is_error(alone, 400, code="json_invalid")["message"]

    run_with_app(scenario, model=replace(MODEL, max_seq_len=4 * MAX_PARAMETERS))
