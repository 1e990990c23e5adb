"""One line in the log for each request, and the id by which a client can ask about it.

The line has the method, the route as it is declared, the status, the time, the tokens and the code
of an error, but no text of a request and no key. It is written when the answer has ended, however
it ends. An answer's chunks pass through here, at the cost of a call each.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.server.anthropic.errors import is_for_anthropic
from minisgl.server.generation import Generation
from minisgl.server.http.paths import HEALTH_PATH, METRICS_PATH
from minisgl.server.metrics import Metrics
from minisgl.server.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
ANTHROPIC_ID_HEADER = "Request-Id"  # what clients of Anthropic's API read
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_RECORD = "record"  # the name in a request's state
CLIENT_CLOSED_REQUEST = 499  # the status of an answer whose client has gone
_PROBES = (HEALTH_PATH, METRICS_PATH)  # routes that are polled all the time


@dataclass(slots=True)
class AccessRecord:
    """The record of one request.

    Attributes:
        method: as the client sent it: HEAD is answered as GET, with which the scope goes on.
        status: None before the answer begins.
        is_complete: whether all of the answer was sent.
        stopwatches: of its answers.
        finish_reasons: returns the finish reasons of the answers that have ended.
    """

    request_id: str
    method: str
    started_at: float = field(default_factory=time.perf_counter)
    status: int | None = None
    is_complete: bool = False
    error_code: str | None = None
    stopwatches: Sequence[Stopwatch] = ()
    finish_reasons: Callable[[], Sequence[str]] | None = None

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompts."""
        return sum(each.num_prompt for each in self.stopwatches)

    @property
    def num_cached(self) -> int:
        """Those of them that came from the prefix cache."""
        return sum(each.num_cached for each in self.stopwatches)

    @property
    def num_output(self) -> int:
        """Tokens of its answers so far."""
        return sum(each.num_output for each in self.stopwatches)

    @property
    def client_has_gone(self) -> bool:
        return self.status == CLIENT_CLOSED_REQUEST or not self.is_complete


class AccessLog:
    """Counts and logs each request of an application, and gives its answer the request's id.

    The id is that of the client, if it has up to 128 printable characters of ASCII without blanks.
    Answers of Anthropic's API have it in the header of that API, too.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = AccessRecord(_request_id(scope), scope["method"][:16])
        scope.setdefault("state", {})[_RECORD] = record

        async def observe_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                self._metrics.count_request(route_of(scope), message["status"])
                headers = [*message.get("headers", ()), *_id_headers(scope, record.request_id)]
                message = {**message, "headers": headers}
            elif not message.get("more_body"):
                record.is_complete = True
            await send(message)

        try:
            await self._app(scope, receive, observe_and_send)
        except Exception:
            record.error_code = record.error_code or "http_500"
            raise
        finally:
            _write_line(scope, record)


def note_error(scope: Scope, code: str) -> None:
    """Add the code of an error to the line of its request."""
    record_of(scope).error_code = code


def note_generation(
    scope: Scope,
    generation: Generation,
    finish_reasons: Callable[[], Sequence[str]] | None = None,
) -> None:
    """Add tokens to the line of a request, and stages to its trace.

    Args:
        finish_reasons: is called once, when the answer has ended.
    """
    record = record_of(scope)
    record.stopwatches = generation.stopwatches
    record.finish_reasons = finish_reasons


def record_of(scope: Scope) -> AccessRecord:
    record: AccessRecord = scope["state"][_RECORD]
    return record


def num_tokens(scope: Scope) -> int:
    """The tokens of a request and its answer so far."""
    record = record_of(scope)
    return record.num_prompt + record.num_output


def charge_late_prompts(scope: Scope, charge: Callable[[int], None]) -> None:
    """Call `charge` with the tokens of prompts that are counted after their request has ended.

    Such is the prompt of a client that has gone, if a step computes it nevertheless.
    """
    for stopwatch in record_of(scope).stopwatches:
        stopwatch.charge_late = charge


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


def _id_headers(scope: Scope, request_id: str) -> list[tuple[bytes, bytes]]:
    names = [REQUEST_ID_HEADER]
    if is_for_anthropic(scope):
        names.append(ANTHROPIC_ID_HEADER)
    return [(name.lower().encode(), request_id.encode()) for name in names]


def route_of(scope: Scope) -> str:
    """The path of a request's route, as it is declared; "other" if there is none.

    A request that is refused before it reaches a route, as for its key, has its own path if that is
    declared, which only paths without parameters are.
    """
    route = scope.get("route")
    if route is not None:
        path: str = route.path
        return path
    declared = scope["app"].state.methods_of_path if "app" in scope else {}
    return scope["path"] if scope["path"] in declared else "other"


def _write_line(scope: Scope, record: AccessRecord) -> None:
    route = route_of(scope)
    is_probe = route in _PROBES and record.status != HTTPStatus.UNAUTHORIZED
    level = logging.DEBUG if is_probe else logging.INFO
    if not logger.isEnabledFor(level):
        return
    duration_ms = round(1000 * (time.perf_counter() - record.started_at), 1)
    details = _details(record)
    words = [
        name if value is True else f"{name}={value}"
        for name, value in {**details, "request_id": record.request_id}.items()
    ]
    logger.log(
        level,
        "%s %s %s %.1f ms %s",
        record.method,
        route,
        record.status or "-",
        duration_ms,
        " ".join(words),
        extra={
            "fields": {
                "method": record.method,
                "route": route,
                "status": record.status,
                "duration_ms": duration_ms,
                **details,
                "request_id": record.request_id,
            }
        },
    )


def _details(record: AccessRecord) -> dict[str, str | int]:
    details: dict[str, str | int] = {}
    if record.error_code:
        details["error"] = record.error_code
    elif not record.is_complete:
        details["disconnected"] = True
    if record.num_prompt or record.num_output:
        details["prompt_tokens"] = record.num_prompt
        details["completion_tokens"] = record.num_output
    return details
