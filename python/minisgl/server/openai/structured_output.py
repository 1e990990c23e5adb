"""Formats that an answer can be held to, and the grammars they become."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from minisgl.core import Grammar
from minisgl.errors import InvalidRequest
from minisgl.server.openai.validation import Schema, ShortText, Strict, ValidText


def _spelled(schema: Any) -> Any:
    """
    Raises:
        ValueError: it is a text and spells nothing.
    """
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the text is not JSON: {error}") from None


SchemaOrText = Annotated[
    Schema, BeforeValidator(_spelled, json_schema_input_type=str | dict[str, Any])
]
Choices = Annotated[list[ValidText], Field(min_length=1, max_length=1024)]


class PlainFormat(Strict):
    type: Literal["text"] = "text"

    def grammar(self) -> None:
        return None


class ObjectFormat(Strict):
    type: Literal["json_object"]

    def grammar(self) -> Grammar:
        return schema_grammar({"type": "object"})


class JsonSchema(Strict):
    """`strict` makes no difference: a schema is followed, or refused if it says something that cannot be."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: ValidText | None = None
    schema_: Schema = Field(alias="schema", default_factory=dict)
    strict: bool | None = None

    def grammar(self) -> Grammar:
        return schema_grammar(self.schema_)


class SchemaFormat(Strict):
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
    """Of one of several texts."""
    return Grammar(
        "lark", "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    )


class Guided(Strict):
    """The fields, not OpenAI's, that hold an answer to a grammar."""

    guided_json: SchemaOrText | None = None
    guided_regex: ValidText | None = None
    guided_choice: Choices | None = None
    guided_grammar: ShortText | None = (
        None  # more of Lark may take seconds to compile, and others would wait
    )

    def grammar(self) -> Grammar | None:
        """What the answer has to match.

        Raises:
            InvalidRequest: more than one thing is asked for.
        """
        asked = {name: grammar for name, grammar in self._grammars().items() if grammar}
        if len(asked) > 1:
            raise InvalidRequest(
                "an answer cannot follow both {} and {}".format(*asked), param=list(asked)[1]
            )
        return next(iter(asked.values()), None)

    def _grammars(self) -> dict[str, Grammar | None]:
        """By the field that may ask for one."""
        return {
            "guided_json": None if self.guided_json is None else schema_grammar(self.guided_json),
            "guided_regex": None
            if self.guided_regex is None
            else Grammar("regex", self.guided_regex),
            "guided_choice": None
            if self.guided_choice is None
            else choice_grammar(self.guided_choice),
            "guided_grammar": None
            if self.guided_grammar is None
            else Grammar("lark", self.guided_grammar),
        }
