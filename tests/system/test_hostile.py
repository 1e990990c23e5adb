"""What a stranger can send to the program, and what its neighbours see of it."""

from __future__ import annotations

import resource
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from minisgl.benchmark.stress.attacks import ATTACKS
from minisgl.benchmark.stress.target import Server, Target
from minisgl.benchmark.stress.watch import HealthWatch, NeighbourWatch, quantile_s
from tests.system.harness import MAX_OPEN, MODEL, TIMEOUT_S, Program, small_server, wait_until
from tests.system.oracle import CONTEXT

pytestmark = pytest.mark.slow
NUM_DESCRIPTORS = 256
NUM_SILENT = 300
LONGEST_WAIT_S = 20.0  # generous: it was minutes, and other tests run beside this one
NUM_BODIES = 16  # of a flood
MIB = 2**20
TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
TURN = b'{"role": "user", "content": "hi"}'


def _limit_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_DESCRIPTORS, NUM_DESCRIPTORS))


@pytest.fixture(scope="module")
def narrow(folder: Path) -> Iterator[Program]:
    """A server with few descriptors."""
    with Program(*small_server(folder), preexec_fn=_limit_descriptors) as program:
        yield program.wait_ready()


def assert_is_healthy(program: Program) -> None:
    response = httpx.get(f"{program.url}/health", timeout=LONGEST_WAIT_S)
    assert response.status_code == 200


def test_silent_connections_take_neither_health_nor_the_disk(narrow: Program) -> None:
    num_logged = len(narrow.stderr)
    with ExitStack() as silent:
        for _ in range(NUM_SILENT):
            silent.enter_context(socket.create_connection(("127.0.0.1", narrow.port), TIMEOUT_S))
        for _ in range(10):
            assert_is_healthy(narrow)
        refused = httpx.get(f"{narrow.url}/v1/models", timeout=TIMEOUT_S)
        assert refused.status_code == 503
    assert len(narrow.stderr) - num_logged < 4096
    wait_until(lambda: _is_served(narrow), "others are served again")


def test_connections_that_come_and_go_leave_nothing(narrow: Program) -> None:
    num_logged = len(narrow.stderr)
    for _ in range(20):
        with ExitStack() as dropped:
            for _ in range(100):
                dropped.enter_context(
                    socket.create_connection(("127.0.0.1", narrow.port), TIMEOUT_S)
                )
        assert_is_healthy(narrow)
    assert len(narrow.stderr) - num_logged < 4096
    wait_until(lambda: _is_served(narrow), "others are served again")


