"""Streams that are well formed, and each way in which one is not."""

from __future__ import annotations

import pytest

from minisgl.benchmark.stress.events import (
    Json,
    WrongAnswer,
    anthropic_ending,
    openai_ending,
    read_to_the_end,
    responses_ending,
    texts_of_choices,
)

DONE: Json = {"type": "[DONE]"}
ERROR: Json = {"error": {"message": "the engine starts again"}}


def chunk(text: str, reason: str | None = None, index: int = 0) -> Json:
    return {"choices": [{"index": index, "text": text, "finish_reason": reason}]}


def test_a_stream_has_one_end() -> None:
    assert read_to_the_end([chunk("a"), DONE], openai_ending)[1] == "end"
    assert read_to_the_end([chunk("a"), ERROR], openai_ending)[1] == "error"
    stop = {"type": "message_stop"}
    assert read_to_the_end([{"type": "message_start"}, stop], anthropic_ending)[1] == "end"
    failed = {"type": "response.failed"}
    assert read_to_the_end([{"type": "error"}, failed], responses_ending)[1] == "error"


@pytest.mark.parametrize(
    "events", [[], [chunk("a")], [DONE, DONE], [ERROR, DONE], [DONE, chunk("a")]]
)
def test_a_stream_without_an_end_or_with_more_after_it_is_wrong(events: list[Json]) -> None:
    with pytest.raises(WrongAnswer, match=r"end of the stream|without saying so"):
        read_to_the_end(events, openai_ending)


def test_choices_have_their_texts_and_one_reason_each() -> None:
    events = [chunk("a"), chunk("x", index=1), chunk("b", "stop"), chunk("", "length", 1), DONE]

    assert texts_of_choices(events, 2) == [("ab", "stop"), ("x", "length")]


@pytest.mark.parametrize(
    "events",
    [
        [chunk("a")],
        [chunk("a", "stop"), chunk("b")],
        [chunk("a", "stop"), chunk("", "stop")],
        [chunk("a", "stop"), chunk("a", "stop", 1)],
    ],
)
def test_choices_that_do_not_end_or_go_on_are_wrong(events: list[Json]) -> None:
    with pytest.raises(WrongAnswer, match="choice"):
        texts_of_choices(events, 1)
