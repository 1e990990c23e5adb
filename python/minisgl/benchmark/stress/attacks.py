"""The attacks by their names. Each does something that a malicious client might do, and ends."""

from __future__ import annotations

import itertools
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from minisgl.benchmark.stress.bodies import (
    CHAT,
    DETOKENIZE,
    EMBEDDINGS,
    ILLEGAL,
    LEGAL,
    MIB,
    TEXT,
    TOKENIZE,
    Costly,
    lark_of_terms,
    schema_of_patterns,
    schema_of_properties,
)
from minisgl.benchmark.stress.target import Server, Target

_WORST_BYTES = 32 * MIB - 1024
_AT_ONCE = 64
_SOON_S = 2.0
_CONTROL_TOKENS = "<|im_end|><|im_start|>system\n"
_RESET = struct.pack("ii", 1, 0)  # for SO_LINGER: closing resets the connection
_TURN = {"role": "user", "content": "hi"}


def _no_bodies(_server: Server) -> list[bytes]:
    return []


@dataclass(frozen=True, slots=True)
class Attack:
    """
    Attributes:
        run: gets the server and the bodies.
        make_bodies: makes the bodies before the attack begins, since that takes the attacker time.
    """

    run: Callable[[Target, list[bytes]], None]
    make_bodies: Callable[[Server], list[bytes]] = _no_bodies


def _post(path: str, at_once: int = 1) -> Callable[[Target, list[bytes]], None]:
    def run(target: Target, bodies: list[bytes]) -> None:
        target.post_all(path, bodies, at_once)

    return run


def _costly(costly: Costly, times: int = 3, at_once: int = 1) -> Attack:
    def make_bodies(server: Server) -> list[bytes]:
        return [costly.make(server, _WORST_BYTES)] * times

    return Attack(_post(costly.path, at_once), make_bodies)


# ---- connections


@contextmanager
def _sockets(target: Target, count: int) -> Iterator[list[socket.socket]]:
    """Open up to `count` connections, as long as they are accepted; close them at the end."""
    with ExitStack() as stack:
        opened = []
        for _ in range(count):
            try:
                opened.append(stack.enter_context(target.open_socket()))
            except OSError as error:
                target.report(type(error).__name__)
        yield opened


def _silent(target: Target, _bodies: list[bytes]) -> None:
    with _sockets(target, 1000) as opened:
        target.report(f"{len(opened)} open")
        time.sleep(target.duration_s)


def _drip(target: Target, begin: bytes, more: bytes) -> None:
    """Send a few bytes per second on each of some hundred connections."""
    with _sockets(target, 300) as opened:
        for sock in opened:
            with suppress(OSError):
                sock.sendall(begin)
        deadline = time.monotonic() + target.duration_s
        while time.monotonic() < deadline:
            for sock in opened:
                with suppress(OSError):
                    sock.sendall(more)
            time.sleep(0.5)


def _drip_heads(target: Target, _bodies: list[bytes]) -> None:
    _drip(target, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n", b"x: y\r\n")


def _drip_bodies(target: Target, _bodies: list[bytes]) -> None:
    _drip(target, target.head(TEXT, MIB), b"[")


def _open_and_drop(target: Target, _bodies: list[bytes]) -> None:
    """Half of them are reset, half are closed."""
    for i in range(2000):
        try:
            with target.open_socket() as sock:
                if i % 2:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        except OSError as error:
            target.report(type(error).__name__)


def _unread_bodies(target: Target, _bodies: list[bytes]) -> None:
    """A refused request whose body goes on; if the server needs an API key, it has none."""
    head = target.head("/v1/nothing", 1 << 40, has_key=False)
    with _sockets(target, 200) as opened:
        for sock in opened:
            with suppress(OSError):
                sock.sendall(head + b"x" * 65536)
        deadline = time.monotonic() + target.duration_s
        while time.monotonic() < deadline:
            for sock in opened:
                with suppress(OSError):
                    sock.sendall(b"x" * 1024)
            time.sleep(0.1)


_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
_CHUNKED = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MALFORMED: list[bytes] = [
    _HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    _HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    _HEAD + b"Content-Length: -1\r\n\r\n",
    _HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n",
    _HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    _CHUNKED + b"-5\r\nhello\r\n",
    _CHUNKED + b"FFFFFFFFFFFFFFFFFFFFFFFF\r\nhello\r\n",
    _CHUNKED + b"zz\r\n\r\n",
    _CHUNKED + b"5;" + b"x" * 100_000 + b"\r\nhello\r\n",
    _CHUNKED + b"1\r\n[\r\n" * 10_000,
    _CHUNKED + b"0\r\n" + b"a: b\r\n" * 10_000 + b"\r\n",
    _HEAD + b"X: " + b"x" * (4 * MIB) + b"\r\n\r\n",
    _HEAD + b"x: y\r\n" * 100_000 + b"\r\n",
    b"GET /" + b"a" * MIB + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: a\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 100,
    b"\0" * 100_000,
    b"\r\n" * 50_000,
    b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 500,
    b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
]


def _malformed(target: Target, _bodies: list[bytes]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda raw: _send_raw(target, raw), MALFORMED * 5))


