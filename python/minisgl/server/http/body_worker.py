"""A process that parses large bodies, so that the event loop does not.

It starts with the server, or with the first large body, and again after it was killed. It parses
one body after the other, in bounded memory and time. Requests that wait for it take turns by the
sizes of their bodies. Its loop is in `body_process.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import msgspec

from minisgl.errors import InvalidRequest, Unavailable
from minisgl.processes.child import at_exit, end_signals_blocked
from minisgl.processes.child_process import exit_code_of
from minisgl.processes.limits import OUT_OF_MEMORY
from minisgl.server.http.body_process import NO_MEMORY, Job, Result, run_body_process
from minisgl.server.requests.prompts import PackedRequest, PromptRequest
from minisgl.server.requests.validation import RequestBounds
from minisgl.utils.fair_queue import FairQueue

logger = logging.getLogger(__name__)

_TIMEOUT_S = 30.0
_MEMORY_BASE = 2**30
_MEMORY_FACTOR = 64  # bytes of memory that a byte of a body may take
_KEPT_MEMORY = 2**29  # a process that took more does not wait for the next body
_EXIT_TIMEOUT_S = 5.0  # of a process that is killed, at the end of the server


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A body, and the future of its result."""

    job: Job
    chunks: list[bytes]
    packed: asyncio.Future[PackedRequest]


class BodyWorker:
    """The process, and the bodies that wait for it.

    The queue has only numbers. A call that is cancelled drops its body at once, because the bytes
    are no longer counted.
    """

    def __init__(self, bounds: RequestBounds, max_body_bytes: int) -> None:
        self._process = _Process(bounds, _MEMORY_BASE + _MEMORY_FACTOR * max_body_bytes)
        self._thread = ThreadPoolExecutor(1, "body-worker")  # waits for the process
        self._waiting: dict[int, _Waiting] = {}
        self._queue: FairQueue[int] = FairQueue()  # also of those that wait no more
        self._numbers = itertools.count()
        self._is_busy = False
        self._is_closed = False

    def start(self, models: Iterable[type[PromptRequest]]) -> None:
        """Start the process now: the first large body would wait for up to a second.

        Args:
            models: the models of the requests; the process imports them before the first body.
        """
        self._process.model_names = [_name_of(model) for model in models]
        self._thread.submit(self._process.start)

    async def pack(self, chunks: list[bytes], model: type[PromptRequest]) -> PackedRequest:
        """Parse a body; see `pack_body`. A caller that is cancelled loses its turn.

        Raises:
            RequestError: the body is not a valid request, or takes too much time or memory.
            Unavailable: the process cannot be started, was killed twice, or the server is shutting
                down.
            RuntimeError: there is a bug in the process.
        """
        if self._is_closed:
            raise _shutting_down()
        job = Job(_name_of(model), len(chunks))
        packed: asyncio.Future[PackedRequest] = asyncio.get_running_loop().create_future()
        number = next(self._numbers)
        self._waiting[number] = _Waiting(job, chunks, packed)
        self._queue.put(number, sum(map(len, chunks)), flow=number)
        self._start_next()
        try:
            return await packed
        finally:
            self._waiting.pop(number, None)
            # An error refers to this frame, which would keep the body until a garbage collection.
            del packed, chunks

    def _start_next(self) -> None:
        while len(self._queue) and not self._is_busy:
            turn = self._waiting.pop(self._queue.take(), None)
            if turn is None or turn.packed.cancelled():
                continue
            self._is_busy = True
            loop = asyncio.get_running_loop()
            deadline = loop.time() + _TIMEOUT_S
            # A stopped process does not even take a body.
            timer = loop.call_at(deadline, self._process.kill)
            work = loop.run_in_executor(
                self._thread, self._process.pack, turn.job, turn.chunks, deadline
            )
            work.add_done_callback(partial(self._finish, turn.packed, timer))

    def _finish(
        self,
        packed: asyncio.Future[PackedRequest],
        timer: asyncio.TimerHandle,
        done: asyncio.Future[PackedRequest],
    ) -> None:
        self._is_busy = False
        timer.cancel()
        error = _shutting_down() if done.cancelled() else done.exception()
        if packed.cancelled():
            pass
        elif error is None:
            packed.set_result(done.result())
        else:
            packed.set_exception(error)
        self._start_next()

    def close(self) -> None:
        """End the process, and refuse the bodies that wait."""
        self._is_closed = True
        for turn in self._waiting.values():
            if not turn.packed.done():
                turn.packed.set_exception(_shutting_down())
        self._waiting.clear()
        self._process.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._process.collect()


