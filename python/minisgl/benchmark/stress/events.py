"""Checks that a stream, as clients get it, is well formed and has exactly one end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPResponse
from typing import Any, Literal

Json = dict[str, Any]
Ending = Literal["end", "error"]


class WrongAnswer(Exception):
    """An answer is not what the server promises."""


def require(holds: bool, what: str) -> None:
    """
    Raises:
        WrongAnswer: the condition does not hold.
    """
    if not holds:
        raise WrongAnswer(what)


def openai_ending(event: Json) -> Ending | None:
    """How an event of a chat or of a text completion ends its stream, if it does."""
    if event == {"type": "[DONE]"}:
        return "end"
    return "error" if "error" in event else None


def anthropic_ending(event: Json) -> Ending | None:
    """How an event of a message ends its stream, if it does."""
    return {"message_stop": "end", "error": "error"}.get(event["type"])  # type: ignore[return-value]


def responses_ending(event: Json) -> Ending | None:
    """How an event of a response ends its stream, if it does."""
    if event["type"] in ("response.completed", "response.incomplete"):
        return "end"
    return "error" if event["type"] == "response.failed" else None


def events_of(response: HTTPResponse) -> Iterator[Json]:
    """The events of a stream as they come; `[DONE]` is an event of that type.

    Raises:
        WrongAnswer: a line is no server-sent event with JSON, or the body is cut off.
    """
    for line in response:
        text = line.decode().rstrip("\r\n")
        if not text or text.startswith(("event: ", ": ")):
            continue
        require(text.startswith("data: "), f"a line of a stream is {text[:100]!r}")
        yield _event(text.removeprefix("data: "))
    require(response.isclosed(), "the body of a stream ends without its last chunk")


def _event(text: str) -> Json:
    if text == "[DONE]":
        return {"type": "[DONE]"}
    try:
        event = json.loads(text)
    except ValueError:
        raise WrongAnswer(f"an event of a stream is no JSON: {text[:100]!r}") from None
    require(isinstance(event, dict), f"an event of a stream is no object: {text[:100]!r}")
    return dict(event)


def read_to_the_end(
    events: Iterable[Json], ending_of: Callable[[Json], Ending | None]
) -> tuple[list[Json], Ending]:
    """All events of a stream, and how it ended.

    Raises:
        WrongAnswer: it has no end, or events after it.
    """
    seen = []
    endings: list[Ending] = []
    for event in events:
        require(not endings, f"an event comes after the end of the stream: {str(event)[:100]}")
        seen.append(event)
        if ending := ending_of(event):
            endings.append(ending)
    require(bool(endings), f"a stream ends after {len(seen)} events without saying so")
    return seen, endings[0]


def texts_of_choices(events: Iterable[Json], num_choices: int) -> list[tuple[str, str]]:
    """The text and finish reason of each choice of a stream of OpenAI's.

    Raises:
        WrongAnswer: a choice has no finish reason, two of them, or events after it.
    """
    texts = [""] * num_choices
    reasons: dict[int, str] = {}
    for choice in (choice for event in events for choice in event.get("choices", [])):
        index = choice["index"]
        require(0 <= index < num_choices, f"choice {index} of {num_choices}")
        require(index not in reasons, f"choice {index} goes on after its finish reason")
        texts[index] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        if choice["finish_reason"]:
            reasons[index] = choice["finish_reason"]
    require(len(reasons) == num_choices, f"{len(reasons)} of {num_choices} choices have ended")
    return [(text, reasons[index]) for index, text in enumerate(texts)]
