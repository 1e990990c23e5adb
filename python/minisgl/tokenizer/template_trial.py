"""Tries a chat template at the start, in a fork that can be killed.

A template is a program that comes with the model: it may loop, or ask for gigabytes. Python cannot
interrupt some of that, such as a power of large numbers.
"""

from __future__ import annotations

import os
import signal
import warnings
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from minisgl.checkpoint.files import one_line
from minisgl.errors import CheckpointError, EngineFailed
from minisgl.processes.child import die_with_parent
from minisgl.processes.limits import OUT_OF_MEMORY, OUT_OF_TIME, limit_this_process
from minisgl.tokenizer.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Limits of a template for a few short chats together.

    Attributes:
        cpu_s: time on a processor.
        wall_s: elapsed time, since other processes may use the processors.
        num_bytes: memory, in addition to the tokenizer's.
    """

    cpu_s: float = 5.0
    wall_s: float = 60.0
    num_bytes: int = 2**28


_DEFAULT_LIMITS = TemplateLimits()
# Exit codes of a fork, beside 0.
_NO_MEMORY = 1
_FAILED = 2


def try_template(
    template: ChatTemplate, folder: Path, limits: TemplateLimits = _DEFAULT_LIMITS
) -> None:
    """Write the short chats of a start, in a fork of this process.

    Args:
        folder: the model's.

    Raises:
        CheckpointError: the template takes too much. Whether it refuses the chats does not matter.
        EngineFailed: the fork cannot be made or set up, or was killed from outside.
    """
    if template.text is None:
        return
    reader, writer = Pipe(duplex=False)
    own_pid = os.getpid()
    with reader:
        pid = _fork()
        if pid == 0:
            _run_fork(template, limits, own_pid, writer)
        writer.close()
        has_ended = reader.poll(limits.wall_s)
        if not has_ended:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        failure = _read_failure(reader)
    if failure:
        raise EngineFailed(f"the chat template cannot be tried: {failure}")
    fault = _fault(status, limits) if has_ended else f"does not end within {limits.wall_s:g} s"
    if fault is not None:
        raise CheckpointError(f"{_files(folder)}: the chat template {fault}")


def _fork() -> int:
    try:
        with warnings.catch_warnings():
            # Of other threads, whose locks a fork might wait for. It needs none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            return os.fork()
    except OSError as error:
        raise EngineFailed(f"the chat template cannot be tried: {error}") from error


def _run_fork(
    template: ChatTemplate, limits: TemplateLimits, parent_pid: int, writer: Connection
) -> None:
    """Body of the fork; it does not return. The pipe to its parent is closed with it."""
    exit_code = _FAILED
    try:
        die_with_parent(parent_pid)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        limit_this_process(limits.cpu_s, limits.num_bytes)
        exit_code = _write_short_chats(template)
    except BaseException as error:  # it is the parent's to raise
        writer.send_bytes(one_line(error).encode())
    finally:
        os._exit(exit_code)


def _write_short_chats(template: ChatTemplate) -> int:
    """Try the template. Returns the exit code of the fork."""
    try:
        template.write_short_chats()
    except MemoryError:
        return _NO_MEMORY
    return 0


def _read_failure(reader: Connection) -> str:
    """What a fork that has ended says of itself; empty if that is nothing."""
    with suppress(EOFError):
        return reader.recv_bytes().decode()
    return ""


def _fault(status: int, limits: TemplateLimits) -> str | None:
    """What a fork shows that has ended with an exit status; None if it is nothing."""
    exit_code = os.waitstatus_to_exitcode(status)  # negative for a signal
    if exit_code == 0:
        return None
    if exit_code == -OUT_OF_TIME:
        return f"takes more than {limits.cpu_s:g} s to write a short chat"
    if exit_code == _NO_MEMORY:
        return f"takes more than {limits.num_bytes >> 20} MiB of memory to write a short chat"
    if exit_code > 0:  # it has no memory left to say why
        raise EngineFailed("the chat template cannot be tried")
    if -exit_code in OUT_OF_MEMORY:  # or it crashes for another reason
        name = signal.Signals(-exit_code).name
        return f"ends its trial by {name}, in {limits.num_bytes >> 20} MiB of memory"
    number = -exit_code
    raise EngineFailed(f"the trial of the chat template was broken off by signal {number}")


def _files(folder: Path) -> str:
    """Where the library reads the template, or the templates."""
    files = [folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")]
    found = [str(path) for path in files if path.exists()]
    return " or ".join(found) or str(folder / "tokenizer_config.json")
