"""Text completions: the objects and chunks of an answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from minisgl.core import TokenLogprobs
from minisgl.message import (
    AbortMsg,
    CodecReply,
    DetokenizeMsg,
    ReplyError,
    TextLogprobs,
    UserReply,
)
from minisgl.server.answers.builder import ParsedReply
from minisgl.server.openai.completions import CompletionBuilder, CompletionRequest
from minisgl.tokenizer import Tokenizer
from tests.server.harness import (
    CONFIG,
    TEXT,
    App,
    answer_in_pieces,
    assert_is_error,
    events_of,
    run_with_app,
)
from tests.tokenizer.vocabularies import byte_fallback, byte_level

PROMPT_LOGPROBS = [TextLogprobs(b"<s>", None, []), TextLogprobs(b"hi", -0.5, [(b"a", -0.25)], 3)]
ANSWER_LOGPROBS = TextLogprobs(b"yo", -1.0, [(b"b", -0.75)])


def test_several_prompts_give_several_choices_in_order_and_one_usage() -> None:
    async def scenario(app: App) -> None:
        call = app.post(TEXT, prompt=["a", "b", "c"])
        uids = [(await app.worker.receive()).uid for _ in range(3)]
        for uid in reversed(uids):
            app.worker.send(
                UserReply(uid, f"<{uids.index(uid)}>", finish="length", num_prompt=2, num_output=1)
            )
        await call.done
        answer = json.loads(call.body)
        assert answer["object"] == "text_completion"
        assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
            (0, "<0>"),
            (1, "<1>"),
            (2, "<2>"),
        ]
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (6, 3)

    run_with_app(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_of_ids_is_their_text_and_its_log_probabilities_come_first(stream: bool) -> None:
    async def scenario(app: App) -> None:
        call = app.post(TEXT, prompt=[[1, 2], [3]], echo=True, logprobs=1, stream=stream)
        for text in ("<s>hi", "x"):
            question = await app.worker.receive()
            app.worker.send_message(CodecReply(question.uid, text=text))
        uids = [(await app.worker.receive()).uid for _ in range(2)]
        first = {
            "logprobs": [ANSWER_LOGPROBS],
            "prompt_logprobs": PROMPT_LOGPROBS,
            "num_prompt": 2,
            "num_output": 1,
        }
        app.worker.send(
            UserReply(uids[0], "yo", **first),
            UserReply(uids[1], prompt_logprobs=PROMPT_LOGPROBS[:1]),
        )
        for uid, num_prompt in zip(uids, (2, 1), strict=True):
            app.worker.send(UserReply(uid, finish="length", num_prompt=num_prompt))
        await call.done
        events = events_of(call)[:-1] if stream else [json.loads(call.body)]
        choices = [
            choice for event in events for choice in event["choices"] if choice["index"] == 0
        ]
        assert "".join(choice["text"] for choice in choices) == "<s>hiyo"
        (logprobs,) = (choice["logprobs"] for choice in choices if choice["logprobs"])
        assert logprobs == {
            "tokens": ["<s>", "hi", "yo"],
            "token_logprobs": [None, -0.5, -1.0],
            "top_logprobs": [None, {"a": -0.25, "hi": -0.5}, {"b": -0.75, "yo": -1.0}],
            "text_offset": [0, 3, 5],
        }
        assert "".join(c["text"] for e in events for c in e["choices"] if c["index"] == 1) == "x"

    run_with_app(scenario)


@pytest.mark.parametrize("num_texts", [1, 2])
def test_a_request_with_an_echo_takes_no_longer_than_another(
    num_texts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts of its prompts, and then the answers, have one limit of time together.

    Nearly all of it passes before the texts come.
    """
    limit_s = 30
    passed_s = 0.0
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed_s)

    async def scenario(app: App) -> None:
        nonlocal passed_s
        call = app.post(TEXT, prompt=[[1], [2]], echo=True)
        for _ in range(num_texts):
            question = await app.worker.receive()
            passed_s += 0.99 * limit_s / num_texts
            app.worker.send_message(CodecReply(question.uid, text="x"))
        await asyncio.wait_for(call.done, limit_s / 2)
        assert_is_error(call, 504, code="timeout")

    run_with_app(scenario, config=replace(CONFIG, request_timeout_s=limit_s))


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("prompt", ["a b", "b", " a", "é a", [259, 260], [0, 259, 260], [260, 2]])
@pytest.mark.parametrize(
    "answer", [" c a", "éc", [260, 2, 260], [100, 260], [7, 235, 0, 260]], ids=str
)
@pytest.mark.parametrize("echo", [False, True])
def test_the_text_of_each_token_is_at_its_offset(
    make: Callable[[Path], Path],
    prompt: str | list[int],
    answer: str | list[int],
    echo: bool,
    tmp_path: Path,
) -> None:
    """The tokenizer puts <s> before a text, and a space in one of two."""
    tokenizer = Tokenizer(make(tmp_path))
    ids = tokenizer.encode(prompt).tolist() if isinstance(prompt, str) else prompt
    new = answer
    if isinstance(new, str):
        new = tokenizer.encode(new, add_special_tokens=False).tolist()
    entry = TokenLogprobs(-1.0, [])
    output = DetokenizeMsg(1, new, [entry] * len(new), finish="length", prompt_tail=ids[-4:])
    if echo:
        output = structs.replace(output, prompt_logprobs=[(token, entry) for token in ids])
    reply = tokenizer.make_detokenizer().make_reply(output)
    assert reply is not None

    request = CompletionRequest(model="m", prompt=prompt, echo=echo, logprobs=0)
    shown = prompt if isinstance(prompt, str) else tokenizer.text_of(np.array(ids))
    builder = CompletionBuilder("m", request, [shown if echo else ""])
    choices = [*builder.first_choices(0), *builder.reply_choices(ParsedReply(0, [], reply))]
    text = "".join(choice["text"] for choice in choices)
    logprobs = choices[-1]["logprobs"]
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert len(offsets) == len(new) + echo * len(ids)
    for token, offset in zip(logprobs["tokens"], offsets, strict=True):
        is_whole = "\ufffd" not in token
        if is_whole and token not in ("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"):
            is_first = offset in (0, len(text) - len(reply.text))
            begin = token.removeprefix(" ") if is_first else token
            assert text.startswith((token, begin), offset)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("first", "text"), [(b"\xa9", "\ufffdb"), (b"x", "xb")], ids=["its rest", "another"]
)
def test_offsets_behind_a_prompt_that_ends_within_a_character(
    stream: bool, first: bytes, text: str
) -> None:
    """Its part is a U+FFFD of the echo. The text of an answer begins anew."""
    prompt = [TextLogprobs(b"a", None, []), TextLogprobs(b"\xc3", -0.5, [], 1)]
    answer = [TextLogprobs(first, -0.5, []), TextLogprobs(b"b", -0.5, [], 1)]

    async def scenario(app: App) -> None:
        call = app.post(TEXT, prompt=[[1, 2]], echo=True, logprobs=0, stream=stream)
        question = await app.worker.receive()
        app.worker.send_message(CodecReply(question.uid, text="a\ufffd"))
        uid = (await app.worker.receive()).uid
        begin = {"prompt_logprobs": prompt, "num_prompt": 2, "logprobs": answer[:1]}
        app.worker.send(UserReply(uid, text[:1], **begin))
        end = UserReply(uid, text[1:], logprobs=answer[1:], num_prompt=2, finish="length")
        app.worker.send(end)
        await call.done
        events = events_of(call)[:-1] if stream else [json.loads(call.body)]
        choices = [choice for event in events for choice in event["choices"]]
        assert "".join(choice["text"] for choice in choices) == f"a\ufffd{text}"
        logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        assert [at for each in logprobs for at in each["text_offset"]] == [0, 1, 2, 3]

    run_with_app(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_without_an_echo_no_token_is_the_prompts(
    stream: bool,
) -> None:
    tokens = [
        TextLogprobs(token, -0.5, [], start)
        for token, start in ((b"\xc3", 0), (b"\xa9", 0), (b"b", 1))
    ]

    async def scenario(app: App) -> None:
        call = app.post(TEXT, prompt=[[1]], logprobs=0, stream=stream)
        uid = (await app.worker.receive()).uid
        app.worker.send(UserReply(uid, "éb", logprobs=tokens, num_prompt=1, finish="length"))
        await call.done
        events = events_of(call)[:-1] if stream else [json.loads(call.body)]
        choices = [choice for event in events for choice in event["choices"]]
        logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        assert [at for each in logprobs for at in each["text_offset"]] == [0, 0, 1]

    run_with_app(scenario)


def test_of_likely_tokens_with_one_text_the_likeliest_counts() -> None:
    top = [(b"\xf0", -0.25), (b"a", -1.5), (b"\x9f", -3.0)]
    token = TextLogprobs(b"\xf0", -0.25, top)

    async def scenario(app: App) -> None:
        app.worker.answer_with(
            lambda msg: [UserReply(msg.uid, "", logprobs=[token], finish="length")]
        )
        call = app.post(TEXT, logprobs=3)
        await call.done
        (choice,) = json.loads(call.body)["choices"]
        assert choice["logprobs"]["tokens"] == ["\ufffd"]
        assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -0.25, "a": -1.5}]

    run_with_app(scenario)


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        ([], [("yo", -2.0)]),
        ([(b"a", -0.25), (b"b", -1.5)], [("a", -0.25), ("b", -1.5), ("yo", -2.0)]),
        ([(b"a", -0.25), (b"yo", -2.0)], [("a", -0.25), ("yo", -2.0)]),
    ],
    ids=["alone", "behind the likeliest", "among them"],
)
def test_the_likeliest_tokens_come_with_the_chosen_one(
    top: list[tuple[bytes, float]], expected: list[tuple[str, float]]
) -> None:
    token = TextLogprobs(b"yo", -2.0, top)

    async def scenario(app: App) -> None:
        app.worker.answer_with(
            lambda msg: [UserReply(msg.uid, "yo", logprobs=[token], finish="length")]
        )
        call = app.post(TEXT, logprobs=len(top))
        await call.done
        (choice,) = json.loads(call.body)["choices"]
        (found,) = choice["logprobs"]["top_logprobs"]
        assert list(found.items()) == expected

    run_with_app(scenario)