def _send_raw(target: Target, raw: bytes) -> None:
    """Send bytes, and report the status of the first line that comes back."""
    answer = b""
    with suppress(OSError), target.open_socket() as sock:
        sock.settimeout(_SOON_S)
        with suppress(OSError):
            sock.sendall(raw)
        answer = sock.recv(64)
    words = answer.split()
    target.report(words[1].decode("latin-1") if len(words) > 1 else "closed")


# ---- streams


def _stream_body(server: Server, num_answers: int) -> bytes:
    return server.body(
        prompt="the dog",
        max_tokens=server.context - 16,
        n=num_answers,
        temperature=1,
        ignore_eos=True,
        stream=True,
    )


def _unread_streams(target: Target, _bodies: list[bytes]) -> None:
    """Clients that ask for long answers and read nothing of them."""
    num_answers = max(1, min(128, target.server.max_open // _AT_ONCE))
    body = _stream_body(target.server, num_answers)
    with _sockets(target, _AT_ONCE) as opened:
        for sock in opened:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with suppress(OSError):
                sock.sendall(target.head(TEXT, len(body)) + body)
        target.report(f"{len(opened)} open")
        time.sleep(4 * target.duration_s)


def _aborts(target: Target, _bodies: list[bytes]) -> None:
    """Streams by the hundred whose clients hang up at the first chunk, or before."""
    body = _stream_body(target.server, 2)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: _abort(target, body, has_begun=i % 2 == 0), range(400)))


def _abort(target: Target, body: bytes, *, has_begun: bool) -> None:
    try:
        with target.open_socket() as sock:
            sock.sendall(target.head(TEXT, len(body)) + body)
            if has_begun:
                target.report(sock.recv(12)[9:].decode("latin-1"))
    except OSError as error:
        target.report(type(error).__name__)


# ---- requests


def _grammars(**fields: Any) -> Callable[[Server], list[bytes]]:
    def make_bodies(server: Server) -> list[bytes]:
        return [server.body(prompt=["a"] * 10, max_tokens=16, **fields)] * 4

    return make_bodies


def _chat_of_schema(server: Server) -> list[bytes]:
    schema = schema_of_properties(51_000)
    num_answers = min(128, server.max_open - 2)
    body = server.body(messages=[_TURN], max_tokens=64, n=num_answers, guided_json=schema)
    return [body] * 2


def _distinct_grammars(server: Server) -> list[bytes]:
    patterns = [
        f"({word}|[a-z]{{1,{i}}}[0-9]*)+x{i}"
        for i, word in zip(range(1, 201), _words(), strict=False)
    ]
    return [server.body(prompt="a", max_tokens=8, guided_regex=pattern) for pattern in patterns]


def _words() -> Iterator[str]:
    return ("".join(letters) for letters in itertools.product("abcdefgh", repeat=4))


def _texts(path: str, field: str, times: int = 256, **fields: Any) -> Attack:
    """A flood of texts of the largest size, so many that most have to wait."""

    def make_bodies(server: Server) -> list[bytes]:
        text = ("the dog says " * server.context)[: server.context - 8]
        return [server.body(**{field: text}, **fields)] * times

    return Attack(_post(path, _AT_ONCE), make_bodies)


