"""The bodies of requests: read from the connection, then parsed at a bounded cost.

A small body is parsed in the event loop. A larger one is parsed by another process
(`body_worker.py`), so that it takes no time of the loop. The total size of all bodies in memory is
bounded. Next to read: `body_parser.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from inspect import signature
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from minisgl.errors import InvalidRequest, TooManyBodies
from minisgl.server.http.body_parser import (
    MAX_PARAMETERS,
    is_small,
    parse_body,
    unpack_request,
)
from minisgl.server.http.body_worker import BodyWorker
from minisgl.server.http.client_watch import run_while_connected
from minisgl.server.http.ignored_fields import IgnoredFieldsLog
from minisgl.server.requests.prompts import PromptRequest
from minisgl.server.requests.validation import RequestBounds

R = TypeVar("R", bound=PromptRequest)
_MAX_HELD = 16  # bodies of the largest size


class BodyReader:
    """Reads the bodies of one application.

    Args:
        max_body_bytes: of one body; `BodyLimit` refuses larger ones.
    """

    def __init__(self, bounds: RequestBounds, max_body_bytes: int) -> None:
        self._bounds = bounds
        self._worker = BodyWorker(bounds, max_body_bytes)
        self._max_held_bytes = _MAX_HELD * max_body_bytes
        self._num_held_bytes = 0
        self._ignored_fields = IgnoredFieldsLog()

    def start(self, routes: Iterable[object]) -> None:
        """Start the process that parses large bodies, with the models of the routes' bodies."""
        models = [route.body_model for route in routes if isinstance(route, BodyRoute)]
        self._worker.start(model for model in dict.fromkeys(models) if model is not None)

    async def read(self, request: Request, model: type[R]) -> R:
        """Read a request, and log its ignored fields.

        Raises:
            InvalidRequest: the body is not a valid request.
            TooManyBodies: other bodies take all the memory that is reserved for bodies.
            Unavailable: as `BodyWorker.pack`.
            ClientDisconnect: the client went away.
        """
        body = await self._read(request, model)
        self._ignored_fields.add(body.ignored_fields)
        return body

    async def _read(self, request: Request, model: type[R]) -> R:
        chunks: list[bytes] = []
        try:
            num_bytes = await self._receive(request, chunks)
            _check_content_type(request)
            _check_content_encoding(request)
            if num_bytes <= MAX_PARAMETERS:
                raw = b"".join(chunks)
                if is_small(raw):
                    return parse_body(raw, model, self._bounds)
            packing = self._worker.pack(chunks, model)
            packed = await run_while_connected(request, packing)
        finally:
            self._num_held_bytes -= sum(map(len, chunks))
        return unpack_request(packed, model, self._bounds)

    async def _receive(self, request: Request, chunks: list[bytes]) -> int:
        num_bytes = 0
        async for chunk in request.stream():
            chunks.append(chunk)
            num_bytes += len(chunk)
            self._num_held_bytes += len(chunk)
            if self._num_held_bytes > self._max_held_bytes:
                raise TooManyBodies(self._num_held_bytes, self._max_held_bytes)
        return num_bytes

    def close(self) -> None:
        """End the process, if there is one."""
        self._worker.close()


class BodyRoute(APIRoute):
    """A route whose body is read by the application's `BodyReader`.

    FastAPI documents and matches such a route, but does not resolve the function's arguments: the
    body, the request, the frontend and the model. That would take as long as all other work on a
    request before it is sent to a tokenizer.
    """

    @property
    def body_model(self) -> Any:
        """The type of its body; None without a body."""
        return self.body_field and self.body_field.field_info.annotation

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        model = self.body_model
        if model is None:
            return super().get_route_handler()
        endpoint = self.endpoint
        assert list(signature(endpoint).parameters) == ["body", "request", "frontend", "model"]

        async def read_and_answer(request: Request) -> Response:
            state = request.app.state
            body = await state.body_reader.read(request, model)
            answer = await endpoint(body, request, state.frontend, state.model)
            return answer if isinstance(answer, Response) else _json_response(answer)

        return read_and_answer


def _json_response(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


def _check_content_type(request: Request) -> None:
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    is_json = media_type.startswith("application/") and media_type.endswith(("/json", "+json"))
    if not is_json:
        given = f"has the Content-Type {content_type!r}" if content_type else "has no Content-Type"
        raise InvalidRequest(
            f"the request {given}; the body must be JSON, sent with the header "
            "'Content-Type: application/json' (curl: -H 'Content-Type: application/json')",
            code="invalid_content_type",
        )


def _check_content_encoding(request: Request) -> None:
    encodings = ", ".join(request.headers.getlist("content-encoding"))
    if any(coding.strip().lower() not in ("", "identity") for coding in encodings.split(",")):
        raise InvalidRequest(
            f"the request has the Content-Encoding {encodings!r}; the body must be sent as it is, "
            "without compression",
            code="invalid_content_encoding",
        )
