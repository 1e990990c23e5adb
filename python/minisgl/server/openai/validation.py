"""Types of which the fields of requests are made, and the path of a field that fails.

Requests are strict. Texts can be encoded as UTF-8, values have a bounded depth and can be sent to
other processes. Knows no endpoint.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from minisgl.sampling_params import MAX_COUNT

T = TypeVar("T")
MAX_ID = 2**31 - 1
MAX_DEPTH = 64
MAX_SHORT = 8192  # characters


class RequestModel(BaseModel):
    """Part of a request: types are not converted, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _check_text(text: str) -> str:
    """
    Raises:
        ValueError: a null character, or half a surrogate pair, which JSON can encode and UTF-8
            cannot.
    """
    if "\0" in text:
        raise ValueError(f"the text has a null character at {text.index(chr(0))}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has half a surrogate pair at {error.start}") from None
    return text


def _check_length(text: str) -> str:
    if len(text) > MAX_SHORT:
        raise ValueError(f"it has {len(text)} characters, which is more than {MAX_SHORT}")
    return text


def check_packable(value: T) -> T:
    """
    Raises:
        ValueError: msgpack or JSON cannot encode it: half a surrogate pair, a number beyond 64
            bits, or NaN.
    """
    try:
        json.dumps(value, allow_nan=False)
        msgspec.msgpack.encode(value)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"it cannot be sent on: {error}") from None
    return value


def check_depth(value: T) -> T:
    """
    Raises:
        ValueError: lists and objects are nested more than 64 deep, or a text in them has a null
            character.
    """
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        texts = [node for node in level if isinstance(node, str)]
        if any("\0" in text for text in texts):
            raise ValueError("a text in it has a null character")
        level = [child for node in level for child in _children(node)]
    if level:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    return value


def _children(node: Any) -> list[Any]:
    """The keys and values of an object, or the items of a list."""
    if isinstance(node, dict):
        return [*node, *node.values()]
    return node if isinstance(node, list) else []


def _check_streaming(options: T, info: ValidationInfo) -> T:
    if not info.data.get("stream"):
        raise ValueError("it is only allowed when stream is true")
    return options


class NeutralOnly:
    """Marks a field that is not supported: only null and these values, which change nothing."""

    def __init__(self, *neutral: Any) -> None:
        self._neutral = (*neutral, None)

    def _check(self, value: Any) -> Any:
        neutral_values = [neutral for neutral in self._neutral if type(neutral) is type(value)]
        if value in neutral_values:  # compared within its type, because True == 1
            return value
        message = "it is not supported; leave it out or send {neutral}"
        allowed = " or ".join(map(json.dumps, self._neutral))
        raise PydanticCustomError("unsupported_parameter", message, {"neutral": allowed})

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, _schema: Any, _handler: Any) -> dict[str, Any]:
        return {"enum": list(self._neutral)}


TokenId = Annotated[int, Field(ge=0, le=MAX_ID)]
ValidText = Annotated[str, AfterValidator(_check_text)]
ShortText = Annotated[ValidText, AfterValidator(_check_length)]
Shallow = Annotated[T, AfterValidator(check_depth), AfterValidator(check_packable)]
Schema = Shallow[dict[str, Any]]
StreamingOnly = Annotated[T, AfterValidator(_check_streaming)]
TokenLimit = Annotated[int, Field(ge=1, le=MAX_COUNT)]
NumTopLogprobs = Annotated[int, Field(ge=0, le=20)]


def field_path(error: dict[str, Any], body: Any) -> list[str]:
    """The fields and indexes of an error of pydantic, without its names for branches of unions."""
    path = []
    *parents, last = error["loc"][1:] or [None]
    for key in [*parents, last]:
        if _has(body, key):
            path.append(str(key))
            body = body[key]
    if error["type"] == "missing" and last:
        path.append(last)
    return path


def _has(body: Any, key: Any) -> bool:
    if isinstance(body, dict):
        return key in body
    return isinstance(body, list) and key in range(len(body))
