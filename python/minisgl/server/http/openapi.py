"""The OpenAPI document, where FastAPI does not know better: errors, streams and keys."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer

from minisgl.server.anthropic import MessageObject
from minisgl.server.anthropic.errors import MessageErrorResponse
from minisgl.server.openai.common import ErrorResponse
from minisgl.server.openai.responses import ResponseObject

_UNSENT = 422  # FastAPI declares it unless a route does; this server answers a bad request with 400
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 404, 413, _UNSENT, 429, 500, 503)
}
_EVENTS = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
STREAMS = {**ERRORS, 200: _EVENTS}
MESSAGE_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": MessageErrorResponse} for status in ERRORS
}
MESSAGE_STREAMS = {**MESSAGE_ERRORS, 200: {"model": MessageObject, **_EVENTS}}
RESPONSE_OBJECT = {"model": ResponseObject, **_EVENTS}
REQUIRES_KEY: dict[str, Any] = {
    # Only for the document: the middleware `ApiKey` has checked the key before.
    "dependencies": [Depends(HTTPBearer(auto_error=False))],
    "responses": {401: {"model": ErrorResponse}},
}


class DocumentedApp(FastAPI):
    """Its document has no status that is never sent, and it knows if unknown fields are refused."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        for schema in document["components"]["schemas"].values():
            if "properties" in schema and "additionalProperties" in schema:  # part of a request
                schema["additionalProperties"] = not self.state.strict_fields
        for methods in document["paths"].values():
            for operation in methods.values():
                operation["responses"].pop(str(_UNSENT), None)
        return document
