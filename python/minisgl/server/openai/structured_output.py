"""What an answer has to match: the formats of a request, and the grammars that they become."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from minisgl.core import Grammar
from minisgl.errors import InvalidRequest
from minisgl.sampling_params import MAX_GRAMMAR
from minisgl.server.openai.validation import (
    AtMost,
    NeutralOnly,
    RequestModel,
    Schema,
    ShortText,
    ValidText,
)

MAX_SCHEMA_TEXT = 6 * MAX_GRAMMAR  # an escaped character takes six


def _decode_schema(schema: Any) -> Any:
    """
    Raises:
        ValueError: it is a text and not JSON, or too long.
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


# A schema beside another type would not be followed.
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
    """`strict` makes no difference: the answer always follows the schema.

    A schema with a keyword that cannot be followed is refused.
    """

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: ValidText | None = None
    schema_: Schema = Field(alias="schema", default_factory=dict)
    strict: bool | None = None

    def grammar(self) -> Grammar:
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
    return Grammar("lark", "start: " + " | ".join(literals))


class StructuredOutputFields(RequestModel):
    """The fields, not OpenAI's, that make an answer match a grammar."""

    guided_json: SchemaOrText | None = None
    guided_regex: ValidText | None = None
    guided_choice: Choices | None = None
    # Short: a longer Lark grammar may take seconds to compile, and other requests would wait.
    guided_grammar: ShortText | None = None

    def grammar(self) -> Grammar | None:
        """What the answer has to match.

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
        grammars = {}
        if self.guided_json is not None:
            grammars["guided_json"] = schema_grammar(self.guided_json)
        if self.guided_regex is not None:
            grammars["guided_regex"] = Grammar("regex", self.guided_regex)
        if self.guided_choice is not None:
            grammars["guided_choice"] = choice_grammar(self.guided_choice)
        if self.guided_grammar is not None:
            grammars["guided_grammar"] = Grammar("lark", self.guided_grammar)
        return grammars
