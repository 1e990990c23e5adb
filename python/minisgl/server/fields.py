"""What the fields of requests are made of: strict models, texts that can be sent on, values of bounded depth."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

T = TypeVar("T")
MAX_ID = 2**31 - 1
MAX_DEPTH = 64


def _encodable(text: str) -> str:
    """
    Raises:
        ValueError: half a surrogate pair, which JSON can say and UTF-8 cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has half a surrogate pair at {error.start}") from None
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
        ValueError: lists and objects are nested more than 64 deep.
    """
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        lists = [it.values() if isinstance(it, dict) else it for it in level if isinstance(it, dict | list)]
        level = [child for children in lists for child in children]
    if level:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    return value


TokenId = Annotated[int, Field(ge=0, le=MAX_ID)]
ValidText = Annotated[str, AfterValidator(_encodable)]
Shallow = Annotated[T, AfterValidator(shallow), AfterValidator(packable)]
Schema = Shallow[dict[str, Any]]


class Strict(BaseModel):
    """Numbers are numbers, texts are texts, and no field is overlooked."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def path_of(fault: dict[str, Any], body: Any) -> list[str]:
    """Where pydantic found a fault: fields and indexes, without its names for the branches of unions."""
    path = []
    *parts, last = fault["loc"][1:] or [None]
    for part in [*parts, last]:
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and part in range(len(body))):
            path.append(str(part))
            body = body[part]
    return [*path, last] if fault["type"] == "missing" and last else path
