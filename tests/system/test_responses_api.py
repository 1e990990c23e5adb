"""/v1/responses through OpenAI's client, on real processes; the oracle is transformers."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.system.harness import MODEL, Program, wait_until
from tests.system.oracle import answer_to

pytestmark = pytest.mark.slow
PROMPT = "The quick brown fox"
FEW_PAGES = ["--port", "0", "--page-size", "16", "--num-pages", "64", "--max-running-requests", "1"]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}


def test_a_response_says_what_chat_says_whole_and_in_a_stream(server: Program) -> None:
    with server.client() as client:
        turns: list[Any] = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": PROMPT},
        ]
        chat = client.chat.completions.create(messages=turns, max_tokens=24, **GREEDY)
        asked: dict[str, Any] = {
            "instructions": "be brief",
            "input": PROMPT,
            "max_output_tokens": 24,
            **GREEDY,
        }
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            events = list(stream)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage is not None
    assert chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 24)
    assert whole.status == "incomplete"
    assert whole.incomplete_details
    assert whole.incomplete_details.reason == "max_output_tokens"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert sum(map(bool, deltas)) > 5
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text


def test_an_answer_is_input_of_the_next_request(server: Program) -> None:
    with server.client() as client:
        first = client.responses.create(input=PROMPT, max_output_tokens=24, **GREEDY)
        assert first.output_text == answer_to(PROMPT, 24)
        turns: list[Any] = [
            {"role": "user", "content": PROMPT},
            *first.output,
            {"role": "user", "content": "the dog"},
        ]
        second = client.responses.create(input=turns, max_output_tokens=24, **GREEDY)
        spoken: list[Any] = [
            turns[0],
            {"role": "assistant", "content": first.output_text},
            turns[-1],
        ]
        chat = client.chat.completions.create(messages=spoken, max_tokens=24, **GREEDY)
    assert second.output_text == chat.choices[0].message.content


def test_who_hangs_up_on_a_response_leaves_nothing_behind(server: Program) -> None:
    with server.client() as client:
        stream = client.responses.create(
            input=PROMPT, max_output_tokens=15_000, stream=True, **GREEDY
        )
        assert next(event for event in stream if event.type == "response.output_text.delta")
        stream.close()
        wait_until(server.is_idle, "no request is open")
        with pytest.raises(openai.BadRequestError, match="maximum context length") as refusal:
            client.responses.create(input=PROMPT, max_output_tokens=10**6, **GREEDY)
    assert refusal.value.code == "context_length_exceeded"


def test_the_default_model_answers_as_in_chat() -> None:
    turns: list[Any] = [{"role": "user", "content": "What is the capital of France? One word."}]
    program = Program(*FEW_PAGES, env={"OMP_NUM_THREADS": "2"})
    with program.wait_ready(), program.client() as client:
        model = client.models.list().data[0].id
        chat = client.chat.completions.create(
            model=model, messages=turns, temperature=0, max_tokens=48
        )
        whole = client.responses.create(
            model=model, input=turns, temperature=0, max_output_tokens=48
        )
        with client.responses.stream(
            model=model, input=turns, temperature=0, max_output_tokens=48
        ) as stream:
            final = stream.get_final_response()
    assert chat.choices[0].finish_reason == "stop"
    assert "Paris" in (chat.choices[0].message.content or "")
    assert (whole.status, whole.output_text) == ("completed", chat.choices[0].message.content)
    assert (final.status, final.output_text) == ("completed", chat.choices[0].message.content)
