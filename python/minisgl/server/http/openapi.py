"""The parts of the OpenAPI document that FastAPI does not know: errors, streams and keys."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, Response
from fastapi.security import HTTPBearer

from minisgl.server.answers.errors import ErrorResponse
from minisgl.server.anthropic import MessageObject
from minisgl.server.anthropic.errors import MessageErrorResponse
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
    """Makes the OpenAPI document.

    The document has no status that is never sent, and says whether unknown fields are refused.
    `document_router` has the routes of the document and of the page that shows it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(openapi_url=None, **options)
        self._document: asyncio.Task[bytes] | None = None

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        for schema in document["components"]["schemas"].values():
            if "properties" in schema and "additionalProperties" in schema:  # part of a request
                schema["additionalProperties"] = not self.state.strict_fields
        for methods in document["paths"].values():
            for operation in methods.values():
                operation["responses"].pop(str(_UNSENT), None)
        return document

    async def document(self) -> bytes:
        """The document as JSON.

        It is made once, in a thread: that takes a second, which would block the event loop.
        """
        if self._document is None:
            self._document = asyncio.create_task(asyncio.to_thread(self._encode_document))
        return await asyncio.shield(self._document)

    def _encode_document(self) -> bytes:
        return msgspec.json.encode(self.openapi())


document_router = APIRouter(include_in_schema=False)


@document_router.get("/openapi.json")
async def openapi_document(request: Request) -> Response:
    return Response(await request.app.document(), media_type="application/json")


@document_router.get("/docs")
async def documentation(request: Request) -> HTMLResponse:
    url = request.url_for("openapi_document").path
    return get_swagger_ui_html(openapi_url=url, title=request.app.title)
