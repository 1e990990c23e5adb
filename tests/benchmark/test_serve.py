"""The command line of the benchmark: what it refuses, and the lines that it writes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from minisgl.benchmark.arguments import output_file
from minisgl.benchmark.flags import make_parser
from minisgl.benchmark.online.client import Endpoint
from minisgl.benchmark.online.records import RequestRecord
from minisgl.benchmark.online.report import Objective, summarize
from minisgl.benchmark.online.workloads import Shape, closed_loop
from minisgl.benchmark.perf import commit
from minisgl.benchmark.serve import Run, figures_of, first_model, main
from minisgl.errors import ConfigError

TIMEOUT_S = 30.0


def run(out_ms: float) -> Run:
    record = RequestRecord("requests", ended_s=1.0, chunks_s=[out_ms / 1e3], num_output=1)
    return Run(summarize([record], Objective()), [record])


def test_a_figure_has_the_values_of_all_runs_and_their_median() -> None:
    args = make_parser().parse_args(["w6", "--machine", "mine", "--device", "cpu"])
    workload = closed_loop("w6", Shape((1, 1), (1, 1)), 1, 1)
    runs = [run(30), run(10), run(20)]
    figures = {each.metric: each for each in figures_of(args, "tiny", workload, runs, "command")}

    assert figures["ttft_p50_ms"].values == pytest.approx([30, 10, 20])
    assert figures["ttft_p50_ms"].value == pytest.approx(20)
    assert figures["ttft_p50_ms"].workload == "w6"
    assert figures["ttft_p50_ms"].machine == "mine"
    assert figures["requests"].command == "command"


def test_several_levels_are_several_workloads() -> None:
    flags = ["poisson", "--rate", "1", "2.5", "--requests", "3", "--input", "5-9"]
    args = make_parser().parse_args(flags)
    workloads = args.make_workloads(args)

    assert [each.name for each in workloads] == ["poisson, 1 a second", "poisson, 2.5 a second"]
    assert [each.level for each in workloads] == [1, 2.5]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["trace", "--trace", "none.csv"], "error: --trace none.csv"),
        (["closed", "--url", "nowhere", "--model", "m"], "error: --url is nowhere"),
        (["closed", "--url", "nowhere"], "error: --url is nowhere"),
        (["closed", "--url", "http://[::1"], r"error: --url is http://\[::1"),
        (["closed", "--url", "http://a:99999", "--model", "m"], "error: --url is http://a:99999"),
        (["closed", "--url", "http://a/b c"], "error: --url is http://a/b c"),
        (["closed", "--url", "http://a..b/v1", "--model", "m"], "error: --url is http://a..b/v1"),
        (["closed", "--url", "http://127.0.0.1:1/v1"], "lists no models"),
        (["closed", "--plot", "plot.docx"], "error: --plot is plot.docx; it must end in one of"),
    ],
)
def test_what_cannot_be_measured_is_said(flags: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit, match=complaint):
        main(flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["closed", "--out", "/proc/figures.jsonl"],
        ["closed", "--requests", "0"],
        ["closed", "--input", "9-5"],
        ["closed", "--input", "99999999999"],
        ["closed", "--concurrency", "0"],
        ["closed", "--token-ids", "many"],
        ["closed", "--shared", "-5"],
        ["closed", "--hang-up", "1.5"],
        ["closed", "--hang-up", "nan"],
        ["closed", "--warm-up", "-1"],
        ["closed", "--seed", "-1"],
        ["closed", "--timeout", "0"],
        ["closed", "--timeout", "inf"],
        ["closed", "--timeout", "nan"],
        ["closed", "--extra-body", "[1]"],
        ["closed", "--server-pid", "-1"],
        ["closed", "--slo-ttft-ms", "nan"],
        ["closed", "--out", "/nowhere/figures.jsonl"],
        ["closed", "--out", "/"],
        ["closed", "--plot", "/nowhere/plot.svg"],
        ["poisson", "--rate", "0"],
        ["poisson", "--rate", "-1"],
        ["poisson", "--rate", "nan"],
        ["trace", "--speed", "0"],
        ["trace", "--duration", "-1"],
        ["mixed", "--long-start", "nan"],
        ["mixed", "--long-every", "-1"],
    ],
    ids=" ".join,
)
def test_bad_flags_are_refused_before_anything_is_measured(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(flags)
    assert end.value.code == 2
    assert f"argument {flags[1]}: " in capsys.readouterr().err.splitlines()[-1]


@contextmanager
def server(models: bytes, answer: bytes, bodies: list[bytes] | None = None) -> Iterator[str]:
    """A server that has these bytes for GET and POST, and closes each connection; its URL.

    Args:
        bodies: gets the body of each POST, if there is such a list.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(models)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if bodies is not None:
                bodies.append(body)
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}/v1"
        finally:
            listening.shutdown()


