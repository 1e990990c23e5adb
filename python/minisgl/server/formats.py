"""Formats that an answer can be held to, and the grammars they become."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from minisgl.core import Grammar
from minisgl.errors import InvalidRequest
from minisgl.server.fields import Schema, Shallow, Strict, ValidText

Choices = Annotated[list[ValidText], Field(min_length=1, max_length=1024)]
ANY_OBJECT = {"type": "object"}


class JsonSchema(Strict):
    """`strict` makes no difference: a schema is followed, or refused if it says something that cannot be."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: ValidText | None = None
    schema_: Schema = Field(alias="schema", default_factory=dict)
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_a_schema_if_it_says_so(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema must be there if type is json_schema, and only then")
        return self

    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        return schema_grammar(ANY_OBJECT if self.json_schema is None else self.json_schema.schema_)


def schema_grammar(schema: Any) -> Grammar:
    """Of a JSON schema, as an object or as its text."""
    return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def choice_grammar(choices: list[str]) -> Grammar:
    """Of one of several texts."""
    return Grammar("lark", "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


class Guided(Strict):
    """The fields, not OpenAI's, that hold an answer to a grammar."""

    guided_json: Shallow[Any] = None
    guided_regex: ValidText | None = None
    guided_choice: Choices | None = None
    guided_grammar: ValidText | None = None

    def grammar(self) -> Grammar | None:
        """What the answer has to match.

        Raises:
            InvalidRequest: more than one thing is asked for.
        """
        asked = {name: grammar for name, grammar in self._grammars().items() if grammar}
        if len(asked) > 1:
            raise InvalidRequest("an answer cannot follow both {} and {}".format(*asked), param=list(asked)[1])
        return next(iter(asked.values()), None)

    def _grammars(self) -> dict[str, Grammar | None]:
        """By the field that may ask for one."""
        return {
            "guided_json": None if self.guided_json is None else schema_grammar(self.guided_json),
            "guided_regex": None if self.guided_regex is None else Grammar("regex", self.guided_regex),
            "guided_choice": None if self.guided_choice is None else choice_grammar(self.guided_choice),
            "guided_grammar": None if self.guided_grammar is None else Grammar("lark", self.guided_grammar),
        }
