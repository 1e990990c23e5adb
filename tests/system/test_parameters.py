"""Parameters as OpenAI's client sends them, against a server of real processes."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Completion

from tests.checkpoints import tiny_tokenizer
from tests.system.harness import MODEL, TIMEOUT_S, Program, wait_until
from tests.system.oracle import answer_to, embedding_of, logprobs_of, text_after

pytestmark = pytest.mark.slow
PROMPT = "The quick brown fox"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24}
GO_ON = {"ignore_eos": True}


def test_a_stop_text_never_shows_in_a_stream_and_ends_the_request(server: Program) -> None:
    whole = text_after(PROMPT, 24)
    with server.client() as client:
        for at in range(2, 12, 3):
            stop = whole[at : at + 4]
            stream = client.completions.create(
                prompt=PROMPT, stop=["never there", stop], stream=True, extra_body=GO_ON, **GREEDY
            )
            chunks = [chunk.choices[0] for chunk in stream]
            assert "".join(chunk.text for chunk in chunks) == whole[: whole.index(stop)]
            assert chunks[-1].finish_reason == "stop"
        kept = client.completions.create(
            prompt=PROMPT,
            stop=stop,
            extra_body={**GO_ON, "include_stop_str_in_output": True},
            **GREEDY,
        )
        assert kept.choices[0].text == whole[: whole.index(stop) + len(stop)]
        long = client.completions.create(
            prompt=PROMPT, stop=stop, extra_body=GO_ON, **{**GREEDY, "max_tokens": 200}
        )
        assert long.usage is not None
        assert long.usage.completion_tokens < 24
    wait_until(server.is_idle, "no request is open")


def test_n_answers_are_n_seeded_requests(server: Program) -> None:
    options = {
        "model": MODEL,
        "prompt": [PROMPT, "the dog"],
        "max_tokens": 12,
        "temperature": 1.0,
        "extra_body": GO_ON,
    }
    with server.client() as client:
        together = client.completions.create(n=4, seed=7, **options)
        alone = [client.completions.create(seed=7 + i, **options) for i in range(4)]
    texts = [choice.text for choice in together.choices]
    assert [choice.index for choice in together.choices] == list(range(8))
    assert texts == [alone[i].choices[prompt].text for prompt in range(2) for i in range(4)]
    assert len(set(texts)) == 8
    assert together.usage is not None
    assert alone[0].usage is not None
    assert together.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert together.usage.completion_tokens == 8 * 12


def test_a_stream_of_n_answers_interleaves_them_under_their_indexes(server: Program) -> None:
    async def read() -> dict[int, str]:
        url = f"{server.url}/v1"
        async with AsyncOpenAI(
            base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_S
        ) as client:
            stream = await client.chat.completions.create(
                messages=[{"role": "user", "content": PROMPT}],
                n=3,
                stream=True,
                extra_body=GO_ON,
                **GREEDY,
            )
            texts: dict[int, str] = {}
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            return texts

    assert asyncio.run(read()) == dict.fromkeys(range(3), answer_to(PROMPT, 24))


def test_log_probabilities_stand_beside_their_tokens(server: Program) -> None:
    with server.client() as client:
        options = {
            "messages": [{"role": "user", "content": PROMPT}],
            "logprobs": True,
            "top_logprobs": 3,
            **GREEDY,
        }
        client.chat.completions.create(extra_body=GO_ON, **options)  # others find its prompt cached
        chat = client.chat.completions.create(extra_body=GO_ON, **options)
        stream = list(client.chat.completions.create(stream=True, extra_body=GO_ON, **options))
        text = client.completions.create(
            prompt=PROMPT, logprobs=2, echo=True, extra_body=GO_ON, **GREEDY
        )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 24
    for entry in content:
        assert (entry.token, entry.logprob) == (
            entry.top_logprobs[0].token,
            entry.top_logprobs[0].logprob,
        )
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-6
        assert entry.bytes is not None
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
    choices = [choice for chunk in stream for choice in chunk.choices]
    streamed = [choice.logprobs.content or [] for choice in choices if choice.logprobs]
    assert [entry for entries in streamed for entry in entries] == content
    choice = text.choices[0]
    assert choice.text == PROMPT + text_after(PROMPT, 24)
    assert choice.logprobs
    assert choice.logprobs.tokens
    assert choice.logprobs.token_logprobs
    assert text.usage
    num_tokens = text.usage.prompt_tokens + 24
    assert len(choice.logprobs.tokens) == num_tokens
    assert len(choice.logprobs.token_logprobs) == num_tokens
    assert "".join(choice.logprobs.tokens) == "<s>" + choice.text
    assert [logprob for logprob in choice.logprobs.token_logprobs if logprob is None] == [None]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompts_are_scored_as_lm_eval_asks_for_it(server: Program, max_tokens: int) -> None:
    ids = [tiny_tokenizer()(text)["input_ids"] for text in (PROMPT, PROMPT + " jumps")]
    with server.client() as client:
        options: Any = {"logprobs": 1, "echo": True, "seed": 1, **GREEDY, "max_tokens": max_tokens}
        scored = client.completions.create(prompt=ids, **options)
    assert scored.usage is not None
    assert scored.usage.completion_tokens == max_tokens * 2
    for prompt, choice in zip(ids, scored.choices, strict=True):
        assert choice.text.startswith(tiny_tokenizer().decode(prompt))
        logprobs = choice.logprobs
        assert logprobs
        assert logprobs.token_logprobs
        assert logprobs.top_logprobs
        assert logprobs.text_offset
        first, *others = logprobs.token_logprobs
        assert first is None
        assert len(others) == len(prompt) + max_tokens - 1
        expected = logprobs_of(prompt)
        assert others[: len(expected)] == pytest.approx(expected, abs=1e-3)
        for chosen, top in zip(others, logprobs.top_logprobs[1:], strict=True):
            assert chosen <= max(top.values())
        assert logprobs.text_offset[0] == 0
        assert logprobs.text_offset == sorted(logprobs.text_offset)


def test_embeddings_as_openais_client_asks_for_them(server: Program) -> None:
    with server.client() as client:
        in_base64 = client.embeddings.create(model=MODEL, input=[PROMPT, "the dog"])
        ids = client.embeddings.create(
            model=MODEL,
            input=tiny_tokenizer()("the dog")["input_ids"],
            encoding_format="float",
            dimensions=64,
        )
        with pytest.raises(openai.BadRequestError, match="dimensions must be 64, got 32"):
            client.embeddings.create(model=MODEL, input=PROMPT, dimensions=32)
        with pytest.raises(
            openai.BadRequestError, match="maximum context length is 16384 tokens"
        ) as refusal:
            client.embeddings.create(model=MODEL, input=[5] * 20_000)
    assert refusal.value.param == "input"
    assert [entry.index for entry in in_base64.data] == [0, 1]
    for entry, text in zip(in_base64.data, (PROMPT, "the dog"), strict=True):
        assert entry.embedding == pytest.approx(embedding_of(text), abs=1e-3)
    assert ids.data[0].embedding == pytest.approx(in_base64.data[1].embedding, abs=1e-6)
    assert in_base64.usage.prompt_tokens == sum(
        len(tiny_tokenizer()(text)["input_ids"]) for text in (PROMPT, "the dog")
    )
    wait_until(server.is_idle, "no request is open")


def test_a_hopeless_text_is_refused_unread_and_the_field_is_named(server: Program) -> None:
    text = "x" * 900_000
    with server.client() as client:
        with pytest.raises(openai.BadRequestError, match="900000 bytes of text") as refusal:
            client.completions.create(prompt=text, **GREEDY)
        assert (refusal.value.param, refusal.value.code) == ("prompt", "context_length_exceeded")
        with pytest.raises(openai.BadRequestError, match="bytes of text") as refusal:
            client.chat.completions.create(messages=[{"role": "user", "content": text}], **GREEDY)
        assert refusal.value.param == "messages"


def tokens_of(answer: Completion) -> list[str]:
    logprobs = answer.choices[0].logprobs
    assert logprobs
    assert logprobs.tokens
    return logprobs.tokens


def test_bias_and_penalties_reach_the_sampler(server: Program) -> None:
    with server.client() as client:
        options = {"prompt": PROMPT, "logprobs": 0, "extra_body": GO_ON, **GREEDY}
        plain = tokens_of(client.completions.create(**options))
        biased = tokens_of(client.completions.create(logit_bias={"5": 100}, **options))
        penalties = {"presence_penalty": 2, "frequency_penalty": 2}
        varied = tokens_of(client.completions.create(**penalties, **options))
    assert len(set(biased)) == 1
    assert len(set(varied)) > len(set(plain))


def test_variables_of_the_template_and_an_unfinished_turn(server: Program) -> None:
    turns: list[Any] = [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": "the"},
    ]
    with server.client() as client:
        opened = client.chat.completions.create(messages=turns, extra_body=GO_ON, **GREEDY)
        continued = client.chat.completions.create(
            messages=turns, extra_body={**GO_ON, "continue_final_message": True}, **GREEDY
        )
        assert opened.usage is not None
        assert continued.usage is not None
        assert continued.usage.prompt_tokens < opened.usage.prompt_tokens
        client.chat.completions.create(
            messages=turns,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
            **GREEDY,
        )
        with pytest.raises(
            openai.BadRequestError, match="'tokenize' is not the template's to take"
        ) as refusal:
            client.chat.completions.create(
                messages=turns, extra_body={"chat_template_kwargs": {"tokenize": True}}, **GREEDY
            )
        assert refusal.value.param == "chat_template_kwargs"
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(
                messages=turns,
                extra_body={"continue_final_message": True, "add_generation_prompt": True},
                **GREEDY,
            )
