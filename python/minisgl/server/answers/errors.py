"""Errors in OpenAI's form, for all endpoints but Anthropic's.

Their statuses and headers are in `http/errors.py`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from minisgl.errors import EngineFailed, RequestError
from minisgl.server.answers.objects import ResponseModel

MAX_ERROR_TEXT = 512  # characters


def shorten(text: str) -> str:
    """The beginning and the end of a text: an error repeats only an excerpt of a request."""
    if len(text) <= MAX_ERROR_TEXT:
        return text
    return f"{text[: MAX_ERROR_TEXT // 2]} … {text[-MAX_ERROR_TEXT // 2 :]}"


# Without a docstring, which would be part of the OpenAPI document.
class ErrorBody(ResponseModel):
    message: Annotated[str, AfterValidator(shorten)]
    type: str
    param: Annotated[str, AfterValidator(shorten)] | None = None
    code: str | None = None


class ErrorResponse(ResponseModel):
    error: ErrorBody


def error_body(error: RequestError | EngineFailed) -> ErrorBody:
    """OpenAI's error object for one of our errors."""
    return ErrorBody(
        message=str(error), type=_error_type(error.status), param=error.param, code=error.code
    )


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
