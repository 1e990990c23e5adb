"""Random requests of every kind: `ASKS` has the kinds with their weights.

Texts, schemas and shared prefixes come from small sets. So the caches of a server are full after a
while, and stop growing. Next to read: `asks.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from minisgl.benchmark.stress.asks import Ask, generation
from minisgl.benchmark.stress.bodies import (
    CHAT,
    DETOKENIZE,
    EMBEDDINGS,
    RESPONSES,
    TEXT,
    TOKENIZE,
)
from minisgl.benchmark.stress.events import (
    Json,
    anthropic_ending,
    openai_ending,
    require,
    responses_ending,
    texts_of_choices,
)

MESSAGES = "/v1/messages"
_TEXT = "the quick brown fox jumps over a lazy dog and says that this was the end of it"
_WORDS = _TEXT.split()
_IDS = range(20, 250)  # ordinary tokens of every vocabulary
_NUM_SHARED = 4
_NUM_GRAMMARS = 12


@dataclass(frozen=True, slots=True)
class Asker:
    """Makes random requests to a model.

    Attributes:
        context: tokens that a prompt and its answer may have.
        max_tokens: of most answers.
        has_keys: whether the server requires an API key.
        only: the kinds of requests to send; if empty, all.
    """

    random: Random
    model: str
    context: int
    max_tokens: int = 64
    has_keys: bool = False
    only: frozenset[str] = frozenset()

    def ask(self) -> tuple[str, Ask]:
        """Choose a kind by its weight, and make a request of it."""
        chosen = self.only or ASKS.keys()
        kinds = [kind for kind in ASKS if kind in chosen]
        weights = [ASKS[kind][0] for kind in kinds]
        [kind] = self.random.choices(kinds, weights)
        return kind, ASKS[kind][1](self)

    def body(self, **fields: Any) -> Json:
        return {"model": self.model, **fields}

    def num_tokens(self) -> int:
        """The `max_tokens` of an answer: mostly small, at most four times the usual."""
        return 1 + min(int(self.random.expovariate(2 / self.max_tokens)), 4 * self.max_tokens)

    def words(self, num_words: int) -> str:
        return " ".join(self.random.choices(_WORDS, k=num_words))

    def ids(self) -> list[int]:
        """A prompt; half of the prompts share a prefix with others."""
        rest = self.random.choices(_IDS, k=self.random.randint(1, 60))
        if self.random.random() < 0.5:
            return rest
        shared = Random(self.random.randrange(_NUM_SHARED))
        return shared.choices(_IDS, k=min(200, self.context // 4)) + rest

    def turns(self) -> list[Json]:
        """A conversation of one to three questions; one of a few system messages begins it."""
        system = Random(self.random.randrange(_NUM_SHARED)).choices(_WORDS, k=40)
        turns = [{"role": "system", "content": " ".join(system)}]
        for _ in range(self.random.randint(0, 2)):
            turns.append({"role": "user", "content": self.words(8)})
            turns.append({"role": "assistant", "content": self.words(20)})
        return [*turns, {"role": "user", "content": self.words(self.random.randint(1, 30))}]

    def sampling(self) -> Json:
        """Some of the sampling parameters."""
        choices: list[Json] = [
            {},
            {"temperature": 0},
            {"temperature": 1.2, "top_p": 0.9, "seed": self.random.randrange(100)},
            {"top_k": 5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
            {"stop": ["dog", "\n\n"], "logit_bias": {"30": -100, "40": 5}},
            {"ignore_eos": True, "priority": -1},  # above 0 it might wait forever
            {"cache_salt": self.random.choice(["a", "b"])},
        ]
        return self.random.choice(choices)


# ---- plain requests


def _chat(asker: Asker, **fields: Any) -> Ask:
    body = asker.body(messages=asker.turns(), max_tokens=asker.num_tokens(), **asker.sampling())
    return generation(CHAT, body | fields)


def _text(asker: Asker, **fields: Any) -> Ask:
    body = asker.body(prompt=asker.ids(), max_tokens=asker.num_tokens(), **asker.sampling())
    return generation(TEXT, body | fields)


def _stream_of_chat(asker: Asker) -> Ask:
    return _chat(asker, stream=True)


def _stream_of_text(asker: Asker) -> Ask:
    return _text(asker, stream=True, stream_options={"include_usage": True})


def _several(asker: Asker) -> Ask:
    """Several answers to several prompts."""
    num_prompts = asker.random.randint(1, 3)
    num_answers = asker.random.randint(1, 4)
    prompts = [asker.ids() for _ in range(num_prompts)]
    body = asker.body(prompt=prompts, n=num_answers, max_tokens=asker.num_tokens())
    body["stream"] = asker.random.random() < 0.5
    return generation(TEXT, body, num_prompts * num_answers)


def _long_prompt(asker: Asker) -> Ask:
    """Several of these at a time take more pages than there are."""
    room = asker.context - 5 * asker.max_tokens
    num_ids = asker.random.randint(room // 4, room)
    ids = asker.random.choices(_IDS, k=num_ids)
    return _text(asker, prompt=ids, stream=asker.random.random() < 0.5)


def _long_answer(asker: Asker) -> Ask:
    """It grows while others do, so that some lose their pages."""
    num_tokens = min(6 * asker.max_tokens, asker.context // 2)
    return _text(asker, max_tokens=num_tokens, ignore_eos=True, stream=True)


def _logprobs(asker: Asker) -> Ask:
    if asker.random.random() < 0.5:
        return _chat(asker, logprobs=True, top_logprobs=3, stream=True)
    body = asker.body(prompt=asker.words(10), logprobs=2, max_tokens=8)
    body["echo"] = asker.random.random() < 0.5

    def check(answer: Json) -> None:
        logprobs = answer["choices"][0]["logprobs"]
        lengths = {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs")}
        require(len(lengths) == 1, f"log probabilities have the lengths {lengths}")

    return Ask(TEXT, body, check=check)


# ---- grammars and tools


def _schema(number: int) -> Json:
    names = [f"{_WORDS[number]}{i}" for i in range(1 + number % 3)]
    properties: Json = {name: {"enum": ["x", "y", number]} for name in names}
    properties["is_so"] = {"type": "boolean"}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _matching(asker: Asker, fields: Json, check_text: Callable[[str], None]) -> Ask:
    """A chat whose answer matches a grammar if it is complete."""
    body = asker.body(messages=asker.turns(), max_tokens=4 * asker.max_tokens, **fields)

    def check_choice(text: str, reason: str) -> None:
        if reason == "stop":
            check_text(text)

    def check(answer: Json) -> None:
        [choice] = answer["choices"]
        check_choice(choice["message"]["content"], choice["finish_reason"])

    def check_events(events: list[Json]) -> None:
        check_choice(*texts_of_choices(events, 1)[0])

    if asker.random.random() < 0.5:
        return Ask(CHAT, body, check=check)
    body["stream"] = True
    return Ask(CHAT, body, check_events=check_events, ending_of=openai_ending)


def _json_schema(asker: Asker) -> Ask:
    schema = _schema(asker.random.randrange(_NUM_GRAMMARS))
    named = {"name": "answer", "schema": schema, "strict": True}

    def check_text(text: str) -> None:
        names = set(json.loads(text))
        require(names == set(schema["required"]), f"{text!r} does not match {schema}")

    fields = {"response_format": {"type": "json_schema", "json_schema": named}}
    return _matching(asker, fields, check_text)


def _regex(asker: Asker) -> Ask:
    number = asker.random.randrange(_NUM_GRAMMARS)
    regex = f"(yes|no|[0-9]{{{1 + number}}})"

    def check_text(text: str) -> None:
        require(re.fullmatch(regex, text) is not None, f"{text!r} does not match {regex!r}")

    return _matching(asker, {"guided_regex": regex}, check_text)


def _tools(asker: Asker) -> Ask:
    schema = _schema(asker.random.randrange(_NUM_GRAMMARS))
    function = {"name": "tell", "description": "Tell something.", "parameters": schema}
    fields: Json = {"tools": [{"type": "function", "function": function}]}
    fields["tool_choice"] = asker.random.choice(["auto", "required"])
    body = asker.body(messages=asker.turns(), max_tokens=4 * asker.max_tokens, **fields)
    body["stream"] = asker.random.random() < 0.5
    if body["stream"]:
        return generation(CHAT, body)

    def check(answer: Json) -> None:
        [choice] = answer["choices"]
        if choice["finish_reason"] == "tool_calls":
            for call in choice["message"]["tool_calls"]:
                json.loads(call["function"]["arguments"])

    return Ask(CHAT, body, check=check)


# ---- other endpoints


def _embeddings(asker: Asker) -> Ask:
    num_inputs = asker.random.randint(1, 3)
    inputs = [asker.words(asker.random.randint(1, 40)) for _ in range(num_inputs)]

    def check(answer: Json) -> None:
        vectors = [item["embedding"] for item in answer["data"]]
        require(len(vectors) == num_inputs, f"{len(vectors)} of {num_inputs} embeddings came")
        for vector in vectors:
            squares = sum(number * number for number in vector)
            require(abs(squares - 1) < 0.01, f"an embedding has the squared length {squares}")

    return Ask(EMBEDDINGS, asker.body(input=inputs), check=check)


def _tokenize(asker: Asker) -> Ask:
    if asker.random.random() < 0.5:
        return Ask(TOKENIZE, asker.body(prompt=asker.words(50)))
    return Ask(DETOKENIZE, asker.body(tokens=asker.ids()))


def _message(asker: Asker) -> Ask:
    """Anthropic's API."""
    turns = [{"role": "user", "content": asker.words(10)}]
    body = asker.body(messages=turns, max_tokens=asker.num_tokens())
    if asker.random.random() < 0.3:
        return Ask(MESSAGES, body)
    return Ask(MESSAGES, body | {"stream": True}, ending_of=anthropic_ending)


