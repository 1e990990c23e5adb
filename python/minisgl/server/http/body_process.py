"""The loop of the process that parses large bodies, one after the other, until its pipe closes.

    a `Job`, then the body in chunks ─▶ the process ─▶ a `Result`, then the prompts

Each is one frame of bytes in the pipe; nothing is unpickled. `body_worker.py` is the other end.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pkgutil
import resource
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from minisgl.checkpoint.files import is_panic
from minisgl.errors import RequestError
from minisgl.message import ReplyError
from minisgl.processes.child import die_with_parent, ignore_end_signals, name_process
from minisgl.server.http.body_parser import pack_body
from minisgl.server.requests.validation import IgnoredField, RequestBounds

NO_MEMORY = 3  # exit code of the process; Python's own are 1 and 2
_MAX_TRACEBACK = 2**14  # characters


class Job(msgspec.Struct, frozen=True):
    """A body to parse; its chunks follow, one frame each.

    Attributes:
        model: "module:class" of the request.
    """

    model: str
    num_chunks: int


class Result(msgspec.Struct, frozen=True):
    """The result of a job; the prompts follow, one frame each.

    Attributes:
        peak_memory: the most bytes that the process has taken since its start.
        bug: a traceback; empty if there was no bug.
    """

    peak_memory: int
    parameters: bytes = b""
    num_prompts: int = 0
    ignored_fields: list[IgnoredField] = []
    error: ReplyError | None = None
    bug: str = ""


def run_body_process(
    pipe: Connection,
    parent_pid: int,
    bounds: RequestBounds,
    memory_limit: int,
    model_names: list[str],
) -> None:
    """Body of the process.

    Args:
        memory_limit: in bytes, of the process's data, the interpreter's own included.
        model_names: of requests, "module:class"; they are imported before the first body.
    """
    die_with_parent(parent_pid)
    name_process("body-worker")
    ignore_end_signals()
    resource.setrlimit(resource.RLIMIT_DATA, (memory_limit, memory_limit))
    os.environ["RUST_BACKTRACE"] = "0"  # of a panic without memory: to print it never ends
    gc.disable()  # decoded JSON has no cycles
    try:
        for name in model_names:
            pkgutil.resolve_name(name)
        with contextlib.suppress(EOFError):
            while True:
                _serve_one(pipe, bounds)
    except BaseException as error:  # pydantic's parser panics without memory: that is no Exception
        with contextlib.suppress(MemoryError):
            if not isinstance(error, MemoryError):
                traceback.print_exc()
        # Before the pipe is closed: the other end would take a process that is still ending for one
        # that was killed.
        os._exit(NO_MEMORY if isinstance(error, MemoryError) or is_panic(error) else 1)


def _serve_one(pipe: Connection, bounds: RequestBounds) -> None:
    job = msgspec.msgpack.decode(pipe.recv_bytes(), type=Job)
    raw = b"".join([pipe.recv_bytes() for _ in range(job.num_chunks)])
    try:
        packed = pack_body(raw, pkgutil.resolve_name(job.model), bounds)
    except RequestError as error:
        refusal = Result(_peak_memory(), error=ReplyError.of(error))
        pipe.send_bytes(msgspec.msgpack.encode(refusal))
        return
    except MemoryError:
        raise
    except Exception:  # it is the server's, which logs it with the request
        failure = Result(_peak_memory(), bug=traceback.format_exc()[:_MAX_TRACEBACK])
        pipe.send_bytes(msgspec.msgpack.encode(failure))
        return
    result = Result(_peak_memory(), packed.parameters, len(packed.prompts), packed.ignored_fields)
    pipe.send_bytes(msgspec.msgpack.encode(result))
    for prompt in packed.prompts:
        pipe.send_bytes(prompt)


def _peak_memory() -> int:
    """The most bytes that this program has taken. `getrusage` also counts those before exec."""
    status = Path("/proc/self/status").read_text()
    _, _, rest = status.partition("VmHWM:")
    kib, *_ = rest.split(maxsplit=1)
    return int(kib) * 1024
