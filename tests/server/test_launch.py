"""What is decided before a process is started."""

from __future__ import annotations

import socket

import pytest

from minisgl.errors import ConfigError
from minisgl.server import ServerConfig
from minisgl.server.dialect import Dialect
from minisgl.server.dialect.reasoning import Thinking
from minisgl.server.dialect.tool_formats import Hermes, Mistral
from minisgl.server.launch import _accept_connections, _dialect, _listen, launch_server
from minisgl.utils.supervisor import Report, Vocabulary


def test_a_port_that_somebody_listens_on_is_refused_by_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*--port"):
            _listen(ServerConfig(port=port))


def test_of_two_servers_that_load_at_once_the_second_to_be_ready_is_refused_the_port() -> None:
    with _listen(ServerConfig(port=0)) as first, _listen(ServerConfig(port=first.getsockname()[1])) as second:
        _accept_connections(first)
        with pytest.raises(ConfigError, match="--port"):
            _accept_connections(second)


def test_port_zero_takes_a_free_one_each_time() -> None:
    with _listen(ServerConfig(port=0)) as one, _listen(ServerConfig(port=0)) as other:
        assert one.getsockname()[1] != other.getsockname()[1]


@pytest.mark.parametrize("host", ["no such host", "203.0.113.1", ""])
def test_an_address_that_is_not_ours_is_refused_in_one_line(host: str) -> None:
    try:
        _listen(ServerConfig(host=host, port=0)).close()
    except ConfigError as error:
        assert "\n" not in str(error)
        assert host in str(error)
    else:
        assert host == "", "the empty name means every address"


def test_how_the_model_calls_and_thinks_is_what_its_tokenizer_says_and_then_the_options() -> None:
    reports = [Report(max_seq_len=8), Report(vocabulary=Vocabulary("<tool_call>", {"<tool_call>": 7})), Report()]
    said = _dialect(reports, ServerConfig())
    assert (type(said.calls), said.thoughts, said.markers) == (Hermes, None, {"<tool_call>": 7})
    said = _dialect(reports, ServerConfig(tool_call_parser="mistral", reasoning_parser="deepseek_r1"))
    assert (type(said.calls), said.thoughts) == (Mistral, Thinking(is_open=True))
    assert _dialect([Report(vocabulary=Vocabulary(None, {}))], ServerConfig()) == Dialect()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--port", "99999"], "--port"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--model", "{folder}"], "config.json"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_1(
    argv: list[str], said: str, capfd: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.mktemp("empty"))
    assert launch_server([arg.format(folder=folder) for arg in argv]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("minisgl: error: ")
    assert said in line
