"""Traces for OpenTelemetry: a span for each request that the model answers, and its stages.

    POST /v1/chat/completions   ├─────────────────────────────────┤
      queue                       ├───────┤                          until its pages are there
      prefill                             ├─────┤                    until its first token
      decode                                    ├───────────────┤    until its last token

Spans are made when the answer has ended, from recorded times. A thread sends them to the collector.
They have no text of a request and no key. Attributes have the names of the semantic conventions for
HTTP and GenAI.

Only this module knows the library. It is imported if there is a collector (`--otlp-endpoint`).
"""

from __future__ import annotations

import io
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import requests
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from requests.adapters import HTTPAdapter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from urllib3.exceptions import HTTPError

from minisgl.server.http.access_log import AccessRecord, record_of
from minisgl.server.stopwatch import Stopwatch
from minisgl.utils.logger import limit_repeats
from minisgl.version import __version__

logger = logging.getLogger(__name__)

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
    "/generate": "text_completion",
}
_DISCONNECTED = "disconnected"
_FLUSH_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 10.0
_MAX_ANSWER_BYTES = 2**12  # a collector says in a few bytes how many spans it refuses


class Tracer:
    """Makes the spans of one process, and sends them to a collector from a thread of its own.

    Args:
        exporter: sends the spans.
        model: its name in the API.
    """

    def __init__(self, exporter: SpanExporter, model: str) -> None:
        self._model = model
        self._log = _ExportLog()
        own: dict[str, AttributeValue] = {
            "service.name": "minisgl",
            "service.version": __version__,
            "process.pid": os.getpid(),
        }
        resource = Resource.create(own).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("minisgl", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """An application that leaves a trace of each request that a model answers.

        Args:
            app: the `AccessLog`, whose record of a request says how it ended.
        """

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope.get("method") != "POST" or scope["path"] not in _OPERATIONS:
                await app(scope, receive, send)
                return
            try:
                await app(scope, receive, send)
            finally:
                self._make_spans(scope, record_of(scope))

        return traced

    def shut_down(self) -> None:
        """Send waiting spans, for at most two seconds."""
        flush = threading.Thread(target=self._provider.shutdown, daemon=True)
        flush.start()
        flush.join(_FLUSH_TIMEOUT_S)
        self._log.close()

    def _make_spans(self, scope: Scope, record: AccessRecord) -> None:
        epoch_ns = time.time_ns() - time.perf_counter_ns()
        route = scope["path"]
        span = self._tracer.start_span(
            f"POST {route}",
            self._parent_of(scope),
            SpanKind.SERVER,
            {"http.request.method": "POST", "http.route": route},
            start_time=epoch_ns + _nanoseconds(record.started_at),
        )
        if span.is_recording():
            self._describe(span, record, _OPERATIONS[route])
            context = set_span_in_context(span)
            for name, begin, end in _stages(record.stopwatches):
                stage = self._tracer.start_span(
                    name, context, start_time=epoch_ns + _nanoseconds(begin)
                )
                stage.end(epoch_ns + _nanoseconds(end))
        span.end()

    def _parent_of(self, scope: Scope) -> Context:
        """The client's span, if a valid `traceparent` names one."""
        headers = Headers(scope=scope)
        parents = headers.getlist("traceparent")
        if len(parents) != 1:
            return Context()
        carrier = {"traceparent": parents, "tracestate": headers.getlist("tracestate")}
        return self._propagator.extract(carrier, Context())

    def _describe(self, span: Span, record: AccessRecord, operation: str) -> None:
        attributes: dict[str, AttributeValue] = {"gen_ai.operation.name": operation}
        if record.status is not None:
            attributes["http.response.status_code"] = record.status
        if record.stopwatches:
            attributes["gen_ai.request.model"] = self._model
            attributes["gen_ai.usage.input_tokens"] = record.num_prompt
            attributes["gen_ai.usage.output_tokens"] = record.num_output
            attributes["gen_ai.usage.cache_read.input_tokens"] = record.num_cached
        if record.finish_reasons:
            attributes["gen_ai.response.finish_reasons"] = record.finish_reasons()
        error = record.error_code or (_DISCONNECTED if record.client_has_gone else None)
        if error:
            attributes["error.type"] = error
            if not _is_clients_fault(record):
                span.set_status(Status(StatusCode.ERROR, error))
        span.set_attributes(attributes)


def open_tracer(endpoint: str, model: str) -> Tracer:
    """A tracer that sends to a collector.

    Args:
        endpoint: its base URL, to which /v1/traces is added (OTLP over HTTP).
        model: its name in the API.
    """
    url = f"{endpoint.rstrip('/')}/v1/traces"
    return Tracer(OTLPSpanExporter(url, session=bounded_session()), model)


def bounded_session() -> requests.Session:
    """A session that reads a bounded part of each answer, in a bounded time."""
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, _BoundedAdapter())
    return session


class _BoundedAdapter(HTTPAdapter):
    """Cuts an answer that is too long or too slow. Its status counts all the same."""

    def send(self, *args: Any, **kwargs: Any) -> requests.Response:
        response = super().send(*args, **kwargs)
        try:
            body = _read_bounded(response)
        except HTTPError as error:
            raise requests.ConnectionError(error) from None
        response.raw = io.BytesIO(body)
        return response


def _read_bounded(response: requests.Response) -> bytes:
    deadline = time.monotonic() + _ANSWER_TIMEOUT_S
    body = bytearray()
    # Byte by byte: a read of several waits for all of them, however slowly they come.
    for byte in response.raw.stream(1):
        body += byte
        if len(body) == _MAX_ANSWER_BYTES or time.monotonic() > deadline:
            logger.warning("traces: the collector sends too much, its answer is cut")
            response.raw.close()
            break
    return bytes(body)


def _stages(stopwatches: Sequence[Stopwatch]) -> Iterator[tuple[str, float, float]]:
    """The stages of a request, from the first of its answers to the last; begin and end of each.

    There are none if no output came: the first one says when the request was admitted.
    """
    begun = [watch for watch in stopwatches if watch.first_output_at is not None]
    admissions = [watch.admitted_at for watch in begun if watch.admitted_at is not None]
    if not admissions:
        return
    admitted_at = min(admissions)
    first_output_at = min(watch.first_output_at or 0.0 for watch in begun)
    last_token_at = max(watch.last_token_at for watch in begun)
    yield "queue", min(watch.started_at for watch in stopwatches), admitted_at
    yield "prefill", admitted_at, first_output_at
    if last_token_at > first_output_at:
        yield "decode", first_output_at, last_token_at


def _is_clients_fault(record: AccessRecord) -> bool:
    """Whether its client went away or got a 4xx. The conventions do not count it as an error."""
    return record.client_has_gone or (record.status is not None and 400 <= record.status < 500)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


class _ExportLog(logging.Handler):
    """Writes the library's warnings to this module's log, at a limited rate."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        limit_repeats(__name__)
        self._library = logging.getLogger("opentelemetry")
        self._library.addHandler(self)
        self._library.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        logger.warning("traces: %s", record.getMessage())

    def close(self) -> None:
        self._library.removeHandler(self)
        super().close()
