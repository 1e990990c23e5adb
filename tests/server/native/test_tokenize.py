"""/tokenize and /detokenize: what is asked of the tokenizers, and what comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minisgl.message import CodecReply, Conversation, DecodeMsg, EncodeMsg, ReplyError, pack_ids
from tests.server.harness import App, assert_is_error, run_with_app

TURN = {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}
ASKED = pytest.mark.parametrize(
    ("route", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})]
)


@pytest.mark.parametrize(
    ("body", "prompt", "special"),
    [
        ({"prompt": "hi"}, "hi", None),
        ({"prompt": ""}, "", None),
        ({"prompt": "hi", "model": "m", "add_special_tokens": False}, "hi", False),
        ({"messages": [TURN]}, Conversation([{"role": "user", "content": "hi"}]), None),
        (
            {"messages": [TURN], "add_special_tokens": True},
            Conversation([{"role": "user", "content": "hi"}]),
            True,
        ),
    ],
)
def test_a_prompt_of_either_kind_is_tokenized(
    body: dict[str, Any], prompt: Any, special: bool | None
) -> None:
    async def scenario(app: App) -> None:
        call = app.post("/tokenize", **body)
        msg = await app.worker.receive()
        assert msg == EncodeMsg(msg.uid, prompt, special)
        app.worker.send_message(CodecReply(msg.uid, ids=pack_ids([1, 70_000, 3])))
        await call.done
        assert call.status == 200
        assert json.loads(call.body) == {"tokens": [1, 70_000, 3], "count": 3, "max_model_len": 100}

    run_with_app(scenario)


@pytest.mark.parametrize("tokens", [[], [1, 2, 2**31 - 1]])
def test_tokens_become_text(tokens: list[int]) -> None:
    async def scenario(app: App) -> None:
        call = app.post("/detokenize", tokens=tokens)
        msg = await app.worker.receive()
        assert msg == DecodeMsg(msg.uid, pack_ids(tokens))
        app.worker.send_message(CodecReply(msg.uid, text="é👍"))
        await call.done
        assert (call.status, json.loads(call.body)) == (200, {"prompt": "é👍"})

    run_with_app(scenario)


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [TURN]}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "\ud83d"}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens.1"),
        ("/detokenize", {"tokens": [2**31]}, "tokens.0"),
        ("/detokenize", {"tokens": [1.5]}, "tokens.0"),
        ("/detokenize", {"tokens": [True]}, "tokens.0"),
    ],
    ids=str,
)
def test_what_is_no_such_request_is_a_400_that_names_the_field(
    route: str, body: dict[str, Any], param: str
) -> None:
    async def scenario(app: App) -> None:
        call = app.post(route, **body)
        await call.done
        assert_is_error(call, 400, type="invalid_request_error", param=param)

    run_with_app(scenario)


@ASKED
def test_another_model_is_a_404(route: str, body: dict[str, Any]) -> None:
    async def scenario(app: App) -> None:
        call = app.post(route, **body, model="gpt-9")
        await call.done
        assert_is_error(call, 404, code="model_not_found")

    run_with_app(scenario)


@ASKED
def test_a_refusal_an_engine_that_dies_and_a_full_house(route: str, body: dict[str, Any]) -> None:
    async def scenario(app: App) -> None:
        refused = app.post(route, **body)
        uid = (await app.worker.receive()).uid
        too_many = app.post(route, **body)
        await too_many.done
        assert_is_error(too_many, 429, code="queue_full")
        app.worker.send_message(
            CodecReply(uid, error=ReplyError(400, "invalid_value", "no such token", "tokens"))
        )
        await refused.done
        assert_is_error(refused, 400, message="no such token", param="tokens")
        cut = app.post(route, **body)
        await app.worker.receive()
        app.frontend.fail("the engine is gone")
        await cut.done
        assert_is_error(cut, 503, code="engine_failed")

    run_with_app(scenario, max_open_requests=1)


@ASKED
def test_a_reader_that_goes_away_leaves_nothing_behind(route: str, body: dict[str, Any]) -> None:
    async def scenario(app: App) -> None:
        call = app.post(route, **body)
        await app.worker.receive()
        assert app.frontend.num_open == 1
        call.disconnect()
        await call.done
        assert call.status == 499

    run_with_app(scenario)
