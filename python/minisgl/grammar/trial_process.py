"""The trial process: compiles grammars under limits, each in a fork of its own.

    link ─ TrialRequest ─▶  wait for a report, a cancel or the time limit  ─ Verdict ─▶ link
                                │
                            fork: compile ─▶ report

The fork has the tokenizer from the start and costs milliseconds. The kernel ends it when it has
used its CPU time, and it ends itself when it gets no more memory. Run it as
`python -m minisgl.grammar.trial_process PARENT_PID LINK CANCELS`, with numbers of open sockets.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from enum import Enum, auto
from multiprocessing.connection import Connection, Pipe, wait

import msgspec

from minisgl.core import Grammar
from minisgl.errors import InvalidRequest, Unavailable
from minisgl.grammar.compiler import GrammarCompiler, deep_stack_executor
from minisgl.grammar.trials import TrialLimits, TrialRequest, TrialSetup, Verdict
from minisgl.processes.child import die_with_parent, ignore_end_signals, name_process
from minisgl.processes.limits import (
    OUT_OF_MEMORY,
    OUT_OF_TIME,
    limit_this_process,
    memory_bytes,
)

_MIN_BYTES = 2**18  # a page count sees no less
_SMALL = {  # of each kind
    "json_schema": Grammar("json_schema", '{"type": "object"}'),
    "regex": Grammar("regex", ""),
    "lark": Grammar("lark", 'start: ""'),
}


def main(parent_pid: int, link: Connection, cancels: Connection) -> None:
    """Body of the process: give a verdict on each grammar, until the link is closed."""
    die_with_parent(parent_pid)
    name_process("grammar-trials")
    ignore_end_signals()
    setup = msgspec.json.decode(link.recv_bytes(), type=TrialSetup)
    compiler = GrammarCompiler(setup.model)
    _read_tokenizer(compiler)
    with suppress(EOFError, OSError):
        while True:
            request = msgspec.json.decode(link.recv_bytes(), type=TrialRequest)
            _read_tokenizer(compiler)  # here, if a shortage has passed: each fork would read it
            verdict = _try(compiler, request, setup.limits, cancels)
            link.send_bytes(msgspec.json.encode(verdict))


def _read_tokenizer(compiler: GrammarCompiler) -> None:
    """Read it, unless it is read. If it cannot be, the verdict on each grammar says so."""
    with suppress(ValueError, OSError, ImportError, MemoryError):
        compiler.read_tokenizer()


def _try(
    compiler: GrammarCompiler, request: TrialRequest, limits: TrialLimits, cancels: Connection
) -> Verdict:
    """Compile a grammar in a fork of this process."""
    limits = msgspec.structs.replace(limits, cpu_s=request.cpu_s)
    reader, writer = Pipe(duplex=False)
    own_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        _run_fork(compiler, request.grammar, limits, writer, own_pid)
    writer.close()
    end = _wait(reader, cancels, request.number, limits.wall_s)
    if end is not _End.REPORTED:
        os.kill(pid, signal.SIGKILL)
    verdict: Verdict | None = None
    with suppress(EOFError):
        verdict = msgspec.json.decode(reader.recv_bytes(), type=Verdict)
    reader.close()
    _, status = os.waitpid(pid, 0)
    if verdict is None and end is _End.LATE:
        late = f"the grammar was not compiled within {limits.wall_s:g} s"
        return Verdict.of_no_end(f"{late}; other work has the processors")
    return verdict or _verdict_on(status, limits)


class _End(Enum):
    """What a trial was waited for until."""

    REPORTED = auto()  # or its fork has ended without a report
    CANCELLED = auto()
    LATE = auto()


def _wait(reader: Connection, cancels: Connection, number: int, timeout_s: float) -> _End:
    """Wait for the report of a trial."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ready = wait([reader, cancels], timeout=deadline - time.monotonic())
        if reader in ready:
            return _End.REPORTED
        # Cancels of earlier trials may come late.
        if cancels in ready and msgspec.json.decode(cancels.recv_bytes(), type=int) == number:
            return _End.CANCELLED
    return _End.LATE


def _verdict_on(status: int, limits: TrialLimits) -> Verdict:
    """Why a fork has ended without a report, by its exit status.

    Its limits end it by signals of their own. Any other signal came from outside.
    """
    if not os.WIFSIGNALED(status):
        return Verdict.refused("its trial failed")
    ended_by = os.WTERMSIG(status)
    if ended_by == OUT_OF_TIME:
        return Verdict.out_of_time(limits.cpu_s)
    if ended_by in OUT_OF_MEMORY:
        return Verdict.refused(f"it takes more than {limits.num_bytes >> 20} MiB to compile")
    return Verdict.broken_off()


def _run_fork(
    compiler: GrammarCompiler,
    grammar: Grammar,
    limits: TrialLimits,
    writer: Connection,
    parent_pid: int,
) -> None:
    """Body of the fork; it does not return. A library that gives up leaves no report."""
    stderr = os.dup(2)
    try:
        die_with_parent(parent_pid)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust says there that memory is short
        verdict = _compile_under_limits(compiler, grammar, limits)
        writer.send_bytes(msgspec.json.encode(verdict))
        os._exit(0)
    except MemoryError:
        os.abort()
    except Exception as error:  # the border of the process: no grammar is to blame for a bug
        os.dup2(stderr, 2)
        traceback.print_exc()
        failed = Verdict.of_no_end(f"the trial of the grammar failed: {type(error).__name__}")
        writer.send_bytes(msgspec.json.encode(failed))
    finally:
        os._exit(1)


def _compile_under_limits(
    compiler: GrammarCompiler, grammar: Grammar, limits: TrialLimits
) -> Verdict:
    try:
        executor = deep_stack_executor("trial")
    except RuntimeError:  # the system has no thread left
        return Verdict.broken_off()
    first = executor.submit(compiler.compile, _SMALL[grammar.kind])
    try:
        first.result()  # takes the memory that the first one of a kind takes
        num_bytes_before = memory_bytes()
        limit_this_process(limits.cpu_s, limits.num_bytes)
        matcher = executor.submit(compiler.compile, grammar).result()
    except InvalidRequest as error:
        return Verdict(str(error))
    except Unavailable as error:
        return Verdict.of_no_end(str(error))
    num_bytes = max(_MIN_BYTES, memory_bytes() - num_bytes_before)
    del matcher  # only now: it counts
    return Verdict(num_bytes=num_bytes)


if __name__ == "__main__":
    main(int(sys.argv[1]), Connection(int(sys.argv[2])), Connection(int(sys.argv[3])))
