"""The formats that an answer has to match, and the grammars that they become."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from minisgl.core import Grammar
from minisgl.errors import InvalidRequest
from minisgl.sampling_params import MAX_GRAMMAR
from minisgl.server.requests.closed_schemas import close_objects
from minisgl.server.requests.ebnf import ebnf_to_lark, is_ebnf
from minisgl.server.requests.unsupported import FalseOnly, Refused
from minisgl.server.requests.validation import (
    AtMost,
    NeutralOnly,
    RequestModel,
    Schema,
    ShortText,
    ValidText,
    null_is,
)

MAX_SCHEMA_TEXT = 6 * MAX_GRAMMAR  # an escaped character takes six


def _decode_schema(schema: Any) -> Any:
    """
    Raises:
        ValueError: it is a text that is too long or not JSON.
    """
    if not isinstance(schema, str):
        return schema
    if len(schema) > MAX_SCHEMA_TEXT:
        raise ValueError(f"it has {len(schema)} characters, which is more than {MAX_SCHEMA_TEXT}")
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the text is not JSON: {error}") from None


SchemaOrText = Annotated[
    Schema, BeforeValidator(_decode_schema, json_schema_input_type=str | dict[str, Any])
]
Choices = Annotated[list[ValidText], Field(min_length=1, max_length=1024), AtMost(1024)]


# Short: a longer grammar in Lark may take seconds to compile.
LarkOrEbnf = Annotated[
    ShortText, AfterValidator(lambda text: ebnf_to_lark(text) if is_ebnf(text) else text)
]
Ebnf = Annotated[ShortText, AfterValidator(ebnf_to_lark)]
Makers: TypeAlias = dict[str, Callable[[Any], Grammar | None]]

# A schema beside another type would have no effect.
_OnlyNull: TypeAlias = Annotated[Any, NeutralOnly(instead='the type "json_schema"')]


class PlainFormat(RequestModel):
    type: Literal["text"] = "text"
    json_schema: _OnlyNull = Field(None, exclude=True)
    schema_: _OnlyNull = Field(None, alias="schema", exclude=True)

    def grammar(self) -> None:
        return None


class ObjectFormat(RequestModel):
    type: Literal["json_object"]
    json_schema: _OnlyNull = Field(None, exclude=True)
    schema_: _OnlyNull = Field(None, alias="schema", exclude=True)

    def grammar(self) -> Grammar:
        return schema_grammar({"type": "object"})


class JsonSchema(RequestModel):
    """The answer always follows the schema; with `strict` its objects are closed, too.

    A schema with a keyword that cannot be followed is refused.
    """

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: ValidText | None = None
    schema_: Annotated[Schema, null_is({}, Schema)] = Field(alias="schema", default_factory=dict)
    strict: bool | None = None

    def grammar(self) -> Grammar:
        if self.strict:
            return schema_grammar(close_objects(self.schema_, free_form=True))
        return schema_grammar(self.schema_)


class SchemaFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema

    def grammar(self) -> Grammar:
        return self.json_schema.grammar()


class FlatSchemaFormat(JsonSchema):
    type: Literal["json_schema"]


ResponseFormat = Annotated[PlainFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]
TextFormat = Annotated[PlainFormat | ObjectFormat | FlatSchemaFormat, Field(discriminator="type")]


def schema_grammar(schema: dict[str, Any]) -> Grammar:
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))


def choice_grammar(choices: list[str]) -> Grammar:
    """Matches one of several texts."""
    literals = [json.dumps(choice, ensure_ascii=False) for choice in choices]
    text = "start: " + " | ".join(literals)
    return Grammar("lark", text.replace("\x7f", r"\u007f"))  # llguidance refuses it as it is


def regex_grammar(pattern: str) -> Grammar:
    return Grammar("regex", pattern)


def text_grammar(text: str) -> Grammar:
    """Lark, or EBNF that was translated to it."""
    return Grammar("lark", text)


def object_grammar(is_wanted: bool) -> Grammar | None:
    return schema_grammar({"type": "object"}) if is_wanted else None


class StructuredOutputs(RequestModel):
    """The format of an answer, as in vLLM since 0.12: one of the first five fields."""

    json_: SchemaOrText | None = Field(None, alias="json")
    regex: ValidText | None = None
    choice: Choices | None = None
    grammar: LarkOrEbnf | None = None
    json_object: bool | None = None
    structural_tag: Refused = None
    whitespace_pattern: Refused = None
    disable_any_whitespace: FalseOnly = None
    disable_additional_properties: FalseOnly = None

    def grammar_of_field(self) -> dict[str, Grammar]:
        """The grammar of each field that has one."""
        makers: Makers = {
            "json_": schema_grammar,
            "regex": regex_grammar,
            "choice": choice_grammar,
            "grammar": text_grammar,
            "json_object": object_grammar,
        }
        return _make_grammars(self, makers, "structured_outputs.")


class StructuredOutputFields(RequestModel):
    """The fields, not OpenAI's, that make an answer match a grammar.

    The guided ones are vLLM's before 0.12, the last three SGLang's.
    """

    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: ValidText | None = None
    guided_choice: Choices | None = None
    guided_grammar: LarkOrEbnf | None = None
    json_schema: SchemaOrText | None = None
    regex: ValidText | None = None
    ebnf: Ebnf | None = None

    def grammar(self) -> Grammar | None:
        """The grammar that the answer has to match.

        Raises:
            InvalidRequest: two fields have a grammar.
        """
        grammars = self.grammar_of_field()
        if len(grammars) > 1:
            raise InvalidRequest(
                "an answer cannot follow both {} and {}".format(*grammars), param=list(grammars)[1]
            )
        return next(iter(grammars.values()), None)

    def grammar_of_field(self) -> dict[str, Grammar]:
        """The grammar of each field that has one."""
        makers: Makers = {
            "guided_json": schema_grammar,
            "guided_regex": regex_grammar,
            "guided_choice": choice_grammar,
            "guided_grammar": text_grammar,
            "json_schema": schema_grammar,
            "regex": regex_grammar,
            "ebnf": text_grammar,
        }
        grammars = _make_grammars(self, makers)
        nested = self.structured_outputs
        return {**(nested.grammar_of_field() if nested else {}), **grammars}


def _make_grammars(fields: RequestModel, makers: Makers, prefix: str = "") -> dict[str, Grammar]:
    """The grammars of those fields that are given, by their names for the client.

    Raises:
        InvalidRequest: a value cannot become a grammar. Its field is named.
    """
    grammars = {}
    for name, make in makers.items():
        value = getattr(fields, name)
        if value is None:
            continue
        field = prefix + name.removesuffix("_")
        with refusals_name(field):
            grammar = make(value)
        if grammar is not None:
            grammars[field] = grammar
    return grammars


@contextmanager
def refusals_name(field: str) -> Iterator[None]:
    """Name the client's field in the refusal of a value that cannot become a grammar."""
    try:
        yield
    except InvalidRequest as error:
        error.param = field
        raise
