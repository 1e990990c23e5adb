"""Two servers behind a proxy restart one after the other, and no request fails."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from minisgl.benchmark.stress.clients import Client, Tally, running
from minisgl.benchmark.stress.mix import Asker
from minisgl.benchmark.stress.proxy import Proxy
from tests.system.harness import MAX_RUNNING, MODEL, TIMEOUT_S, Program, small_server, wait_until
from tests.system.oracle import CONTEXT

pytestmark = pytest.mark.slow
NUM_CLIENTS = 2 * MAX_RUNNING
KINDS = frozenset({"chat", "stream of a chat", "text", "stream of a text", "several answers"})


def client(host: str, number: int, tally: Tally) -> Client:
    asker = Asker(Random(number), MODEL, CONTEXT, max_tokens=16, only=KINDS)
    return Client(host, asker, tally, limit_s=TIMEOUT_S, share_left=0)


def wait_for_more_answers(tally: Tally) -> None:
    enough = tally.count("answered") + 2 * NUM_CLIENTS
    wait_until(lambda: tally.count("answered") >= enough, "clients get more answers")


def drain(program: Program) -> None:
    program.process.send_signal(signal.SIGTERM)
    assert program.wait() == 0
    program.assert_nothing_is_left()


def test_no_request_fails_while_servers_behind_a_proxy_restart(folder: Path) -> None:
    argv = small_server(folder, "--num-tokenizer", "0", "--drain-timeout-s", "100000")
    tally = Tally()
    with ExitStack() as stack:
        programs = [stack.enter_context(Program(*argv)) for _ in range(2)]
        for program in programs:
            program.wait_ready()
        first, second = programs
        proxy = stack.enter_context(Proxy([f"127.0.0.1:{each.port}" for each in programs]))
        clients = [client(proxy.host, number, tally) for number in range(NUM_CLIENTS)]
        with running(clients):
            wait_for_more_answers(tally)
            drain(first)
            wait_for_more_answers(tally)
            again = stack.enter_context(Program(*argv, "--port", str(first.port)))
            again.wait_ready()
            drain(second)
            wait_for_more_answers(tally)
    assert tally.problems == []
    assert {outcome for _, outcome in tally.outcomes} == {"answered"}
    assert proxy.num_sent_again > 0
