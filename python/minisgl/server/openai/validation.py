"""Types of which the fields of requests are made.

Requests are strict. Texts can be encoded as UTF-8, values have a bounded depth and can be sent to
other processes. Whether a request is valid is decided in time linear in its size, and the number of
its errors is bounded: lists are counted before their items are looked at, and the first bad item
ends the validation of its list. Knows no endpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from minisgl.errors import PromptTooLong
from minisgl.sampling_params import MAX_COUNT

T = TypeVar("T")
MAX_ID = 2**31 - 1
MAX_DEPTH = 64
MAX_SHORT = 8192  # characters
TOO_LONG = "too_long"
COUNT_ERRORS = (TOO_LONG, PromptTooLong.code)  # the types of errors about too many items
MAX_NODES = 2**15  # of a schema or another value of any form
MAX_PAIRS = 1024  # of an object that maps names to values


class RequestModel(BaseModel):
    """Part of a request: types are not converted, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_field(cls, fields: Any) -> Any:
        """Each unknown field is an error. Of a million of them, one is enough."""
        if not isinstance(fields, dict) or len(fields) <= len(cls.model_fields):
            return fields
        names = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {name: fields[name] for name in names if name in fields}
        unknown = next(name for name in fields if name not in names)
        kept[unknown] = None
        return kept


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """What the served model and its server can take: the context of a validation.

    Attributes:
        max_tokens: the length of the model's context. A request has no longer list of token ids,
            and no more messages or parts of messages.
        max_prompts: the number of requests that may be open.
    """

    max_tokens: int = MAX_ID
    max_prompts: int = MAX_ID

    @staticmethod
    def of(info: ValidationInfo) -> RequestBounds:
        """The bounds of a validation. Without a context there are none."""
        return info.context if isinstance(info.context, RequestBounds) else RequestBounds()


class AtMost:
    """Marks a list or an object whose items are counted before any of them is validated.

    The first bad item of a list ends its validation.

    Args:
        bound: the largest number of items, or a function that takes it from the bounds.
        item_type: of the items of a list in a union. A list that begins with another is not
            counted: its first item ends its validation.
    """

    def __init__(
        self, bound: int | Callable[[RequestBounds], int], item_type: type = object
    ) -> None:
        self._bound = bound
        self._item_type = item_type

    def _check(self, items: Any, info: ValidationInfo) -> Any:
        if not isinstance(items, list | dict):
            return items
        if isinstance(items, list) and not isinstance(next(iter(items), None), self._item_type):
            return items
        bound = self._bound if isinstance(self._bound, int) else self._bound(RequestBounds.of(info))
        if len(items) > bound:
            raise self._error(len(items), bound)
        return items

    def _error(self, count: int, bound: int) -> PydanticCustomError:
        message = "it has {count} items; at most {bound} may be sent"
        return PydanticCustomError(TOO_LONG, message, {"count": count, "bound": bound})

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        schema = handler(source)
        if schema["type"] == "list":
            schema["fail_fast"] = True
        return core_schema.with_info_before_validator_function(self._check, schema)


class FitsContext(AtMost):
    """Marks a list whose items take a token of the context at least, each of them."""

    def __init__(self, item_type: type = object) -> None:
        super().__init__(lambda bounds: bounds.max_tokens, item_type)

    def _error(self, count: int, bound: int) -> PydanticCustomError:
        cause = f"you sent {count} items of at least one token each"
        message = PromptTooLong.words.format(limit=bound, cause=cause)
        return PydanticCustomError("context_length_exceeded", message)


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
        ValueError: lists and objects are nested more than 64 deep or have more than 32,768 values,
            or a text in them has a null character.
    """
    level: list[Any] = [value]
    num_nodes = 0
    for _ in range(MAX_DEPTH + 1):
        num_nodes += sum(len(node) for node in level if isinstance(node, dict | list))
        if num_nodes > MAX_NODES:
            raise ValueError(f"it has more than {MAX_NODES} values")
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
FITS_CONTEXT = FitsContext()
FEW_PAIRS = AtMost(MAX_PAIRS)
StreamingOnly = Annotated[T, AfterValidator(_check_streaming)]
TokenLimit = Annotated[int, Field(ge=1, le=MAX_COUNT)]
NumTopLogprobs = Annotated[int, Field(ge=0, le=20)]