def answer_of(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


EVENT = b'data: {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}\n\n'
GOOD = answer_of(EVENT + b"data: [DONE]\n\n")
SHORT = ["--model", "m", "--requests", "2", "--warm-up", "0", "--machine", "mine"]


@pytest.mark.parametrize(
    "models",
    [
        answer_of(b"[1]"),
        answer_of(b"null"),
        answer_of(b'{"data": null}'),
        answer_of(b'{"data": [1]}'),
        answer_of(b'{"data": []}'),
        answer_of(b'{"data": [{"id": {}}]}'),
        answer_of(b"[" * 100_000),
        answer_of(b"{}")[:-1],
        answer_of(b"", "302 Found\r\nLocation: /v1/models"),
        b"HELLO\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 200 + b"\r\n",
    ],
    ids=lambda models: models[-20:],
)
def test_a_server_that_lists_no_models_is_said_in_a_line(models: bytes) -> None:
    with server(models, b"") as url, pytest.raises(SystemExit) as end:
        main(["closed", "--url", url])
    assert isinstance(end.value.code, str)
    assert end.value.code.startswith(f"error: --url {url} lists no models: ")
    assert "\n" not in end.value.code


@pytest.mark.parametrize("status", ["302 Found\r\nLocation: /v1/models", "500 Error"])
def test_the_connection_of_a_refused_list_of_models_is_closed(status: str) -> None:
    with server(answer_of(b"no", status), b"") as url, pytest.raises(ConfigError) as end:
        first_model(Endpoint(url, ""))
    assert isinstance(end.value.__cause__, HTTPError)
    assert end.value.__cause__.fp.closed


def test_a_run_of_which_every_request_fails_is_an_error(tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    with server(b"", answer_of(b"no", "500 Error")) as url, pytest.raises(SystemExit) as end:
        main(["closed", "--url", url, "--model", "m", "--requests", "2", "--out", str(out)])
    assert end.value.code == "error: warm-up: all 8 requests failed: HTTP 500: no"
    assert not out.exists()


def test_a_figure_has_the_command_that_a_shell_takes(tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    with server(b"", GOOD) as url:
        words = ["closed", "--url", url, *SHORT, "--extra-body", '{"top_p": 1}', "--out", str(out)]
        main(words)
    commands = {json.loads(line)["command"] for line in out.read_text().splitlines()}
    [command] = commands
    *without_seed, flag, seed = shlex.split(command)
    assert without_seed == ["python", "-m", "minisgl.benchmark.serve", *words]
    assert flag == "--seed"
    assert seed.isdecimal()


def prompts_of(*flags: str) -> set[tuple[int, ...]]:
    bodies: list[bytes] = []
    with server(b"", GOOD, bodies) as url:
        main(["closed", "--url", url, *SHORT, *flags])
    return {tuple(json.loads(body)["prompt"]) for body in bodies}


def test_a_seed_has_none_of_the_prompts_of_the_seed_before_it() -> None:
    """A server that has answered the one would find the other's in its prefix cache."""
    repeated = prompts_of("--seed", "3", "--repeat", "2")

    assert len(repeated) == 4
    assert repeated == prompts_of("--seed", "3", "--repeat", "2")
    assert not repeated & prompts_of("--seed", "4", "--repeat", "2")


def test_a_pipe_is_not_opened_before_there_are_figures(tmp_path: Path) -> None:
    """Its reader would take the end of a trial for the end of all."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert output_file(str(pipe)) == pipe


def test_where_there_is_no_git_the_commit_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() == "unknown"


def test_figures_for_which_there_is_no_room_are_shown_and_the_error_is_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with server(b"", GOOD) as url, pytest.raises(SystemExit) as end:
        main(["closed", "--url", url, *SHORT, "--out", "/dev/full"])
    assert end.value.code == "error: [Errno 28] No space left on device"
    assert "out_tok_s" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_clients_end_with_the_benchmark_that_is_killed(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        command = [sys.executable, "-m", "minisgl.benchmark.serve", "closed", "--url", url]
        options = ["--model", "m", "--requests", "1", "--warm-up", "0", "--no-progress"]
        with subprocess.Popen([*command, *options]) as benchmark:
            client, _ = listener.accept()
            benchmark.send_signal(number)
    with client:
        client.settimeout(TIMEOUT_S)
        while client.recv(65536):  # the request; then the end, as the client has ended
            pass


@pytest.mark.parametrize(
    "line",
    [
        '{"timestamp": 0, "input_length": -4, "output_length": 3, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 4, "output_length": -3, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 4, "output_length": 3, "hash_ids": [-1]}',
        '{"timestamp": 0, "input_length": 512, "output_length": 3, "hash_ids": [1, 2]}',
    ],
)
def test_a_trace_of_what_cannot_be_is_refused(line: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line)
    with pytest.raises(SystemExit, match="after 0 requests"):
        main(["trace", "--trace", str(trace)])


def test_a_trace_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n")

    with pytest.raises(SystemExit, match="has no request within"):
        main(["trace", "--trace", str(trace), "--max-input", "10"])
