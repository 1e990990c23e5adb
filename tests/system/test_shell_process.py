"""The shell as a user meets it: in a terminal, and with a pipe as its input."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.system.harness import MODEL, TIMEOUT_S, Program, small_server

pytestmark = pytest.mark.slow
CTRL_C = b"\x03"


class Terminal:
    """The other end of a pseudo-terminal: presses keys and reads the screen."""

    def __init__(self, master: int) -> None:
        self._master = master
        self._seen = ""

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def see(self, pattern: str) -> str:
        """Wait until a pattern is shown after what was seen last; all up to its end."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := re.search(pattern, shown := _without_colours(self._seen), re.DOTALL)):
            remaining = deadline - time.monotonic()
            ready = remaining > 0 and select.select([self._master], [], [], remaining)[0]
            assert ready, f"{pattern!r} is not shown, but {shown[-2000:]!r}"
            self._seen += os.read(self._master, 65536).decode(errors="replace")
        self._seen = shown[found.end() :]
        return shown[: found.end()]


def _without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@contextmanager
def chat_in_terminal(*argv: str) -> Iterator[tuple[Program, Terminal]]:
    master, slave = pty.openpty()
    env = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "80", "LINES": "24"}

    def own_the_terminal() -> None:
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    try:
        with Program(
            *argv, "--shell", env=env, stdin=slave, stdout=slave, preexec_fn=own_the_terminal
        ) as program:
            yield program, Terminal(master)
    finally:
        os.close(master)
        os.close(slave)


@pytest.fixture
def endless_model(folder: Path, tmp_path: Path) -> Path:
    """The tiny model without an end-of-sequence token: only the context ends its answers."""
    copy = tmp_path / "endless"
    shutil.copytree(folder, copy)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps({**config, "eos_token_id": None}))
    return copy


def test_in_a_terminal_it_streams_stops_at_ctrl_c_goes_on_and_leaves(endless_model: Path) -> None:
    with chat_in_terminal(*small_server(endless_model)) as (program, terminal):
        terminal.see(f"Chat with {MODEL}.*you>")
        program.wait_ready()
        terminal.press(CTRL_C)  # at the prompt: nothing is stopped
        terminal.press(b"hello\r")
        terminal.see("hello.*\n.{200}")  # its answer comes
        terminal.press(CTRL_C)
        terminal.see(r"\[stopped\].*you>")
        terminal.press(b"/nonsense\r")
        terminal.see("Unknown command /nonsense.*you>")
        terminal.press(b"/reset\r")
        terminal.see("new conversation.*you>")
        terminal.press(b"again\r")
        terminal.see("again.*\n.{200}")
        terminal.press(CTRL_C)
        terminal.see(r"\[stopped\].*you>")
        terminal.press(b"/exit\r")
        assert program.wait() == 0
        program.assert_nothing_is_left()
        assert "Traceback" not in program.stderr


def piped(folder: Path, **streams: Any) -> Program:
    """A chat with few workers, whose answers soon reach the end of the context."""
    options = ["--num-tokenizer", "0", "--max-seq-len", "60", "--seed", "1", "--shell"]
    return Program(
        *small_server(folder, *options),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **streams,
    )


def test_lines_of_a_pipe_are_answered_in_its_encoding_and_its_end_ends_it(folder: Path) -> None:
    with piped(folder, env={"PYTHONIOENCODING": "ascii"}) as program:
        typed = b"hi \xff\n/help\n/what\nthere\n"
        out, _ = program.process.communicate(typed, timeout=TIMEOUT_S)
        assert program.process.returncode == 0
        shown = out.decode("ascii")
        assert shown.startswith(f"Chat with {MODEL}.")
        assert "you>" not in shown
        assert shown.index("/reset   begin") < shown.index("Unknown command /what")
        assert len(shown[: shown.index("Type a message")].splitlines()) >= 2, (
            "the first answer stands before the help"
        )
        assert list(program.folder.glob("minisgl-*")) == []
        assert "Traceback" not in program.stderr


def test_a_chat_whose_output_cannot_be_written_ends_with_an_error(folder: Path) -> None:
    with (
        open("/dev/full", "w") as full,
        Program(*small_server(folder, "--shell"), stdin=subprocess.PIPE, stdout=full) as program,
    ):
        assert program.wait() == 1
        *_, last = program.stderr.splitlines()
        assert last == "minisgl: error: stdout cannot be written: No space left on device"
        assert program.stderr.count("No space left") == 1
        assert "Traceback" not in program.stderr


def test_between_answers_an_interrupt_ends_a_shell_on_a_pipe(folder: Path) -> None:
    with piped(folder) as program:
        program.wait_ready()
        assert program.process.stdin
        assert program.process.stdout
        program.process.stdin.write(b"hi\n/what\n")
        program.process.stdin.flush()
        while b"/what" not in program.process.stdout.readline():
            pass
        program.process.send_signal(signal.SIGINT)
        assert program.wait() in (0, 130)
        program.assert_nothing_is_left()


def test_when_nobody_reads_its_output_any_more_it_ends(folder: Path) -> None:
    with piped(folder) as program:
        program.wait_ready()
        assert program.process.stdin
        assert program.process.stdout
        program.process.stdout.close()
        program.process.stdin.write(b"hi\n")
        program.process.stdin.flush()
        assert program.wait() == 0
        program.assert_nothing_is_left()
        assert "Traceback" not in program.stderr
