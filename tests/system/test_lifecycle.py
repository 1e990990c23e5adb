"""How the program ends: by a signal, a killed process or a failed start.

No process and no file is left, and every open request gets an error with the reason.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

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

KUBERNETES = Path(__file__).parents[2] / "docs" / "operating" / "kubernetes.yaml"


def assert_answers(program: Program) -> None:
    answer = httpx.post(
        f"{program.url}/v1/completions", json=endless_body(max_tokens=24), timeout=TIMEOUT_S
    )
    assert answer.json()["choices"][0]["text"] == text_after("the dog", 24)


def send(program: Program, **fields: Any) -> HTTPConnection:
    """Send a request; its response is not read yet."""
    connection = HTTPConnection("127.0.0.1", program.port, timeout=TIMEOUT_S)
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps(endless_body(**fields)),
        {"content-type": "application/json"},
    )
    return connection


def wait_for_metric(program: Program, name: str, value: int) -> None:
    line = f"minisgl_{name} {value}.0"
    wait_until(
        lambda: line in httpx.get(f"{program.url}/metrics", timeout=TIMEOUT_S).text,
        f"{line} is said",
    )


class OpenRequests:
    """A stream and two whole answers that run, and one more that waits for a row; all are endless.

    Args:
        waiting: what is different about the one that waits.
    """

    def __init__(self, program: Program, resources: ExitStack, **waiting: Any) -> None:
        self._stream = resources.enter_context(open_stream(program))
        self._whole = []
        for fields in [{}] * (MAX_RUNNING - 1) + [waiting]:
            self._whole.append(resources.enter_context(closing(send(program, **fields))))
            wait_for_metric(program, "requests_running", min(len(self._whole) + 1, MAX_RUNNING))
        wait_for_metric(program, "requests_waiting", 1)

    def assert_failed(self, reason: str) -> None:
        """Each got an error that gives the reason."""
        self.assert_running_failed(reason)
        self._assert_whole_failed(self._whole[-1:], reason)

    def assert_running_failed(self, reason: str) -> None:
        """Each but the one that waited got an error that gives the reason."""
        *_, last = self._stream
        assert reason in last["error"]["message"]
        self._assert_whole_failed(self._whole[:-1], reason)

    def waiting_text(self) -> str:
        """The answer to the one that waited."""
        response = self._whole[-1].getresponse()
        assert response.status == 200
        text: str = json.loads(response.read())["choices"][0]["text"]
        return text

    def _assert_whole_failed(self, connections: list[HTTPConnection], reason: str) -> None:
        for connection in connections:
            response = connection.getresponse()
            assert response.status == 503
            assert reason in json.loads(response.read())["error"]["message"]


def last_line(program: Program) -> str:
    return program.stderr.splitlines()[-1]


def test_after_a_signal_and_its_time_to_drain_every_request_ends(folder: Path) -> None:
    options = [
        "--tp",
        "2",
        "--api-workers",
        "2",
        "--num-tokenizer",
        "2",
        "--cache",
        "naive",
        "--no-overlap",
        "--max-prefill-length",
        "3",
        "--drain-timeout-s",
        "1",
    ]
    with Program(*small_server(folder, *options)) as program:
        program.wait_ready()
        assert_answers(program)
        with ExitStack() as resources:
            opened = OpenRequests(program, resources)
            program.process.send_signal(signal.SIGTERM)
            opened.assert_failed("shutting down")
        assert program.wait() == 0
        program.assert_nothing_is_left()
        assert "Traceback" not in program.stderr


def ignored_signals(process: psutil.Process) -> set[int]:
    status = Path(f"/proc/{process.pid}/status").read_text()
    (mask,) = re.findall(r"SigIgn:\s*(\w+)", status)
    return {number for number in range(1, 65) if int(mask, 16) >> (number - 1) & 1}


def test_a_signal_to_all_processes_lets_open_requests_end(folder: Path) -> None:
    """`timeout` sends it to the program first, and some supervisors to the whole group alone."""
    with Program(*small_server(folder, "--api-workers", "2")) as program:
        program.wait_ready()
        with open_stream(program, max_tokens=400) as stream:
            next(stream)
            for process in program.workers().values():
                assert {signal.SIGINT, signal.SIGTERM} <= ignored_signals(process), process
            program.process.send_signal(signal.SIGTERM)
            os.killpg(program.process.pid, signal.SIGTERM)
            *_, last = stream
            assert last["choices"][0]["finish_reason"] == "length"
        assert program.wait() == 0
        program.assert_nothing_is_left()
        assert "ERROR" not in program.stderr


def assert_drains(program: Program) -> None:
    """It says so at /health, and refuses new requests."""
    # Several times, because each connection is accepted by one of the API processes.
    wait_until(lambda: not any(program.is_healthy() for _ in range(8)), "it drains")
    health = httpx.get(f"{program.url}/health", timeout=TIMEOUT_S)
    refused = httpx.post(f"{program.url}/v1/completions", json=endless_body(), timeout=TIMEOUT_S)
    for response in (health, refused):
        assert response.status_code == 503
        assert "shutting down" in response.json()["error"]["message"]
        assert int(response.headers["retry-after"]) >= 1


def test_a_signal_lets_open_requests_end_and_a_second_ends_them_at_once(folder: Path) -> None:
    options = ["--api-workers", "3", "--num-tokenizer", "0", "--drain-timeout-s", "100000"]
    with Program(*small_server(folder, *options)) as program:
        program.wait_ready()
        with open_stream(program) as endless, closing(send(program)) as whole, ExitStack() as later:
            wait_for_metric(program, "requests_running", 2)
            short = later.enter_context(open_stream(program, max_tokens=400))
            program.process.send_signal(signal.SIGTERM)
            assert_drains(program)
            *_, last = short
            assert last["choices"][0]["finish_reason"] == "length"
            program.process.send_signal(signal.SIGTERM)
            *_, last = endless
            assert "shutting down" in last["error"]["message"]
            response = whole.getresponse()
            assert response.status == 503
            assert "shutting down" in json.loads(response.read())["error"]["message"]
        assert program.wait() == 130
        program.assert_nothing_is_left()
        assert "Traceback" not in program.stderr


def fail(program: Program, fault: Callable[[psutil.Process], None], name: str) -> None:
    """Let a worker fail under requests. Those that had begun get the reason, one an answer."""
    with ExitStack() as resources:
        opened = OpenRequests(program, resources, prompt="the fox", max_tokens=8)
        fault(program.workers()[name])
        opened.assert_running_failed(name)
        assert opened.waiting_text() == text_after("the fox", 8)
    wait_until(program.is_healthy, "it accepts requests")
    program.remember_processes()


def test_a_worker_that_dies_or_hangs_is_replaced_until_it_happens_too_often(folder: Path) -> None:
    options = ["--tp", "2", "--api-workers", "2", "--step-timeout-s", "5"]
    with Program(*small_server(folder, *options)) as program:
        program.wait_ready()
        fail(program, psutil.Process.kill, "scheduler-1")
        assert "scheduler-1 died with exit code -9" in program.stderr
        fail(program, psutil.Process.suspend, "detokenizer")
        assert "detokenizer did nothing for 5 s" in program.stderr
        assert_answers(program)
        with ExitStack() as resources:
            opened = OpenRequests(program, resources)
            program.workers()["tokenizer-0"].kill()
            opened.assert_failed("tokenizer-0 died")
        assert program.wait() == 1
        assert "3 failures within a minute" in last_line(program)
        program.assert_nothing_is_left()


def test_an_api_process_that_dies_ends_the_server(folder: Path) -> None:
    with Program(*small_server(folder, "--api-workers", "2", "--num-tokenizer", "0")) as program:
        program.wait_ready()
        program.workers()["api-1"].kill()
        assert program.wait() == 1
        assert "api-1 died with exit code -9" in last_line(program)
        program.assert_nothing_is_left()


def is_alive(program: Program) -> bool:
    """What the liveness probe that operators are given says."""
    deployment = yaml.safe_load(KUBERNETES.read_text())
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    python, *arguments = container["livenessProbe"]["exec"]["command"]
    assert python == "python3"
    arguments = [each.replace(":8000/", f":{program.port}/") for each in arguments]
    env = {**os.environ, "MINISGL_API_KEY": "key"}
    return subprocess.run([sys.executable, *arguments], env=env, check=False).returncode == 0


@pytest.mark.parametrize("num_processes", ["1", "2"])
def test_the_liveness_probe_sees_a_parent_that_hangs_but_no_engine_that_starts_again(
    folder: Path, num_processes: str
) -> None:
    options = ["--api-workers", num_processes, "--api-key", "key"]
    with Program(*small_server(folder, *options)) as program:
        program.wait_ready()
        assert is_alive(program)
        program.workers()["scheduler-0"].kill()
        wait_until(lambda: not program.is_healthy(), "it starts again")
        assert is_alive(program)
        program.process.send_signal(signal.SIGSTOP)
        assert not is_alive(program)


def test_when_the_parent_is_killed_its_children_vanish(folder: Path) -> None:
    env = {"MINISGL_DISABLE_OVERLAP_SCHEDULING": "1"}
    options = ["--api-workers", "2", "--num-tokenizer", "0", "--overlap"]
    with Program(*small_server(folder, *options), env=env) as program:
        program.wait_ready()
        assert_answers(program)
        with open_stream(program) as stream:
            program.process.kill()
            with pytest.raises(httpx.TransportError):
                list(stream)
        program.assert_nothing_is_left(folder=True)


def has_folder(program: Program) -> bool:
    return bool(list(program.folder.glob("minisgl-*")))


def has_all_workers(program: Program) -> bool:
    return {"scheduler-0", "detokenizer", "tokenizer-0"} <= program.workers().keys()


def has_all_processes(program: Program) -> bool:
    """The one that parses large bodies starts last, just before the server serves."""
    return "body-worker" in program.workers()


@pytest.mark.parametrize(
    ("moment", "exit_codes"),
    [(has_folder, {130}), (has_all_workers, {130}), (has_all_processes, {130, 0})],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_loads_ends_it(
    number: int, moment: Callable[[Program], bool], exit_codes: set[int], folder: Path
) -> None:
    """With all processes there, it may serve."""
    with Program(*small_server(folder)) as program:
        wait_until(lambda: moment(program), "it has begun to load")
        program.remember_processes()
        program.process.send_signal(number)
        assert program.wait() in exit_codes
        program.assert_nothing_is_left()


def test_a_port_in_use_is_one_line(server: Program, folder: Path) -> None:
    with Program(*small_server(folder), "--port", str(server.port)) as program:
        assert program.wait() == 1
        (line,) = program.stderr.splitlines()
        assert line.startswith("minisgl: error: ")
        assert str(server.port) in line
    assert server.is_healthy()


def test_what_the_ranks_refuse_is_one_line(folder: Path) -> None:
    options = ["--tp", "2", "--device", "cpu", "--attn", "fi", "--num-tokenizer", "0"]
    with Program(*small_server(folder, *options)) as program:
        assert program.wait() == 1
        (line,) = program.stderr.splitlines()
        assert line.startswith("minisgl: error: --attn fi needs a GPU")


def damaged(folder: Path, copy: Path) -> Path:
    shutil.copytree(folder, copy)
    weights = next(copy.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    return copy


def test_damaged_weights_are_one_line(folder: Path, tmp_path: Path) -> None:
    model = damaged(folder, tmp_path / "damaged")
    with Program(*small_server(model, "--num-tokenizer", "0")) as program:
        assert program.wait() == 1
        assert "Traceback" not in program.stderr
        assert last_line(program).startswith("minisgl: error: ")
        assert "safetensors" in last_line(program)
        assert list(program.folder.glob("minisgl-*")) == []