def _response(asker: Asker) -> Ask:
    body = asker.body(input=asker.words(10), max_output_tokens=asker.num_tokens())
    if asker.random.random() < 0.3:
        return Ask(RESPONSES, body)
    return Ask(RESPONSES, body | {"stream": True}, ending_of=responses_ending)


def _look(asker: Asker) -> Ask:
    return Ask(asker.random.choice(["/v1/models", "/openapi.json"]), None)


# ---- bad requests


def _bad(asker: Asker) -> Ask:
    text = asker.words(3)
    bodies: list[Json | bytes] = [
        b"",
        b"[1, 2",
        b'"text"',
        b'{"model": "\xff"}',
        b"[" * 5000,
        asker.body(prompt=text, max_tokens=-1),
        asker.body(prompt=text, temperature="hot"),
        asker.body(prompt=text, n=1000),
        asker.body(prompt="\0"),
        asker.body(prompt=[10**9]),
        asker.body(prompt=text, suffix="end"),
        asker.body(prompt=[30] * (asker.context + 1)),
        asker.body(prompt="fox " * (4 * asker.context)),
        asker.body(prompt=text, max_tokens=2 * asker.context, stream=True),
        asker.body(prompt=text, guided_regex="("),
        asker.body(prompt=text, guided_json={"type": "array", "uniqueItems": True}),
        asker.body(prompt=text, guided_json={"type": "nothing"}),
        asker.body(prompt=text, stop=["x"] * 100),
        {"model": "another", "prompt": text},
    ]
    paths = asker.random.choices([TEXT, "/v1/nothing", MESSAGES], [8, 1, 1])
    return Ask(paths[0], asker.random.choice(bodies), is_bad=True)


def _stranger(asker: Asker) -> Ask:
    """A request with an invalid key."""
    headers = {"Authorization": "Bearer nobody"}
    return Ask(TOKENIZE, asker.body(prompt="a"), asker.has_keys, headers)


ASKS: dict[str, tuple[float, Callable[[Asker], Ask]]] = {
    "chat": (8, _chat),
    "stream of a chat": (10, _stream_of_chat),
    "text": (8, _text),
    "stream of a text": (10, _stream_of_text),
    "several answers": (5, _several),
    "long prompt": (2, _long_prompt),
    "long answer": (4, _long_answer),
    "logprobs": (5, _logprobs),
    "JSON schema": (5, _json_schema),
    "regex": (5, _regex),
    "tools": (5, _tools),
    "embeddings": (5, _embeddings),
    "tokenize": (4, _tokenize),
    "message": (4, _message),
    "response": (4, _response),
    "models and schema": (2, _look),
    "bad": (10, _bad),
    "stranger": (1, _stranger),
}
