"""Costly bodies: the largest that are legal, and the worst that are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minisgl.benchmark.stress.target import Server

MIB = 2**20
TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
GENERATE = "/generate"
_TURN = b'{"role": "user", "content": "hi"}'
_NUM_TOOLS = 128
_NUM_STOPS = 32
_NUM_BIASES = 1024


@dataclass(frozen=True, slots=True)
class Costly:
    """A body.

    Attributes:
        make: makes it for a server, in a size in bytes.
        bound: part of the error that refuses it; None if it is legal.
    """

    path: str
    make: Callable[[Server, int], bytes]
    bound: str | None = None


def _field(name: bytes, value: bytes, server: Server) -> bytes:
    return b'{"model": "%s", "%s": %s}' % (server.model.encode(), name, value)


def _chat_field(name: bytes, value: bytes, server: Server) -> bytes:
    return b'{"model": "%s", "messages": [%s], "%s": %s}' % (
        server.model.encode(),
        _TURN,
        name,
        value,
    )


def _items(item: bytes, num_bytes: int) -> bytes:
    """A list of at most `num_bytes`, with at least one item."""
    count = max(1, (num_bytes - 2) // (len(item) + 1))
    return b"[" + b",".join([item] * count) + b"]"


def _text(text: bytes, num_bytes: int) -> bytes:
    return b'"' + text * (num_bytes // len(text)) + b'"'


ILLEGAL: dict[str, Costly] = {
    "bad ids": Costly(TEXT, lambda s, n: _field(b"prompt", _items(b"-1", n), s), "at most"),
    "many ids": Costly(TEXT, lambda s, n: _field(b"prompt", _items(b"5", n), s), "at most"),
    "many prompts": Costly(TEXT, lambda s, n: _field(b"prompt", _items(b"[5]", n), s), "at most"),
    "ids to detokenize": Costly(
        DETOKENIZE, lambda s, n: _field(b"tokens", _items(b"5", n), s), "at most"
    ),
    "many inputs": Costly(
        EMBEDDINGS, lambda s, n: _field(b"input", _items(b'"a"', n), s), "at most"
    ),
    "a long text": Costly(TEXT, lambda s, n: _field(b"prompt", _text(b"a", n), s), "the limit is"),
    "a long text of words": Costly(
        TOKENIZE, lambda s, n: _field(b"prompt", _text(b"a ", n), s), "the limit is"
    ),
    "a long text to generate from": Costly(
        GENERATE, lambda s, n: _field(b"prompt", _text(b"the dog ", n), s), "the limit is"
    ),
    "a long message": Costly(
        CHAT,
        lambda s, n: _field(b"messages", b'[{"role": "user", "content": %b}]' % _text(b"a ", n), s),
        "the limit is",
    ),
    "many items": Costly(RESPONSES, lambda s, n: _field(b"input", _items(_TURN, n), s), "at most"),
    "only brackets": Costly(CHAT, lambda _s, n: b"[" * n, "recursion limit"),
    "deep objects": Costly(CHAT, lambda _s, n: b'{"a":' * (n // 5), "recursion limit"),
    "deep objects in a field": Costly(
        CHAT,
        lambda s, _n: _chat_field(b"guided_json", b'{"a":' * 100 + b"1" + b"}" * 100, s),
        "more than 64 deep",
    ),
    "many stops": Costly(CHAT, lambda s, n: _chat_field(b"stop", _items(b'"a"', n), s), "at most"),
    "many tools": Costly(CHAT, lambda s, n: _chat_field(b"tools", _items(b"{}", n), s), "at most"),
    "many biases": Costly(
        CHAT,
        lambda s, n: _chat_field(b"logit_bias", _biases(n // 12), s),
        "at most",
    ),
    "many messages": Costly(CHAT, lambda s, n: _field(b"messages", _items(_TURN, n), s), "at most"),
    "empty objects": Costly(CHAT, lambda s, n: _field(b"messages", _items(b"{}", n), s), "at most"),
    "a long name": Costly(
        CHAT,
        lambda s, n: _chat_field(b"logit_bias", b'{"' + b"x" * n + b'": 1}', s),
        "at most 262144 bytes",
    ),
    "a long value": Costly(
        CHAT, lambda s, n: _chat_field(b"user", _text(b"x", n), s), "at most 262144 bytes"
    ),
    "a long number": Costly(CHAT, lambda s, n: _chat_field(b"seed", b"9" * n, s), "out of range"),
    "a long fraction": Costly(
        CHAT, lambda s, n: _chat_field(b"top_p", b"0." + b"9" * n, s), "at most 262144 bytes"
    ),
    "escapes": Costly(
        CHAT, lambda s, n: _chat_field(b"user", _text(rb"\u00e9", n), s), "at most 262144 bytes"
    ),
    "half pairs": Costly(
        TEXT, lambda s, n: _field(b"prompt", _text(rb"\ud83d", n), s), "surrogate"
    ),
}


def _biases(count: int) -> bytes:
    return json.dumps({str(i): 1.0 for i in range(count)}).encode()


def _largest_parameters(server: Server, _num_bytes: int) -> bytes:
    """The most stops, tools and biases that may be sent, for the most answers."""
    tool: dict[str, Any] = {"type": "object", "properties": {"a" * 40: {"type": "string"}}}
    functions = [{"name": f"f{i}", "parameters": tool} for i in range(_NUM_TOOLS)]
    return server.body(
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=64,
        n=min(128, server.max_open // 2),
        stop=["x" * 900 + str(i) for i in range(_NUM_STOPS)],
        stop_token_ids=list(range(_NUM_STOPS)),
        tools=[{"type": "function", "function": function} for function in functions],
        tool_choice="none",
        logit_bias={str(i): 1.0 for i in range(min(_NUM_BIASES, 256))},
        metadata={f"k{i}": "v" for i in range(_NUM_BIASES)},
        top_logprobs=20,
        logprobs=True,
    )


def _ids(num: int) -> list[int]:
    return [5 + i % 200 for i in range(num)]


def _prompts_of_ids(server: Server, num_bytes: int) -> bytes:
    count = max(1, server.max_open // 2)
    length = min(server.context - 2, num_bytes // 5 // count)
    return server.body(prompt=[_ids(length)] * count, max_tokens=1)


def _turns(count: int) -> list[dict[str, str]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": ""} for i in range(count)]


LEGAL: dict[str, Costly] = {
    "a prompt of ids": Costly(TEXT, lambda s, _n: s.body(prompt=_ids(s.context - 2), max_tokens=1)),
    "a prompt of text": Costly(
        TEXT, lambda s, _n: s.body(prompt="a" * (s.context - 8), max_tokens=1)
    ),
    "prompts of ids": Costly(TEXT, _prompts_of_ids),
    "prompts of text": Costly(
        TEXT, lambda s, _n: s.body(prompt=["a b c " * 99] * (s.max_open // 2), max_tokens=1)
    ),
    "messages": Costly(CHAT, lambda s, _n: s.body(messages=_turns(s.context // 20), max_tokens=1)),
    "items": Costly(
        RESPONSES, lambda s, _n: s.body(input=_turns(s.context // 20), max_output_tokens=1)
    ),
    "inputs": Costly(EMBEDDINGS, lambda s, _n: s.body(input=["a b c"] * (s.max_open // 2))),
    "a text to tokenize": Costly(TOKENIZE, lambda s, _n: s.body(prompt="a" * (s.context - 8))),
    "ids to text": Costly(DETOKENIZE, lambda s, _n: s.body(tokens=_ids(s.context))),
    "a text to generate from": Costly(
        GENERATE, lambda s, _n: s.body(prompt="a" * (s.context - 8), max_tokens=1)
    ),
    "parameters": Costly(CHAT, _largest_parameters),
}


def lark_of_terms(num_terms: int) -> str:
    """A grammar of intersections and complements, of a few hundred characters."""
    terms = [
        f"~/(.*[a-f]){{{k}}}[g-z]{{{k}}}.*/" if k % 2 else f"/(.*[a-f]){{{k}}}.*/"
        for k in range(1, num_terms)
    ]
    return "start: X\nX: " + " & ".join(terms)


def schema_of_patterns(num_patterns: int) -> dict[str, Any]:
    """A schema of two kilobytes, for which llguidance needs minutes and gigabytes."""
    each = [{"type": "string", "pattern": f"^(.*[a-f]){{{k}}}.*$"} for k in range(1, num_patterns)]
    return {"allOf": each}


def schema_of_properties(num_bytes: int) -> dict[str, Any]:
    """An ordinary schema of about `num_bytes`."""
    item = {"type": "string", "maxLength": 24, "description": "x" * 40}
    names = [f"property_{i}" for i in range(num_bytes // (len(json.dumps(item)) + 36))]
    return {
        "type": "object",
        "properties": dict.fromkeys(names, item),
        "required": names,
        "additionalProperties": False,
    }
