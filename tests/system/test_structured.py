"""Structured output through OpenAI's client, from a server of real processes."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.system.harness import MODEL, Program, wait_until

pytestmark = pytest.mark.slow
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "the dog"}],
    "max_tokens": 300,
}


class Animal(BaseModel):
    kind: Literal["fox", "dog"]
    legs: int = Field(ge=0, le=9)
    names: list[str] = Field(max_length=2)


SCHEMA = {**Animal.model_json_schema(), "additionalProperties": False}
SCHEMA["properties"]["names"]["items"]["maxLength"] = 5
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True},
}


def test_parse_gives_an_object(server: Program) -> None:
    with server.client() as client:
        for seed in range(3):
            answer = client.chat.completions.parse(
                response_format=Animal, seed=seed, **{**ASK, "max_tokens": 2000}
            )
            assert isinstance(answer.choices[0].message.parsed, Animal)
            assert answer.choices[0].finish_reason == "stop"


def test_what_parse_and_stream_give_goes_back_in_as_history(server: Program) -> None:
    options = {**ASK, "max_tokens": 2000, "seed": 1, "response_format": Animal}
    with server.client() as client:
        parsed = client.chat.completions.parse(**options)
        with client.chat.completions.stream(**options) as stream:
            streamed = stream.get_final_completion()
        for completion in (parsed, streamed):
            message: Any = completion.choices[0].message.model_dump(warnings=False)
            assert message["parsed"] is not None
            turns = [*ASK["messages"], message, *ASK["messages"]]
            answer = client.chat.completions.create(
                model=MODEL, messages=turns, max_tokens=5, extra_body={"ignore_eos": True}
            )
            assert answer.usage
            assert answer.usage.completion_tokens == 5


def test_n_streams_with_a_stop_text_follow_the_schema(server: Program) -> None:
    """Three answers side by side, one piece after the other; a stop text ends them earlier."""
    with server.client() as client:
        texts = {0: "", 1: "", 2: ""}
        for chunk in client.chat.completions.create(
            response_format=FORMAT, n=3, seed=1, stream=True, **ASK
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert all(Animal.model_validate_json(text) for text in texts.values())
        assert len(set(texts.values())) == 3
        stopped = client.chat.completions.create(
            response_format=FORMAT, n=3, seed=1, stop='"legs', **ASK
        )
        for choice in stopped.choices:
            whole = texts[choice.index]
            assert choice.message.content == whole[: whole.index('"legs')]
    wait_until(server.is_idle, "no request is open")


def test_an_object_choices_and_a_pattern(server: Program) -> None:
    with server.client() as client:

        def say(**format: Any) -> str:
            answer = client.completions.create(
                prompt="x", seed=5, model=MODEL, max_tokens=400, extra_body=format
            )
            return answer.choices[0].text

        assert say(guided_regex="[0-9]{3}-[a-f]{2}").replace("-", "").isalnum()
        assert say(structured_outputs={"regex": "[0-9]{3}"}).isdigit()
        assert say(ebnf='root ::= "a" digit{2}\ndigit ::= [0-9]')[1:].isdigit()
        assert say(guided_choice=["ja", 'n"ein\n']) in ("ja", 'n"ein\n')
        assert isinstance(
            json.loads(say(guided_json={"type": "array", "items": {"type": "boolean"}})), list
        )


@pytest.mark.parametrize(
    ("format", "reason"),
    [
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "animal"}}},
            "Invalid type: animal",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
            "Unimplemented keys",
        ),
        ({"type": "json_schema"}, "response_format.json_schema: it is required"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_followed_is_a_400(
    server: Program, format: Any, reason: str, stream: bool
) -> None:
    with server.client() as client, pytest.raises(openai.BadRequestError, match=reason) as refusal:
        client.chat.completions.create(response_format=format, stream=stream, **ASK)
    assert (refusal.value.param or "").startswith("response_format")


def test_a_grammar_that_takes_minutes_is_a_400_and_a_neighbour_goes_on(server: Program) -> None:
    """Its stream begins before the trial and gives tokens until after the refusal."""
    patterns = [{"type": "string", "pattern": f"^(.*[a-f]){{{k}}}.*$"} for k in range(1, 40)]
    with server.client() as client:
        neighbour = client.completions.create(
            prompt="x", model=MODEL, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(neighbour))
        # Where other work has the processors, it is a 503 first.
        patient = client.with_options(max_retries=4)
        with pytest.raises(openai.BadRequestError, match="more than 1 s to compile"):
            patient.completions.create(
                prompt=["a", "b"],
                model=MODEL,
                max_tokens=5,
                extra_body={"guided_json": {"allOf": patterns}},
            )
        assert [chunk.choices[0].finish_reason for chunk in neighbour][-1] == "length"
    wait_until(server.is_idle, "no request is open")