def _is_served(program: Program) -> bool:
    body = {"model": MODEL, "prompt": "the dog", "max_tokens": 1}
    response = httpx.post(f"{program.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    return response.status_code == 200


def _body(field: bytes, value: bytes) -> bytes:
    return b'{"model": "%s", "%s": %s}' % (MODEL.encode(), field, value)


def _chat(field: bytes, value: bytes) -> bytes:
    return b'{"model": "%s", "messages": [%s], "%s": %s}' % (MODEL.encode(), TURN, field, value)


def _list(item: bytes, num_bytes: int) -> bytes:
    return b"[" + (item + b",") * (num_bytes // (len(item) + 1)) + item + b"]"


ALMOST = 32 * MIB - 1024
TOO_LONG = "maximum context length is 16384 tokens"


def costly_bodies() -> dict[str, tuple[str, bytes, str]]:
    """For each the route, the body and a part of the refusal. They take 400 MB."""
    return {
        "bad ids": (TEXT, _body(b"prompt", _list(b"-1", MIB)), TOO_LONG),
        "many ids": (TEXT, _body(b"prompt", _list(b"5", ALMOST)), TOO_LONG),
        "many prompts": (TEXT, _body(b"prompt", _list(b"[5]", ALMOST)), f"at most {MAX_OPEN}"),
        "ids to detokenize": ("/detokenize", _body(b"tokens", _list(b"5", ALMOST)), TOO_LONG),
        "many inputs": (
            "/v1/embeddings",
            _body(b"input", _list(b'"a"', ALMOST)),
            f"at most {MAX_OPEN}",
        ),
        "a long text": (TEXT, _body(b"prompt", b'"' + b"a" * ALMOST + b'"'), TOO_LONG),
        "a long text to tokenize": (
            "/tokenize",
            _body(b"prompt", b'"' + b"a " * (2 * MIB) + b'"'),
            TOO_LONG,
        ),
        "only brackets": (CHAT, b"[" * ALMOST, "recursion limit"),
        "deep objects": (CHAT, b'{"a":' * (ALMOST // 5), "recursion limit"),
        "deep objects in a field": (
            CHAT,
            _chat(b"guided_json", b'{"a":' * 100 + b"1" + b"}" * 100),
            "more than 64 deep",
        ),
        "many stops": (CHAT, _chat(b"stop", _list(b'"a"', 4 * 10**6)), "at most 32"),
        "many tools": (CHAT, _chat(b"tools", _list(b"{}", 3 * 10**6)), "at most 128"),
        "many messages": (CHAT, _body(b"messages", _list(TURN, ALMOST)), TOO_LONG),
        "empty objects": (CHAT, _body(b"messages", _list(b"{}", ALMOST)), TOO_LONG),
        "a long name": (
            CHAT,
            _chat(b"logit_bias", b'{"' + b"x" * ALMOST + b'": 1}'),
            "at most 262144 bytes",
        ),
        "a long value": (CHAT, _chat(b"user", b'"' + b"x" * ALMOST + b'"'), "at most 262144 bytes"),
        "a long number": (CHAT, _chat(b"seed", b"9" * ALMOST), "out of range"),
    }


@pytest.fixture(scope="module")
def wide(folder: Path) -> Iterator[Program]:
    """A server that takes bodies of 32 MiB."""
    with Program(
        *small_server(folder, "--max-body-mb", "32", "--max-prefill-length", "512")
    ) as program:
        yield program.wait_ready()


def server_of(program: Program) -> Server:
    return Server("127.0.0.1", program.port, MODEL, context=CONTEXT, max_open=MAX_OPEN)


@contextmanager
def neighbours(program: Program) -> Iterator[None]:
    """Health checks and a stream beside the block: both go on. Afterwards nothing is open."""
    server = server_of(program)
    with NeighbourWatch(server) as stream, HealthWatch(server) as health:
        stream.wait_for_chunk()
        yield
    assert health.num_failed == 0
    assert quantile_s(health.checks, 1.0) < LONGEST_WAIT_S
    assert stream.num_broken == 0
    assert stream.largest_gap_s < LONGEST_WAIT_S
    wait_until(program.is_idle, "no request is open")


def test_costly_bodies_are_refused_by_their_bound_and_neighbours_do_not_wait(wide: Program) -> None:
    headers = {"content-type": "application/json"}
    with neighbours(wide), httpx.Client(timeout=TIMEOUT_S) as client:
        for name, (route, body, bound) in costly_bodies().items():
            answer = client.post(wide.url + route, content=body, headers=headers)
            assert 400 <= answer.status_code < 500, name
            message = answer.json()["error"]["message"]
            assert bound in message, name
            assert len(message) < 1000, name


def attack(program: Program, name: str, duration_s: float = 1.0) -> Counter[str]:
    """Run an attack beside the neighbours. Returns what came back, and how often."""
    seen: Counter[str] = Counter()
    target = Target(server_of(program), lambda what: seen.update([what]), duration_s)
    known = ATTACKS[name]
    bodies = known.make_bodies(target.server)[:NUM_BODIES]
    with neighbours(program):
        known.run(target, bodies)
    return seen


FLOODS = {
    "legal: messages": {"200"},
    "legal: items": {"200"},
    "legal: ids to text": {"200"},
    "legal: parameters": {"200", "429"},
    "numbers": {"200", "400"},
    # A trial is a 503 if other work has the processors.
    "grammar: lark of 40 terms": {"400", "429", "503"},
    "grammar: schema of 40 patterns": {"400", "429", "503"},
    "grammar: 200 others": {"200"},
    "tokenize flood": {"200", "429"},
    "detokenize flood": {"200", "429"},
    "embedding flood": {"200", "429"},
    "echo flood with logprobs": {"200", "429"},
    "answers at the limit": {"200", "400", "429"},
    "control tokens": {"400"},  # as text they are too many
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_requests_is_answered_or_refused(wide: Program, name: str) -> None:
    seen = attack(wide, name)
    assert seen
    assert seen.keys() <= FLOODS[name]


def test_malformed_http_is_refused(wide: Program) -> None:
    seen = attack(wide, "malformed HTTP")
    assert seen.keys() <= {"200", "400", "408", "431", "505", "closed"}
    assert seen["400"] > seen["200"]


@pytest.mark.parametrize(
    "name", ["dripping heads", "dripping bodies", "unread bodies", "aborts by the hundred"]
)
def test_clients_that_drip_or_hang_up_leave_nothing(wide: Program, name: str) -> None:
    assert attack(wide, name).keys() <= {"200", "429", "BrokenPipeError", "ConnectionResetError"}


def test_streams_that_nobody_reads_end_with_their_clients(wide: Program) -> None:
    seen = attack(wide, "streams that nobody reads", duration_s=0.5)
    assert seen == {"64 open": 1}
