"""POST /generate: our own names in, one text out."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from minisgl.core import SamplingParams
from minisgl.message import ReplyError, TextLogprobs, TokenIds, TokenizeMsg, UserReply, unpack_ids
from minisgl.server.native.generate import GenerateRequest
from tests.server.harness import (
    App,
    answer_in_pieces,
    assert_is_error,
    events_of,
    run_with_app,
    token_replies,
    wait_until,
)

ROUTE = "/generate"
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 4},
}
NONE = {"prompt_logprobs": None, "logprobs": None}
NOT_TAKEN = {"grammar", "embeds"}


def test_a_text_in_and_a_text_out() -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("Hel", "lo", num_prompt=5, num_cached=4))
        call = app.post(ROUTE, prompt="hi")
        await call.done
        assert call.status == 200
        assert (
            json.loads(call.body)
            == {"text": "Hello", "finish_reason": "stop", "usage": USAGE} | NONE
        )

    run_with_app(scenario)


def test_a_stream_gives_each_piece_once_and_the_usage_last() -> None:
    async def scenario(app: App) -> None:
        call = app.post(ROUTE, prompt="hi", stream=True)
        await answer_in_pieces(app.worker, call, "Hel", "lo", num_prompt=5, num_cached=4)
        assert events_of(call) == [
            {"text": "Hel", "finish_reason": None},
            {"text": "lo", "finish_reason": "stop", "usage": USAGE},
            "[DONE]",
        ]

    run_with_app(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_told_with_their_tokens(stream: bool) -> None:
    token = TextLogprobs(b"a", -0.5, [(b"a", -0.5), (b"b", -1.0)])
    expected = {"token": "a", "logprob": -0.5, "top": [["a", -0.5], ["b", -1.0]]}

    async def scenario(app: App) -> None:
        app.worker.answer_with(
            lambda msg: [
                UserReply(msg.uid, "", logprobs=[token]),
                UserReply(msg.uid, finish="stop"),
            ]
        )
        call = app.post(ROUTE, prompt="hi", logprobs=2, stream=stream)
        await call.done
        answers = events_of(call)[:-1] if stream else [json.loads(call.body)]
        assert [entry for answer in answers for entry in answer.get("logprobs", [])] == [expected]

    run_with_app(scenario)


def test_log_probabilities_of_the_prompt_stand_apart_from_the_answers() -> None:
    def replies(msg: TokenizeMsg) -> list[UserReply]:
        prompt_tokens = [TextLogprobs(b"<s>", None, []), TextLogprobs(b"hi", -0.5, [])]
        answer = TextLogprobs(b"yo", -1.0, [])
        return [
            UserReply(
                msg.uid, "yo", logprobs=[answer], prompt_logprobs=prompt_tokens, num_prompt=2
            ),
            UserReply(msg.uid, finish="stop", num_prompt=2),
        ]

    async def scenario(app: App) -> None:
        app.worker.answer_with(replies)
        for stream in (False, True):
            call = app.post(ROUTE, prompt="hi", logprobs=0, prompt_logprobs=0, stream=stream)
            await call.done
            first = events_of(call)[0] if stream else json.loads(call.body)
            assert [(entry["token"], entry["logprob"]) for entry in first["prompt_logprobs"]] == [
                ("<s>", None),
                ("hi", -0.5),
            ]
            assert [(entry["token"], entry["logprob"]) for entry in first["logprobs"]] == [
                ("yo", -1.0)
            ]

    run_with_app(scenario)


def test_parameters_have_our_own_names_and_the_models_defaults() -> None:
    given: dict[str, Any] = {
        "max_tokens": 7,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 4,
        "ignore_eos": True,
        "min_tokens": 2,
        "stop": ["x"],
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"3": 1.5},
        "logprobs": 2,
        "prompt_logprobs": 1,
        "priority": -1,
        "cache_salt": "tenant",
    }
    params = GenerateRequest(prompt="hi", **given).sampling({"temperature": 0.25, "top_p": 0.125})
    expected = {
        **given,
        "temperature": 0.25,
        "stop": ("x",),
        "stop_token_ids": (9,),
        "logit_bias": {3: 1.5},
    }
    assert params == SamplingParams(**expected)
    assert {field.name for field in fields(SamplingParams)} - NOT_TAKEN == expected.keys()
    assert GenerateRequest(prompt="hi").sampling({}) == SamplingParams()


def test_ids_go_on_as_they_are_and_a_model_may_be_named() -> None:
    async def scenario(app: App) -> None:
        call = app.post(ROUTE, prompt=[5, 6, 5], model="m")
        msg = await app.worker.receive()
        assert isinstance(msg.prompt, TokenIds)
        assert unpack_ids(msg.prompt.raw).tolist() == [5, 6, 5]
        app.worker.send(UserReply(msg.uid, finish="length"))
        await call.done
        other = app.post(ROUTE, prompt="hi", model="gpt-9")
        await other.done
        assert_is_error(other, 404, param="model")

    run_with_app(scenario)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "hi", "n": 2}, "n"),
        ({"prompt": "hi", "best_of": 2}, "best_of"),
        ({"prompt": "hi", "max_new_tokens": 3}, "max_new_tokens"),
        ({"prompt": "hi", "temperature": -1}, "temperature"),
        ({"prompt": "hi", "messages": []}, "messages"),
        ({"prompt": "hi", "text": "hi"}, "text"),
        ({"prompt": "hi", "embeds": True}, "embeds"),
        ({"prompt": "hi", "sampling_params": {"top_k": 1}}, "sampling_params"),
    ],
)
def test_what_it_does_not_take_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    async def scenario(app: App) -> None:
        call = app.post(ROUTE, **body)
        await call.done
        assert assert_is_error(call, 400)["param"].split(".")[0] == param

    run_with_app(scenario)


def test_a_refusal_comes_before_any_byte_and_a_hang_up_aborts() -> None:
    async def scenario(app: App) -> None:
        refused = app.post(ROUTE, prompt="hi", stream=True)
        app.worker.send(
            UserReply((await app.worker.receive()).uid, error=ReplyError(400, "c", "no", "prompt"))
        )
        await refused.done
        assert_is_error(refused, 400, message="no")
        call = app.post(ROUTE, prompt="hi", stream=True)
        uid = (await app.worker.receive()).uid
        app.worker.send(UserReply(uid, "part"))
        await wait_until(lambda: b"part" in call.body)
        call.disconnect()
        assert (await app.worker.receive()).uid == uid
        await call.done

    run_with_app(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_of_several_tokens_has_the_logprobs_of_each(stream: bool) -> None:
    tokens = [TextLogprobs(token, -0.5, []) for token in (b"a", b"b", b"c")]

    async def scenario(app: App) -> None:
        app.worker.answer_with(
            lambda msg: [
                UserReply(msg.uid, "ab", logprobs=tokens[:2], num_output=2),
                UserReply(msg.uid, "c", logprobs=tokens[2:], finish="stop", num_output=3),
            ]
        )
        call = app.post(ROUTE, prompt="hi", logprobs=0, stream=stream)
        await call.done
        answers = events_of(call)[:-1] if stream else [json.loads(call.body)]
        logprobs = [[token["token"] for token in answer["logprobs"]] for answer in answers]
        assert logprobs == ([["a", "b"], ["c"]] if stream else [["a", "b", "c"]])
        assert answers[-1]["usage"]["completion_tokens"] == 3

    run_with_app(scenario)
