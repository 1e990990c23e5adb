"""What is decided before a process is started."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from minisgl.errors import ConfigError
from minisgl.server import ServerConfig
from minisgl.server.launch import _bind, _listen, interruptible, launch_server
from minisgl.utils import hardware
from tests.checkpoints import tiny_checkpoint


def test_a_port_that_somebody_listens_on_is_refused_by_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*--port"):
            _bind(ServerConfig(port=port))


def test_of_two_servers_that_load_at_once_the_second_to_be_ready_is_refused_the_port() -> None:
    with (
        _bind(ServerConfig(port=0)) as first,
        _bind(ServerConfig(port=first.getsockname()[1])) as second,
    ):
        _listen(first)
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*--port"):
            _listen(second)


def test_an_address_of_ipv6_is_named_in_brackets() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on \[::1\]:{port}: "):
            _bind(ServerConfig(host="::1", port=port))


def test_port_zero_takes_a_free_one_each_time() -> None:
    with _bind(ServerConfig(port=0)) as one, _bind(ServerConfig(port=0)) as other:
        assert one.getsockname()[1] != other.getsockname()[1]


def test_a_small_write_is_sent_at_once() -> None:
    """Nagle's algorithm would hold an answer's body back until its head is acknowledged: 40 ms."""

    class Server(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            connection = transport.get_extra_info("socket")
            seen.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            transport.close()

    async def connect() -> None:
        loop = asyncio.get_running_loop()
        listener = _bind(ServerConfig(port=0))
        async with await loop.create_server(Server, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            await reader.read()  # until the server has closed it
            writer.close()
            await writer.wait_closed()

    seen: list[int] = []
    asyncio.run(connect())
    assert seen == [1]


@pytest.mark.parametrize("host", ["no such host", "203.0.113.1"])
def test_an_address_that_is_not_ours_is_refused_in_one_line(host: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        _bind(ServerConfig(host=host, port=0))
    assert "\n" not in str(refusal.value)
    assert host in str(refusal.value)


@pytest.fixture
def own_logging() -> Iterator[None]:
    """What a test sets up ends with it: other tests of this process look at records, too."""
    logger = logging.getLogger("minisgl")
    handlers = list(logger.handlers)
    level = logger.level
    propagate = logger.propagate
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "99999"], "--port"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--model", "{folder}"], "config.json"),
        (["--key-limits", "keys.toml"], "--key-limits needs keys"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_1(
    argv: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = str(tmp_path_factory.mktemp("empty"))
    assert launch_server([arg.format(folder=folder) for arg in argv]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("minisgl: error: ")
    assert message in line


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize(
    ("flags", "begin", "end"),
    [
        ("--tp 1000", "--tp must divide", "as 1, 2, 4 do, got 1000"),
        ("--tp 2 --ep", "--ep needs a model with experts", "LlamaForCausalLM has 0"),
        ("--tp 3 --ep", "--ep needs a model with experts", "LlamaForCausalLM has 0"),
        ("--ep", "--ep needs --tp to be >= 2", "got 1"),
    ],
)
def test_no_process_starts_for_ranks_that_cannot_divide_the_model(
    flags: str,
    begin: str,
    end: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("minisgl.server.launch.Supervisor", None)
    folder = tiny_checkpoint("llama", tmp_path)
    capfd.readouterr()
    assert launch_server(["--model", str(folder), *flags.split()]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"minisgl: error: {begin}")
    assert line.endswith(end)


@pytest.mark.usefixtures("own_logging")
def test_a_lack_of_threads_is_one_line(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    folder = tiny_checkpoint("llama", tmp_path)
    capfd.readouterr()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert launch_server(["--model", str(folder), "--port", "0"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("minisgl: error: the system starts no more threads; see ulimit -u")


@pytest.mark.parametrize("is_buffered", [False, True])
@pytest.mark.parametrize(
    ("program", "begin"),
    [
        ("minisgl --help", "minisgl: error: "),
        ("minisgl --version", "minisgl: error: "),
        ("minisgl.benchmark.serve --help", "error: "),
        ("minisgl.benchmark.serve closed --help", "error: "),
    ],
)
def test_help_that_cannot_be_written_is_one_line_and_exit_code_1(
    program: str, begin: str, is_buffered: bool
) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if is_buffered else "1"}
    command = [sys.executable, "-m", *program.split()]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=60
        )
    expected = f"{begin}stdout cannot be written: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, expected)


@pytest.mark.parametrize("is_buffered", [False, True])
def test_who_reads_a_part_of_the_help_sees_no_error(is_buffered: bool) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if is_buffered else "1"}
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        ended = subprocess.run(
            [sys.executable, "-m", "minisgl", "--help"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            env=environment,
            timeout=60,
        )
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        (
            "minisgl.__main__, minisgl.server",
            ["torch", "numpy", "transformers", "fastapi", "uvicorn", "prompt_toolkit"],
        ),
        ("minisgl.server.serve", ["torch", "transformers"]),
        ("minisgl.tokenizer", ["torch", "fastapi"]),
    ],
)
def test_what_stands_before_the_workers_and_in_light_ones_imports_nothing_heavy(
    modules: str, without: list[str]
) -> None:
    script = f"import sys, {modules}; print(*sorted(set({without}) & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_amid_code_of_a_text_leaves_the_exit_code(
    number: int, tmp_path: Path
) -> None:
    """As the code of a dataclass is, while the program imports; `-m` alone loses the code."""
    program = (
        "import signal, sys\n"
        "from minisgl.server.launch import interruptible\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n"
        "    with interruptible():\n"
        f"        exec('signal.raise_signal({int(number)})')\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)\n"
    )
    (tmp_path / "interrupted.py").write_text(program)
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, check=False, capture_output=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_a_library_makes_an_error_of_is_still_one(number: int) -> None:
    """Pydantic makes a SchemaError of what interrupts it while it builds a schema."""

    def build() -> None:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise ValueError("the schema could not be built") from None

    with pytest.raises(KeyboardInterrupt), interruptible():
        build()
    with pytest.raises(ValueError, match="no signal"), interruptible():
        raise ValueError("no signal came")


@pytest.mark.usefixtures("own_logging")
def test_a_server_without_proc_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "_PROC", tmp_path)
    assert launch_server(["--model", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("minisgl: error: /proc must be mounted and readable: ")