class _Process:
    """The process as seen from the thread that waits for it.

    Attributes:
        model_names: the models that it imports before the first body.
    """

    def __init__(self, bounds: RequestBounds, memory_limit: int) -> None:
        self.model_names: list[str] = []
        self._bounds = bounds
        self._memory_limit = memory_limit
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._is_closed = False
        self._kill_at_exit = at_exit(self.kill)

    def pack(self, job: Job, chunks: list[bytes], deadline: float) -> PackedRequest:
        """Parse a body, and once more if the process was killed.

        Args:
            deadline: when the process is killed, by `time.monotonic`.

        Raises:
            RequestError, Unavailable, RuntimeError: as `BodyWorker.pack`.
        """
        for _ in range(2):
            try:
                return self._pack(job, chunks, deadline)
            except (EOFError, OSError):
                exit_code = self._end()
            if _lacked_memory(exit_code) or time.monotonic() >= deadline:
                raise InvalidRequest(
                    f"reading the body takes more than {self._memory_limit >> 20} MiB of memory "
                    f"or {_TIMEOUT_S:.0f} s",
                    code="body_too_costly",
                )
            if exit_code >= 0:
                reason = f"ends with exit code {exit_code}"
                raise RuntimeError(f"the process that reads large bodies {reason}")
        raise Unavailable("the process that reads large bodies was killed twice")

    def _pack(self, job: Job, chunks: list[bytes], deadline: float) -> PackedRequest:
        """
        Raises:
            EOFError, OSError: the process has ended, or the deadline has passed.
            RequestError, Unavailable, RuntimeError: as `BodyWorker.pack`.
        """
        if self._is_closed:
            raise _shutting_down()
        pipe = self._connect()
        pipe.send_bytes(msgspec.msgpack.encode(job))
        for chunk in chunks:
            pipe.send_bytes(chunk)
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        result = msgspec.msgpack.decode(pipe.recv_bytes(), type=Result)
        prompts = [pipe.recv_bytes() for _ in range(result.num_prompts)]
        if result.bug or result.peak_memory > _KEPT_MEMORY:
            self._end()
        if result.bug:
            raise RuntimeError(f"the process that reads large bodies fails:\n{result.bug}")
        if result.error is not None:
            raise result.error.rebuild()
        return PackedRequest(result.parameters, prompts, result.ignored_fields)

    def _connect(self) -> Connection:
        """The pipe to the process, which is started if there is none."""
        if self._process is not None and not self._process.is_alive():
            self._end()
        if self._pipe is None:
            try:
                self.start()
            except OSError as error:
                reason = f"the process that reads large bodies cannot be started: {error}"
                raise Unavailable(reason) from None
        assert self._pipe is not None
        return self._pipe

    def start(self) -> None:
        if self._pipe is not None:
            return
        context = multiprocessing.get_context("spawn")
        pipe, other_end = context.Pipe()
        process = context.Process(
            target=run_body_process,
            args=(other_end, os.getpid(), self._bounds, self._memory_limit, self.model_names),
            name="body-worker",
            daemon=True,
        )
        with other_end, end_signals_blocked():
            try:
                process.start()
            except OSError:
                pipe.close()
                raise
        self._pipe = pipe
        self._process = process

    def kill(self) -> None:
        """From another thread: end the current job with an error."""
        process = self._process  # the worker's thread may set it to None at any time
        if process is not None:
            process.kill()

    def close(self) -> None:
        """From another thread: end it, and start no other."""
        self._is_closed = True
        self.kill()
        self._kill_at_exit.cancel()

    def collect(self) -> None:
        """After its thread has ended: leave no zombie process, if it ends soon.

        It is killed again, since it may just have been started.
        """
        self.kill()
        if self._process is not None:
            self._process.join(_EXIT_TIMEOUT_S)

    def _end(self) -> int:
        """End the process. Returns its exit code, negative for a signal."""
        assert self._process is not None
        assert self._pipe is not None
        self._process.kill()
        self._process.join()
        exit_code = exit_code_of(self._process)
        self._pipe.close()
        self._process = None
        self._pipe = None
        return exit_code


def _lacked_memory(exit_code: int) -> bool:
    return exit_code == NO_MEMORY or -exit_code in OUT_OF_MEMORY


def _shutting_down() -> Unavailable:
    return Unavailable("the server is shutting down")


def _name_of(model: type[PromptRequest]) -> str:
    return f"{model.__module__}:{model.__qualname__}"
