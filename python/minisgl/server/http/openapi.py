"""The OpenAPI document of the routes, where FastAPI does not know better: errors, streams and keys."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer

from minisgl.server.openai.common import ErrorResponse

_UNSENT = 422  # FastAPI declares it where it is not declared; here a bad request is a 400
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 404, 413, _UNSENT, 429, 500, 503)
}
STREAMS = {**ERRORS, 200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
WITH_KEY: dict[str, Any] = {
    "dependencies": [
        Depends(HTTPBearer(auto_error=False))
    ],  # only said here: `ApiKey` has looked before
    "responses": {401: {"model": ErrorResponse}},
}


class DocumentedApp(FastAPI):
    """Its document has no status that is never sent."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        for methods in document["paths"].values():
            for operation in methods.values():
                operation["responses"].pop(str(_UNSENT), None)
        return document
