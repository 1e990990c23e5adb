"""Errors in Anthropic's form, and which answers have it."""

from __future__ import annotations

from typing import Any, Literal

from starlette.datastructures import Headers
from starlette.types import Scope

from minisgl.server.answers.errors import ErrorBody
from minisgl.server.answers.objects import OMITTED_IF_NULL, ResponseModel

_PATH = "/v1/messages"  # that of all routes of this API alone, or its beginning
_MODELS_PATH = "/v1/models"  # the same of those that OpenAI's API has, too
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ThreadRefusal(ResponseModel):
    error_code: Literal["thread_unsupported_request"] = "thread_unsupported_request"
    unsupported: list[str]


class MessageErrorBody(ResponseModel):
    type: str
    message: str
    details: ThreadRefusal | None = OMITTED_IF_NULL


class MessageErrorResponse(ResponseModel):
    type: Literal["error"] = "error"
    error: MessageErrorBody
    request_id: str | None = OMITTED_IF_NULL


def is_for_anthropic(scope: Scope) -> bool:
    """Whether a client of this API reads the answer.

    Where both APIs have a path, a header that all clients of this one send tells.
    """
    path = scope["path"]
    if path.startswith(_MODELS_PATH):
        return "anthropic-version" in Headers(scope=scope)
    return bool(path.startswith(_PATH))


def error_object(error: ErrorBody, status: int, request_id: str | None = None) -> dict[str, Any]:
    """One of our errors as Anthropic's API has it.

    A refused `thread` has details. From them Anthropic's client knows that it has to send the whole
    conversation.

    Args:
        status: of the HTTP response.
        request_id: None for an error in a stream, whose head has it.
    """
    default = "invalid_request_error" if status < 500 else "api_error"
    details = ThreadRefusal(unsupported=["thread"]) if error.param == "thread" else None
    body = MessageErrorBody(
        type=_TYPES.get(status, default), message=error.message, details=details
    )
    return MessageErrorResponse(error=body, request_id=request_id).model_dump()
