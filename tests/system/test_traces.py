"""The traces of a real server, as a collector gets them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.system.harness import MODEL, Program, small_server

pytestmark = pytest.mark.slow
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"
PROMPT = "a word that nobody else has: quixotry"


class Collector(HTTPServer):
    """Keeps the requests that it gets at /v1/traces."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for body in self.bodies
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/traces":
            self.server.bodies.append(body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def running_collector() -> Iterator[Collector]:
    with Collector() as collector:
        serving = threading.Thread(target=collector.serve_forever)
        serving.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            serving.join()


def test_a_collector_gets_the_trace_of_a_streamed_chat_at_the_end_of_the_server(
    folder: Path,
) -> None:
    with running_collector() as collector:
        options = ["--otlp-endpoint", collector.url, "--api-workers", "2"]
        with Program(*small_server(folder, *options)) as program:
            with program.wait_ready().client("sk-secret") as client:
                chunks = client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": PROMPT}],
                    max_tokens=20,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"ignore_eos": True},
                    extra_headers={"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"},
                )
                usage = list(chunks)[-1].usage
            program.process.terminate()
            assert program.wait() == 0
            program.assert_nothing_is_left()

    spans = {span.name: span for span in collector.spans}
    root = spans["POST /v1/chat/completions"]
    assert set(spans) == {root.name, "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE_ID}
    assert root.parent_span_id.hex() == SPAN_ID
    assert root.kind == Span.SpanKind.SPAN_KIND_SERVER

    stages = [spans[name] for name in ("queue", "prefill", "decode")]
    assert {stage.parent_span_id for stage in stages} == {root.span_id}
    times = [root.start_time_unix_nano]
    for stage in stages:
        times += [stage.start_time_unix_nano, stage.end_time_unix_nano]
    times.append(root.end_time_unix_nano)
    assert times == sorted(times)

    attributes = {each.key: each.value for each in root.attributes}
    assert usage is not None
    assert attributes["gen_ai.usage.input_tokens"].int_value == usage.prompt_tokens
    assert attributes["gen_ai.usage.output_tokens"].int_value == 20
    for secret in (b"quixotry", b"sk-secret"):
        assert not any(secret in body for body in collector.bodies)
