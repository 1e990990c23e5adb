"""What the fields of requests are made of: strict models, texts that can be sent on, values of bounded depth."""

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


def _plain(text: str) -> str:
    """
    Raises:
        ValueError: a null character, or half a surrogate pair, which JSON can say and UTF-8 cannot.
    """
    if "\0" in text:
        raise ValueError(f"the text has a null character at {text.index(chr(0))}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has half a surrogate pair at {error.start}") from None
    return text


def _short(text: str) -> str:
    if len(text) > MAX_SHORT:
        raise ValueError(f"it has {len(text)} characters, which is more than {MAX_SHORT}")
    return text


def packable(value: T) -> T:
    """
    Raises:
        ValueError: it has something in it that cannot be sent on, as half a surrogate pair, a number beyond 64 bits, or
            one that JSON does not have.
    """
    try:
        json.dumps(value, allow_nan=False)
        msgspec.msgpack.encode(value)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"it cannot be sent on: {error}") from None
    return value


def shallow(value: T) -> T:
    """
    Raises:
        ValueError: lists and objects are nested more than 64 deep, or a text in them has a null character.
    """
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        if any(isinstance(it, str) and "\0" in it for it in level):
            raise ValueError("a text in it has a null character")
        lists = [
            [*it, *it.values()] if isinstance(it, dict) else it
            for it in level
            if isinstance(it, dict | list)
        ]
        level = [child for children in lists for child in children]
    if level:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    return value


def _of_a_stream(options: T, info: ValidationInfo) -> T:
    if not info.data.get("stream"):
        raise ValueError("it is only allowed when stream is true")
    return options


class Only:
    """Marks a field that may have one of these values, which change nothing, or null; the rest is not supported."""

    def __init__(self, *neutral: Any) -> None:
        self._neutral = (*neutral, None)

    def _check(self, value: Any) -> Any:
        if any(
            type(value) is type(it) and value == it for it in self._neutral
        ):  # True is not 1 here
            return value
        neutral = " or ".join(map(json.dumps, self._neutral))
        message = "it is not supported; leave it out or send {neutral}"
        raise PydanticCustomError("unsupported_parameter", message, {"neutral": neutral})

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, _schema: Any, _handler: Any) -> dict[str, Any]:
        return {"enum": list(self._neutral)}


TokenId = Annotated[int, Field(ge=0, le=MAX_ID)]
ValidText = Annotated[str, AfterValidator(_plain)]
ShortText = Annotated[ValidText, AfterValidator(_short)]
Shallow = Annotated[T, AfterValidator(shallow), AfterValidator(packable)]
Schema = Shallow[dict[str, Any]]
OfStream = Annotated[T, AfterValidator(_of_a_stream)]
Limit = Annotated[int, Field(ge=1, le=MAX_COUNT)]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]


class Strict(BaseModel):
    """Numbers are numbers, texts are texts, and no field is overlooked."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def path_of(fault: dict[str, Any], body: Any) -> list[str]:
    """Where pydantic found a fault: fields and indexes, without its names for the branches of unions."""
    path = []
    *parts, last = fault["loc"][1:] or [None]
    for part in [*parts, last]:
        if (isinstance(body, dict) and part in body) or (
            isinstance(body, list) and part in range(len(body))
        ):
            path.append(str(part))
            body = body[part]
    return [*path, last] if fault["type"] == "missing" and last else path
