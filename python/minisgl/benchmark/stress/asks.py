"""A request of the mix, and the checks of its answer.

`events.py` checks whether a stream is well formed. `mix.py` chooses which requests are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from minisgl.benchmark.stress.events import (
    Ending,
    Json,
    openai_ending,
    require,
    texts_of_choices,
)

_EMPTY: Mapping[str, str] = {}

CheckWhole = Callable[[Json], None]
CheckEvents = Callable[[list[Json]], None]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, and the answer that has to come back.

    Attributes:
        body: bytes are sent as they are; None sends a GET.
        is_bad: the answer has to be a 4xx with an error.
        check: of a whole answer with status 200.
        check_events: of the events of a stream that has come to its end.
        ending_of: how an event ends the stream; None: the answer is whole.
    """

    path: str
    body: Json | bytes | None
    is_bad: bool = False
    headers: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    check: CheckWhole = lambda _answer: None
    check_events: CheckEvents = lambda _events: None
    ending_of: Callable[[Json], Ending | None] | None = None


def generation(path: str, body: Json, num_choices: int = 1) -> Ask:
    """A chat or text completion, whole or streamed as its body says."""
    if body.get("stream"):
        check_events = _check_stream(num_choices)
        return Ask(path, body, check_events=check_events, ending_of=openai_ending)
    return Ask(path, body, check=_check_choices(num_choices, body["max_tokens"]))


def _check_choices(num_choices: int, max_tokens: int) -> CheckWhole:
    def check(answer: Json) -> None:
        choices = answer["choices"]
        require(len(choices) == num_choices, f"{len(choices)} of {num_choices} choices came")
        require(all(choice["finish_reason"] for choice in choices), "a choice has no finish reason")
        _check_usage(answer["usage"], num_choices * max_tokens)

    return check


def _check_usage(usage: Json, most: int) -> None:
    num_output = usage["completion_tokens"]
    require(0 <= num_output <= most, f"{num_output} tokens of at most {most} came")
    total = usage["prompt_tokens"] + num_output
    require(usage["total_tokens"] == total, f"{usage['total_tokens']} tokens are not {total}")


def _check_stream(num_choices: int) -> CheckEvents:
    def check(events: list[Json]) -> None:
        texts_of_choices(events, num_choices)

    return check
