"""A tokenizer or detokenizer that dies or hangs is replaced alone: the schedulers go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.system.harness import (
    MAX_RUNNING,
    TIMEOUT_S,
    Program,
    endless_body,
    open_stream,
    small_server,
    wait_until,
)
from tests.system.oracle import text_after

pytestmark = pytest.mark.slow

IDLE = ["requests_running 0.0", "requests_waiting 0.0", "kv_pages_used_ratio 0.0"]
LENGTH = 600  # of streams that are read to their end


def metrics(program: Program) -> str:
    return httpx.get(f"{program.url}/metrics", timeout=TIMEOUT_S).text


def wait_for_metrics(program: Program, *lines: str) -> None:
    def holds() -> bool:
        text = metrics(program)
        return all(f"minisgl_{line}\n" in text for line in lines)

    wait_until(holds, f"{lines} are said")


def send(program: Program, **fields: Any) -> HTTPConnection:
    """Send a request; its response is not read yet."""
    connection = HTTPConnection("127.0.0.1", program.port, timeout=TIMEOUT_S)
    body = json.dumps(endless_body(**fields))
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", body, headers)
    return connection


def text_of(connection: HTTPConnection) -> str:
    response = connection.getresponse()
    answer = json.loads(response.read())
    assert response.status == 200, answer
    text: str = answer["choices"][0]["text"]
    return text


def assert_is_whole(stream: Any, num_tokens: int) -> None:
    """The stream ended by its length; `open_stream` has taken its first event, of one token."""
    events = list(stream)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    rest = "".join(event["choices"][0]["text"] for event in events)
    assert text_after("the dog", num_tokens).endswith(rest)
    assert len(rest) >= len(text_after("the dog", num_tokens)) - len(text_after("the dog", 8))


def schedulers(program: Program) -> dict[str, psutil.Process]:
    workers = program.workers()
    return {name: workers[name] for name in workers if name.startswith("scheduler")}


def wait_for_successor(program: Program, name: str, dead: psutil.Process) -> None:
    wait_until(lambda: program.workers().get(name, dead) != dead, f"{name} is replaced")
    program.remember_processes()


def kill_a_tokenizer(program: Program) -> None:
    """No client sees it: not who is being answered, who waits, or who comes later."""
    before = schedulers(program)
    with ExitStack() as resources:
        streams = [
            resources.enter_context(open_stream(program, max_tokens=LENGTH))
            for _ in range(MAX_RUNNING)
        ]
        waiting = [
            resources.enter_context(closing(send(program, prompt="the fox", max_tokens=8)))
            for _ in range(4)
        ]
        wait_for_metrics(program, 'worker_failures_total{worker="tokenizer-0"} 0.0')
        tokenizer = program.workers()["tokenizer-0"]
        tokenizer.kill()
        late = [
            resources.enter_context(closing(send(program, prompt="the fox", max_tokens=8)))
            for _ in range(4)
        ]
        assert [text_of(one) for one in (*waiting, *late)] == [text_after("the fox", 8)] * 8
        for stream in streams:
            assert_is_whole(stream, LENGTH)
    wait_for_successor(program, "tokenizer-0", tokenizer)
    assert "tokenizer-0 died with exit code -9" in program.stderr
    assert schedulers(program) == before
    wait_for_metrics(program, *IDLE, 'worker_failures_total{worker="tokenizer-0"} 1.0')
    assert program.is_idle()


def kill_the_detokenizer(program: Program) -> None:
    """Only answers that had begun are lost."""
    before = schedulers(program)
    with ExitStack() as resources:
        begun = [resources.enter_context(open_stream(program)) for _ in range(MAX_RUNNING)]
        waiting = [
            resources.enter_context(closing(send(program, prompt="the fox", max_tokens=8)))
            for _ in range(4)
        ]
        detokenizer = program.workers()["detokenizer"]
        detokenizer.kill()
        for stream in begun:
            *_, last = stream
            assert "detokenizer died" in last["error"]["message"]
        assert [text_of(one) for one in waiting] == [text_after("the fox", 8)] * 4
        with closing(send(program, max_tokens=24)) as new:
            assert text_of(new) == text_after("the dog", 24)
    wait_for_successor(program, "detokenizer", detokenizer)
    assert schedulers(program) == before
    wait_for_metrics(program, *IDLE, 'worker_failures_total{worker="detokenizer"} 1.0')
    assert program.is_idle()


@pytest.mark.parametrize(
    ("options", "faults"),
    [
        ([], [kill_a_tokenizer, kill_the_detokenizer]),
        (["--num-tokenizer", "0"], [kill_the_detokenizer]),
        (
            ["--tp", "2", "--api-workers", "2", "--num-tokenizer", "2"],
            [kill_a_tokenizer, kill_the_detokenizer],
        ),
    ],
    ids=["one tokenizer", "none", "two of each"],
)
def test_dead_tokenizers_and_detokenizers_are_replaced(
    options: list[str], faults: list[Callable[[Program], None]], folder: Path
) -> None:
    with Program(*small_server(folder, *options)) as program:
        program.wait_ready()
        for fault in faults:
            fault(program)
        program.process.terminate()
        assert program.wait() == 0
        program.assert_nothing_is_left()


def hang_up_while_a_tokenizer_is_dead(program: Program) -> None:
    """No page is left."""
    with open_stream(program), open_stream(program):
        tokenizer = program.workers()["tokenizer-0"]
        tokenizer.suspend()
    tokenizer.kill()
    wait_for_successor(program, "tokenizer-0", tokenizer)
    wait_for_metrics(program, *IDLE)
    assert program.is_idle()


def test_a_signal_while_a_successor_starts_ends_the_server(folder: Path) -> None:
    with Program(*small_server(folder)) as program:
        program.wait_ready()
        hang_up_while_a_tokenizer_is_dead(program)
        tokenizer = program.workers()["tokenizer-0"]
        tokenizer.kill()
        wait_for_successor(program, "tokenizer-0", tokenizer)
        program.process.terminate()
        assert program.wait() == 0
        program.assert_nothing_is_left()


def stop_a_tokenizer(program: Program) -> None:
    """It is killed and replaced."""
    before = schedulers(program)
    with open_stream(program, max_tokens=LENGTH) as stream:
        program.workers()["tokenizer-0"].suspend()
        with closing(send(program, prompt="the fox", max_tokens=8)) as waiting:
            assert text_of(waiting) == text_after("the fox", 8)
        assert_is_whole(stream, LENGTH)
    assert "tokenizer-0 did nothing for 5 s" in program.stderr
    assert schedulers(program) == before


def test_one_that_dies_while_it_starts_ends_the_server(folder: Path) -> None:
    with Program(*small_server(folder, "--step-timeout-s", "5")) as program:
        program.wait_ready()
        stop_a_tokenizer(program)
        first = program.workers()["tokenizer-0"]
        first.kill()
        wait_for_successor(program, "tokenizer-0", first)
        program.workers()["tokenizer-0"].kill()
        assert program.wait() == 1
        assert "tokenizer-0 died" in program.stderr.splitlines()[-1]
        assert "does not start again" in program.stderr.splitlines()[-1]
        program.assert_nothing_is_left()


def nth_standby(program: Program, number: int) -> psutil.Process:
    """The process that stands by when so many were prepared, this one included."""
    wait_until(lambda: program.stderr.count("standby-0 is ready") == number, "a process stands by")
    program.remember_processes()
    return program.workers()["standby-0"]


def assert_answers(program: Program) -> None:
    with closing(send(program, prompt="the fox", max_tokens=8)) as waiting:
        assert text_of(waiting) == text_after("the fox", 8)


def test_a_process_that_stands_by_is_the_next_scheduler(folder: Path) -> None:
    """If it dies before, nobody notices but the log."""
    with Program(*small_server(folder, "--keep-standbys")) as program:
        program.wait_ready()
        standby = nth_standby(program, 1)
        dead = program.workers()["scheduler-0"]
        dead.kill()
        wait_for_successor(program, "scheduler-0", dead)
        wait_until(program.is_healthy, "it accepts requests")
        assert program.workers()["scheduler-0"] == standby
        assert_answers(program)

        nth_standby(program, 2).kill()
        said = "standby-0 died with exit code -9 (SIGKILL); no request needed it"
        wait_until(lambda: said in program.stderr, said)
        assert_answers(program)
        assert program.workers()["scheduler-0"] == standby
        program.process.terminate()
        assert program.wait() == 0
        program.assert_nothing_is_left()


def test_a_scheduler_has_a_successor_where_the_process_that_stands_by_dies_with_it(
    folder: Path,
) -> None:
    with Program(*small_server(folder, "--keep-standbys")) as program:
        program.wait_ready()
        standby = nth_standby(program, 1)
        dead = program.workers()["scheduler-0"]
        standby.suspend()  # else it may take the place of the dead one before it dies, too
        dead.kill()
        standby.kill()
        wait_for_successor(program, "scheduler-0", dead)
        wait_until(program.is_healthy, "it accepts requests")
        assert_answers(program)
        program.process.terminate()
        assert program.wait() == 0
        program.assert_nothing_is_left()
