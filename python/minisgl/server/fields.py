"""What the fields of requests are made of: strict models, texts that can be sent on, values of bounded depth."""

from __future__ import annotations

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
        ValueError: it has something in it that cannot be sent on, as half a surrogate pair or a number beyond 64 bits.
    """
    try:
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
Schema = Annotated[dict[str, Any], AfterValidator(shallow), AfterValidator(packable)]


class Strict(BaseModel):
    """Numbers are numbers, texts are texts, and no field is overlooked."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
