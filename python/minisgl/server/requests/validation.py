"""The types of fields of requests.

Types are not converted. Texts can be encoded as UTF-8, values have a bounded depth and can be sent
to other processes. A request is validated in time linear in its size, and the number of errors is
bounded: lists are counted before their items are validated, and the first bad item ends the
validation of its list. A field that no model declares is ignored, and its name is noted. Knows no
endpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)
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
MAX_IGNORED = 64  # fields of one request whose names are noted
MAX_NAME = 64  # characters of such a name


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """Limits of the served model and its server.

    Attributes:
        max_tokens: the length of the model's context. It bounds the token ids of a list, messages,
            and parts of messages.
        max_prompts: the number of requests that may be open.
        strict_fields: whether a field that no model declares is an error.
        has_reasoning_switch: whether the chat template has a variable for how much to reason.
        always_reasons: whether the chat template begins the reasoning whatever a request says.
    """

    max_tokens: int = MAX_ID
    max_prompts: int = MAX_ID
    strict_fields: bool = False
    has_reasoning_switch: bool = True
    always_reasons: bool = False

    @staticmethod
    def of(info: ValidationInfo) -> RequestBounds:
        """The bounds of a validation. Without a context there are no bounds."""
        return info.context.bounds if info.context else _NO_BOUNDS


_NO_BOUNDS = RequestBounds()


class IgnoredField(NamedTuple):
    """A field that no model declares.

    Attributes:
        model: the name of the model in whose place the field was, as in the OpenAPI document.
        name: shortened, and written as a literal in ASCII.
    """

    model: str
    name: str


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The context of one validation: its bounds, and the ignored fields so far."""

    bounds: RequestBounds
    ignored_fields: set[IgnoredField] = field(default_factory=set)

    def ignore(self, model: str, names: Iterable[str]) -> None:
        """Note the first of these fields, up to 64 of one request."""
        for name in names:
            if len(self.ignored_fields) == MAX_IGNORED:
                return
            self.ignored_fields.add(IgnoredField(model, ascii(name[:MAX_NAME])))


class RequestModel(BaseModel):
    """Part of a request: types are not converted, and unknown fields are ignored.

    Where `RequestBounds.strict_fields` is set, the caller has pydantic refuse them.
    """

    model_config = ConfigDict(
        extra="ignore",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": True},
    )
    _names: ClassVar[frozenset[str]]  # of the fields, as requests spell them

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        cls._names = frozenset(
            entry.alias or name for name, entry in cls.__pydantic_fields__.items()
        )

    @classmethod
    def declared_fields(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of a body that the model declares."""
        return {name: value for name, value in fields.items() if name in cls._names}

    @model_validator(mode="before")
    @classmethod
    def _note_unknown_fields(cls, fields: Any, info: ValidationInfo) -> Any:
        if not isinstance(fields, dict) or fields.keys() <= cls._names or not info.context:
            return fields
        context: RequestContext = info.context
        unknown = (name for name in fields if name not in cls._names)
        if context.bounds.strict_fields:
            # Each of them is an error. Of a million of them, one is enough.
            return {**cls.declared_fields(fields), next(unknown): None}
        context.ignore(cls.__name__, (name for name in unknown if fields[name] is not None))
        return fields


class AtMost:
    """Marks a list or an object whose items are counted before any of them is validated.

    The first bad item of a list ends its validation.

    Args:
        bound: the largest number of items, or a function that takes it from the bounds.
        item_type: the type of the items, for a list in a union. A list that begins with another
            type is not counted: its first item ends its validation.
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
    """Marks a list each of whose items takes at least one token of the context."""

    def __init__(self, item_type: type = object) -> None:
        super().__init__(lambda bounds: bounds.max_tokens, item_type)

    def _error(self, count: int, bound: int) -> PydanticCustomError:
        cause = f"you sent {count} items of at least one token each"
        message = PromptTooLong.words.format(limit=bound, cause=cause)
        return PydanticCustomError("context_length_exceeded", message)


def check_text(text: str) -> str:
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


def check_finite(value: T) -> T:
    """
    Raises:
        ValueError: a number in it is none of JSON: infinity, as which 1e400 is read, or NaN.
    """
    level: list[Any] = [value]
    while level:
        for node in level:
            if isinstance(node, float) and not math.isfinite(node):
                raise ValueError(f"a number in it is {node}: numbers are floats of 64 bits")
        level = [child for node in level for child in _children(node)]
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
    """Marks an unsupported field, which accepts only null and these values: they change nothing.

    Args:
        instead: the field that serves the same purpose.
    """

    def __init__(self, *neutral: Any, instead: str | None = None) -> None:
        self.neutral = (*neutral, None)
        allowed = " or ".join(map(json.dumps, self.neutral))
        advice = f"send {instead} instead, or" if instead else "leave it out or send"
        self._message = f"it is not supported; {advice} {allowed}"

    def _check(self, value: Any) -> Any:
        if any(_is_same(value, neutral) for neutral in self.neutral):
            return value
        raise PydanticCustomError("unsupported_parameter", "{message}", {"message": self._message})

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, _schema: Any, _handler: Any) -> dict[str, Any]:
        return {"enum": list(self.neutral)}


def _is_same(value: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, where 1 is 1.0 but not true."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def null_is(default: Any, of: Any) -> BeforeValidator:
    """Marks a field for which null means its default, as if it were left out.

    Args:
        of: the field's type.
    """
    return BeforeValidator(
        lambda value: default if value is None else value, json_schema_input_type=of | None
    )


def _to_integer(value: Any) -> Any:
    """4 for 4.0: languages without integers write them as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_to_integer)]
TokenId = Annotated[int, Field(ge=0, le=MAX_ID)]
ValidText = Annotated[str, AfterValidator(check_text)]
ShortText = Annotated[ValidText, AfterValidator(_check_length)]
Shallow = Annotated[T, AfterValidator(check_depth), AfterValidator(check_packable)]
Schema = Shallow[dict[str, Any]]
FITS_CONTEXT = FitsContext()
FEW_PAIRS = AtMost(MAX_PAIRS)
StreamingOnly = Annotated[T, AfterValidator(_check_streaming)]
TokenLimit = Annotated[Integer, Field(ge=1, le=MAX_COUNT)]
NumTopLogprobs = Annotated[Integer, Field(ge=0, le=20)]
