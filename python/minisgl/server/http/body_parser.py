"""Parses and validates the bytes of a body, in time linear in their number. Knows no process."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from minisgl.errors import InvalidRequest
from minisgl.server.requests.prompts import PackedRequest, PromptRequest
from minisgl.server.requests.validation import RequestBounds
from minisgl.server.requests.validation_errors import invalid_request

R = TypeVar("R", bound=PromptRequest)
MAX_PARAMETERS = 2**18  # bytes of a request without its prompts, and of a small body
MAX_PARAMETER_VALUES = 2**14
MAX_SMALL_VALUES = 2**12  # of a body that is parsed in the event loop: it takes milliseconds
_MAX_DEPTH = 200  # of pydantic's parser; it reads an empty list that is one level deeper
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


def is_small(raw: bytes) -> bool:
    """Whether a body is parsed and validated in a few milliseconds."""
    return len(raw) <= MAX_PARAMETERS and _num_values(raw) <= MAX_SMALL_VALUES


def _num_values(raw: bytes) -> int:
    """An upper bound for the values in JSON, minus one. Commas in texts count, too."""
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def parse_body(raw: bytes, model: type[R], bounds: RequestBounds) -> R:
    """
    Raises:
        InvalidRequest: the bytes are not JSON, or not a valid request.
    """
    return _validate(_decode(raw), model, bounds)


def pack_body(raw: bytes, model: type[PromptRequest], bounds: RequestBounds) -> PackedRequest:
    """Parse a body and take its prompts out.

    Raises:
        InvalidRequest: as `parse_body` does, or its parameters are too large.
    """
    body = _decode(raw)
    request = _validate(body, model, bounds)
    packed = request.pack(body)
    num_values = _num_values(packed.parameters)
    if len(packed.parameters) > MAX_PARAMETERS or num_values > MAX_PARAMETER_VALUES:
        raise InvalidRequest(
            f"without its prompt the body has {len(packed.parameters)} bytes and "
            f"about {num_values} values; at most {MAX_PARAMETERS} bytes and "
            f"{MAX_PARAMETER_VALUES} values may be sent"
        )
    return packed


def unpack_request(packed: PackedRequest, model: type[R], bounds: RequestBounds) -> R:
    """The request that was packed."""
    return model.unpack(_from_json(packed.parameters), packed, bounds)


def _decode(raw: bytes) -> Any:
    raw = raw.removeprefix(BOM_UTF8)  # as RFC 8259, section 8.1, allows
    if not raw:
        raise InvalidRequest("the body is empty; it must be JSON", code="json_invalid")
    try:
        return _decode_json(raw)
    except (ValueError, RecursionError) as error:
        bound = f"; it may nest {_MAX_DEPTH} deep" if "recursion" in str(error) else ""
        message = f"the body is not JSON: {error}{bound}"
        raise InvalidRequest(message, code="json_invalid") from None


def _decode_json(raw: bytes) -> Any:
    """Decode JSON with pydantic's parser, which is fast and refuses more than 200 levels.

    It does not read half a surrogate pair. Python's parser does, and validation names the field.
    """
    try:
        return _from_json(raw)
    except ValueError:
        if not _HALF_PAIR.search(raw):
            raise
        return json.loads(raw)


def _from_json(raw: bytes) -> Any:
    """Decode JSON. The parser caches keys, but no other strings, since they seldom repeat."""
    return from_json(raw, cache_strings="keys")


def _validate(body: Any, model: type[R], bounds: RequestBounds) -> R:
    try:
        return model.read(body, bounds)
    except RecursionError:
        raise InvalidRequest("the body is nested too deep", code="json_invalid") from None
    except ValidationError as error:
        raise invalid_request(error, body) from None