def _ids_to_text(server: Server) -> list[bytes]:
    return [server.body(tokens=[5 + i % 200 for i in range(server.context)])] * 256


def _echoes(server: Server) -> list[bytes]:
    ids = [5 + i % 200 for i in range(server.context - 2)]
    return [server.body(prompt=ids, echo=True, max_tokens=0)] * 64


def _echoes_of_prompts(server: Server) -> list[bytes]:
    body = server.body(
        prompt=["a b c " * 30] * (server.max_open // 4), echo=True, logprobs=20, max_tokens=1
    )
    return [body] * 16


def _answers_at_the_limit(server: Server) -> list[bytes]:
    num_prompts = max(1, (server.max_open - 2) // 4)
    body = server.body(prompt=["the dog"] * num_prompts, n=4, max_tokens=16, ignore_eos=True)
    too_many = server.body(prompt=["the dog"] * server.max_open, n=128, max_tokens=16)
    return [body, too_many] * 8


def _control_tokens(server: Server) -> list[bytes]:
    text = _CONTROL_TOKENS * (server.context // 16)
    body = server.body(messages=[{"role": "user", "content": text}], max_tokens=1)
    return [body] * 64


def _numbers(server: Server) -> list[bytes]:
    """Numbers that are huge, tiny or not a number, in every field that takes one."""
    fields = ("temperature", "top_p", "top_k", "seed", "max_tokens", "n", "min_tokens", "priority")
    numbers = (b"1e308", b"-1e308", b"1e-320", b"NaN", b"9" * 4000, b"-" + b"9" * 400, b"1e9999")
    plain = server.body(prompt="a")[:-1]
    return [
        plain + b', "%b": %b}' % (field.encode(), number) for field in fields for number in numbers
    ]


def _pieces_of_content(server: Server) -> list[bytes]:
    parts = [{"type": "text", "text": "<|im_"}] * (server.context // 8)
    body = server.body(messages=[{"role": "user", "content": parts}], max_tokens=1)
    return [body] * 16


ATTACKS: dict[str, Attack] = {
    **{f"illegal: {name}": _costly(costly) for name, costly in ILLEGAL.items()},
    **{f"legal: {name}": _costly(costly) for name, costly in LEGAL.items()},
    "bodies at once": _costly(ILLEGAL["many messages"], times=24, at_once=24),
    "grammar: lark of 20 terms": Attack(
        _post(TEXT, 4), _grammars(guided_grammar=lark_of_terms(20))
    ),
    "grammar: lark of 40 terms": Attack(
        _post(TEXT, 4), _grammars(guided_grammar=lark_of_terms(40))
    ),
    "grammar: schema of 40 patterns": Attack(
        _post(TEXT, 4), _grammars(guided_json=schema_of_patterns(40))
    ),
    "grammar: schema of 51 kB": Attack(_post(CHAT, 2), _chat_of_schema),
    "grammar: 200 others": Attack(_post(TEXT, 8), _distinct_grammars),
    "silent connections": Attack(_silent),
    "dripping heads": Attack(_drip_heads),
    "dripping bodies": Attack(_drip_bodies),
    "2000 opened and dropped": Attack(_open_and_drop),
    "unread bodies": Attack(_unread_bodies),
    "malformed HTTP": Attack(_malformed),
    "tokenize flood": _texts(TOKENIZE, "prompt"),
    "detokenize flood": Attack(_post(DETOKENIZE, _AT_ONCE), _ids_to_text),
    "embedding flood": _texts(EMBEDDINGS, "input", times=64),
    "echo flood": Attack(_post(TEXT, _AT_ONCE), _echoes),
    "echo flood with logprobs": Attack(_post(TEXT, 4), _echoes_of_prompts),
    "answers at the limit": Attack(_post(TEXT, 4), _answers_at_the_limit),
    "control tokens": Attack(_post(CHAT, 16), _control_tokens),
    "pieces of control tokens": Attack(_post(CHAT, 16), _pieces_of_content),
    "numbers": Attack(_post(TEXT, 8), _numbers),
    "streams that nobody reads": Attack(_unread_streams),
    "aborts by the hundred": Attack(_aborts),
}
