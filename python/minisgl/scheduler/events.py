"""What happens to requests and steps, as typed events.

Events are emitted where they happen, to functions that listen to their type. They are structs: a
frozen dataclass takes ten times as long to make. An event that has no listener costs one truth
test, and no object is made:

    if events.request_queued:
        events.request_queued.emit(RequestQueued(uid, num_prompt))

There are three listeners:

    EventCounts    always: counts the few types from which the numbers of /metrics are made
    PrefillWatch   on rank 0: times requests from their admission on
    log_events     if this module's logger is enabled for DEBUG: logs all types

A refused request has no event. Knows nothing of tokens and pages. A listener must not change
anything in the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

import msgspec

from minisgl.core import FinishReason

logger = logging.getLogger(__name__)


class RequestQueued(msgspec.Struct, frozen=True, gc=False):
    """A request is accepted and waits for admission; its grammar is compiled, if it has one."""

    uid: int
    num_prompt: int


class RequestAdmitted(msgspec.Struct, frozen=True, gc=False):
    """A request got a row and pages, for a step that was launched.

    It happens again after each retraction.

    Attributes:
        num_tokens: of its prompt and of its answer so far.
        num_cached: leading tokens that the prefix cache supplied.
    """

    uid: int
    num_tokens: int
    num_cached: int


class ChunkLaunched(msgspec.Struct, frozen=True, gc=False):
    """Positions [start, end) of a prompt, or of a retracted request, are being computed."""

    uid: int
    start: int
    end: int


class FirstToken(msgspec.Struct, frozen=True, gc=False):
    """A request has the first token of its answer."""

    uid: int


class RequestRetracted(msgspec.Struct, frozen=True, gc=False):
    """A request loses its pages and goes back to the queue.

    Attributes:
        num_known: tokens that are to be computed again.
    """

    uid: int
    num_known: int


class RequestFinished(msgspec.Struct, frozen=True, gc=False):
    """A request has its last output. An answer that ends with an error is an abort.

    It is the only event of a request that is aborted before its grammar is compiled.
    """

    uid: int
    finish: FinishReason
    num_output: int


class StepPlanned(msgspec.Struct, frozen=True, gc=False):
    """The scheduler has decided what a step computes.

    Attributes:
        num_requests: how many requests it has slices of.
        num_tokens: all tokens in these slices.
    """

    step: int
    num_requests: int
    num_tokens: int


class StepLaunched(msgspec.Struct, frozen=True, gc=False):
    """The device computes a step."""

    step: int


class StepFinished(msgspec.Struct, frozen=True, gc=False):
    """The outputs of a step are with their requests.

    Attributes:
        num_tokens: new tokens of all requests, forced ones included.
    """

    step: int
    num_tokens: int


Event: TypeAlias = (
    RequestQueued
    | RequestAdmitted
    | ChunkLaunched
    | FirstToken
    | RequestRetracted
    | RequestFinished
    | StepPlanned
    | StepLaunched
    | StepFinished
)
E = TypeVar("E")


class Listeners(list[Callable[[E], None]], Generic[E]):
    """The functions that listen to events of one type; false if there are none."""

    def emit(self, event: E) -> None:
        for listener in self:
            listener(event)


class Events:
    """The listeners of one scheduler, by type of event."""

    def __init__(self) -> None:
        self.request_queued: Listeners[RequestQueued] = Listeners()
        self.request_admitted: Listeners[RequestAdmitted] = Listeners()
        self.chunk_launched: Listeners[ChunkLaunched] = Listeners()
        self.first_token: Listeners[FirstToken] = Listeners()
        self.request_retracted: Listeners[RequestRetracted] = Listeners()
        self.request_finished: Listeners[RequestFinished] = Listeners()
        self.step_planned: Listeners[StepPlanned] = Listeners()
        self.step_launched: Listeners[StepLaunched] = Listeners()
        self.step_finished: Listeners[StepFinished] = Listeners()

    def listen_to_all(self, listener: Callable[[Event], None]) -> None:
        """Call a function with every event from now on."""
        for listeners in vars(self).values():
            listeners.append(listener)


class EventCounts:
    """Counts events since the start.

    Attributes:
        num_steps: launched steps.
        num_computed_tokens: tokens of prompts, and of retracted requests, that were computed.
        num_cached_tokens: tokens that were not, because the prefix cache supplied them.
        num_retractions: how often requests were retracted.
    """

    def __init__(self, events: Events) -> None:
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_retractions = 0
        events.step_launched.append(self._count_step)
        events.chunk_launched.append(self._count_chunk)
        events.request_admitted.append(self._count_admission)
        events.request_retracted.append(self._count_retraction)

    def _count_step(self, _event: StepLaunched) -> None:
        self.num_steps += 1

    def _count_chunk(self, event: ChunkLaunched) -> None:
        self.num_computed_tokens += event.end - event.start

    def _count_admission(self, event: RequestAdmitted) -> None:
        self.num_cached_tokens += event.num_cached

    def _count_retraction(self, _event: RequestRetracted) -> None:
        self.num_retractions += 1


def log_events(events: Events) -> None:
    """Log all events from now on, if DEBUG is logged; they show each request's whole way."""
    if logger.isEnabledFor(logging.DEBUG):
        events.listen_to_all(_log)


def _log(event: Event) -> None:
    logger.debug("%s", event)
