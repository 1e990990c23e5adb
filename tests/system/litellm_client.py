"""Use a server through LiteLLM and print the results as one line of JSON.

Run by test_clients.py in the environment that has LiteLLM.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["fox", "dog"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
QUESTION = {"role": "user", "content": "the dog"}
CITY = {"type": "object", "properties": {"city": {"enum": ["Ulm", "Bonn"]}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {**CITY, "additionalProperties": False}},
}


def main(url: str, model: str) -> None:
    def ask(**options: Any) -> Any:
        defaults = {
            "messages": [QUESTION],
            "max_tokens": 30,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
        }
        return litellm.completion(
            model=f"openai/{model}",
            api_base=url,
            api_key="none",
            **{**defaults, **options},
        )

    whole = ask()
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True))
    history = [QUESTION, whole.choices[0].message.model_dump(), QUESTION]
    called = ask(
        tools=[TOOL], tool_choice="required", max_tokens=200, temperature=1, seed=1, extra_body={}
    )
    form = {
        "type": "json_schema",
        "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True},
    }
    formed = ask(response_format=form, max_tokens=200, extra_body={})
    try:
        ask(temperature=101)
        error = 0
    except litellm.BadRequestError as refusal:
        error = refusal.status_code
    try:
        ask(messages=[{"role": "user", "content": "the dog " * 40_000}])
        overflow = ""
    except litellm.ContextWindowExceededError as refusal:
        overflow = refusal.message
    seen = {
        "whole": whole.choices[0].message.content,
        "streamed": streamed,
        "after_history": ask(messages=history).usage.completion_tokens,
        "tokens": whole.usage.completion_tokens,
        "city": json.loads(called.choices[0].message.tool_calls[0].function.arguments)["city"],
        "object": json.loads(formed.choices[0].message.content),
        "error": error,
        "overflow": overflow,
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