def test_an_echo_without_an_answer() -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(lambda msg: [UserReply(msg.uid, finish="length", num_prompt=2)])
        call = app.post(TEXT, echo=True, max_tokens=0)
        await call.done
        answer = json.loads(call.body)
        assert (answer["choices"][0]["text"], answer["choices"][0]["logprobs"]) == ("hi", None)
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (2, 0)
        silent = app.post(TEXT, max_tokens=0)
        await silent.done
        assert_is_error(silent, 400, param="max_tokens")

    run_with_app(scenario)


def test_a_text_stream_has_text_and_then_its_end() -> None:
    async def scenario(app: App) -> None:
        call = app.post(TEXT, stream=True)
        await answer_in_pieces(app.worker, call, "a", "", "b")
        *chunks, done = events_of(call)
        assert done == "[DONE]"
        assert {chunk["object"] for chunk in chunks} == {"text_completion"}
        assert [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks] == [
            ("a", None),
            ("b", "stop"),
        ]

    run_with_app(scenario)


def test_if_one_of_several_prompts_is_refused_all_are() -> None:
    async def scenario(app: App) -> None:
        call = app.post(TEXT, prompt=["a", "b"], stream=True)
        first, second = [(await app.worker.receive()).uid for _ in range(2)]
        app.worker.send(
            UserReply(first, "text"), UserReply(second, error=ReplyError(400, "c", "no", None))
        )
        await call.done
        assert_is_error(call, 400, message="no")
        assert await app.worker.receive() == AbortMsg(first)

    run_with_app(scenario)
