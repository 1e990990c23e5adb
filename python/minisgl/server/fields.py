"""What fields of requests are made of: texts and objects that can be sent on, and models that overlook nothing."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict


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


def packable(value: dict[str, Any]) -> dict[str, Any]:
    """
    Raises:
        ValueError: it has something in it that cannot be sent on, as half a surrogate pair or a number beyond 64 bits.
    """
    try:
        msgspec.msgpack.encode(value)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"it cannot be sent on: {error}") from None
    return value


ValidText = Annotated[str, AfterValidator(_encodable)]


class Strict(BaseModel):
    """Numbers are numbers, texts are texts, and no field is overlooked."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
