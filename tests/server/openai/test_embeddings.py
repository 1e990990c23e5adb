"""POST /v1/embeddings over a real frontend."""

from __future__ import annotations

import base64
import json
import threading
from typing import Any

import numpy as np
import pytest

from minisgl.errors import InvalidRequest
from minisgl.message import AbortMsg, ReplyError, TokenIds, UserReply, unpack_ids
from minisgl.server.openai import embeddings
from minisgl.server.openai.embeddings import EMBEDDING_SAMPLING, EmbeddingRequest
from tests.server.harness import App, assert_is_error, run_with_app

ROUTE = "/v1/embeddings"
VECTORS = [[0.6, -0.8], [1.0, 0.0]]


class Threads:
    """Those in which a function is called."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.seen: set[threading.Thread] = set()

    def __call__(self, *args: Any) -> Any:
        self.seen.add(threading.current_thread())
        return self._function(*args)


@pytest.mark.parametrize(("num_inputs", "is_in_loop"), [(1, True), (8, False)])
def test_many_vectors_are_encoded_beside_the_loop(
    num_inputs: int, is_in_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Threads(embeddings._encode_entry)
    monkeypatch.setattr(embeddings, "_encode_entry", threads)
    vector = raw([0.5] * 2**13)

    async def scenario(app: App) -> None:
        app.worker.answer_with(
            lambda msg: [UserReply(msg.uid, finish="length", num_prompt=3, embedding=vector)]
        )
        call = app.post(ROUTE, model="m", input=["a"] * num_inputs)
        await call.done
        answer = json.loads(call.body)
        assert [entry["embedding"] for entry in answer["data"]] == [[0.5] * 2**13] * num_inputs
        assert answer["usage"]["total_tokens"] == 3 * num_inputs

    run_with_app(scenario)
    assert (threading.main_thread() in threads.seen) == is_in_loop


def test_a_large_answer_is_sent_a_vector_at_a_time() -> None:
    """As one piece it would be copied as a whole, and nothing else goes on meanwhile."""
    num_inputs = 8
    vector = raw([0.5] * 2**13)

    async def scenario(app: App) -> None:
        app.worker.answer_with(
            lambda msg: [UserReply(msg.uid, finish="length", num_prompt=3, embedding=vector)]
        )
        call = app.post(ROUTE, model="m", input=["a"] * num_inputs)
        await call.done
        assert len(call.body) == int(call.headers["content-length"])
        assert max(map(len, call.chunks)) < 1.5 * len(call.body) / num_inputs

    run_with_app(scenario)


def raw(vector: list[float]) -> bytes:
    return np.array(vector, dtype="<f4").tobytes()


@pytest.mark.parametrize("encoding_format", [None, "float", "base64"])
def test_vectors_come_in_the_order_of_their_inputs(encoding_format: str | None) -> None:
    async def scenario(app: App) -> None:
        call = app.post(
            ROUTE, model="m", input=["a", "b"], encoding_format=encoding_format, user="me"
        )
        msgs = [await app.worker.receive() for _ in range(2)]
        assert [(msg.prompt, msg.sampling) for msg in msgs] == [
            ("a", EMBEDDING_SAMPLING),
            ("b", EMBEDDING_SAMPLING),
        ]
        for msg, vector in reversed(list(zip(msgs, VECTORS, strict=True))):
            app.worker.send(
                UserReply(msg.uid, finish="length", num_prompt=3, embedding=raw(vector))
            )
        await call.done
        assert call.status == 200
        answer = json.loads(call.body)
        data = answer.pop("data")
        assert answer == {
            "object": "list",
            "model": "m",
            "usage": {"prompt_tokens": 6, "total_tokens": 6},
        }
        assert [(entry["object"], entry["index"]) for entry in data] == [
            ("embedding", 0),
            ("embedding", 1),
        ]
        for entry, vector in zip(data, VECTORS, strict=True):
            embedding = entry["embedding"]
            if encoding_format == "base64":
                assert base64.b64decode(embedding) == raw(vector)
            else:
                assert embedding == pytest.approx(vector)

    run_with_app(scenario)


def test_ids_go_on_as_they_are() -> None:
    async def scenario(app: App) -> None:
        call = app.post(ROUTE, model="m", input=[[1, 2], [3]], dimensions=2)
        prompts = []
        for _ in range(2):
            msg = await app.worker.receive()
            assert isinstance(msg.prompt, TokenIds)
            prompts.append(unpack_ids(msg.prompt.raw).tolist())
            app.worker.send(UserReply(msg.uid, finish="length", embedding=raw(VECTORS[0])))
        await call.done
        assert (call.status, prompts) == (200, [[1, 2], [3]])

    run_with_app(scenario)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "gpt-9"}, 404, "model"),
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": ["a", ""]}, 400, "input"),
        ({"input": ["a"] * 9}, 400, "input"),
        ({"dimensions": 3}, 400, "dimensions"),
        ({"encoding_format": "int8"}, 400, "encoding_format"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    fields: dict[str, Any], status: int, param: str
) -> None:
    async def scenario(app: App) -> None:
        call = app.post(ROUTE, **{"model": "m", "input": "a", **fields})
        await call.done
        assert_is_error(call, status, param=param)

    run_with_app(scenario)


def test_a_width_of_hundreds_of_digits_is_not_repeated() -> None:
    request = EmbeddingRequest(model="m", input="a", dimensions=10**400)
    with pytest.raises(InvalidRequest, match="dimensions must be 64, got an integer of 1329 bits"):
        request.check_dimensions(64)


def test_if_one_input_is_too_long_the_other_is_aborted_and_the_error_says_input() -> None:
    async def scenario(app: App) -> None:
        call = app.post(ROUTE, model="m", input=["a", "b"])
        first, second = [(await app.worker.receive()).uid for _ in range(2)]
        app.worker.send(
            UserReply(second, error=ReplyError(400, "context_length_exceeded", "101 tokens"))
        )
        await call.done
        assert_is_error(call, 400, code="context_length_exceeded", param="input")
        assert await app.worker.receive() == AbortMsg(first)

    run_with_app(scenario)


def test_a_client_that_goes_away_aborts_its_inputs() -> None:
    async def scenario(app: App) -> None:
        call = app.post(ROUTE, model="m", input="a")
        uid = (await app.worker.receive()).uid
        call.disconnect()
        assert await app.worker.receive() == AbortMsg(uid)
        await call.done

    run_with_app(scenario)
