"""Client processes that together make the load of a workload, and their use of the processor.

Each process has its share of the requests, and only a pipe to its parent. It reports its processor
time and how late its event loop runs, because a late client measures itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import uvloop

from minisgl.benchmark.online.client import Client, Endpoint
from minisgl.benchmark.online.prompts import PromptMaker
from minisgl.benchmark.online.records import RequestRecord
from minisgl.benchmark.online.workloads import PlannedRequest, Workload
from minisgl.processes.child import (
    at_exit,
    die_with_parent,
    end_signals_blocked,
    ignore_end_signals,
)

_LEAD_S = 0.2  # from the word to start until the load's start
_TICK_S = 0.01
_TICKS_PER_REPORT = 20


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a workload for one process."""

    endpoint: Endpoint
    prompts: PromptMaker
    requests: tuple[PlannedRequest, ...]
    concurrency: int | None


@dataclass(frozen=True, slots=True)
class ClientReport:
    """The results of a client process.

    Attributes:
        cpu_share: processor time per wall time, of one core.
        lags_s: how late the event loop was, a hundred times per second.
    """

    records: list[RequestRecord]
    cpu_share: float
    lags_s: list[float]


def shares(
    workload: Workload, endpoint: Endpoint, prompts: PromptMaker, num_processes: int
) -> list[Share]:
    """Deal the requests out in turns, so that each process has at least one.

    A process with more of a closed loop's places gets more requests, so that all end together.
    """
    limit = workload.concurrency or len(workload.requests)
    num = max(1, min(num_processes, limit, len(workload.requests)))
    dealt: list[list[PlannedRequest]] = [[] for _ in range(num)]
    for i, request in enumerate(workload.requests):
        place = i % limit
        dealt[place % num].append(request)
    return [
        Share(
            endpoint,
            prompts,
            tuple(requests),
            None if workload.concurrency is None else (limit + num - 1 - i) // num,
        )
        for i, requests in enumerate(dealt)
    ]


def run_load(
    parts: list[Share], on_start: Callable[[], None], on_progress: Callable[[int], None]
) -> list[ClientReport]:
    """Run the shares at once, each in a process of its own.

    Args:
        on_start: called when all processes are ready.
        on_progress: gets the number of requests that have ended since its last call.

    Raises:
        RuntimeError: a client process has died.
    """
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(_client_process(part)) for part in parts]
        for client in clients:
            client.receive()  # its requests are made
        on_start()
        origin_s = time.monotonic() + _LEAD_S
        for client in clients:
            client.pipe.send(origin_s)
        reports: dict[Connection, ClientReport] = {}
        while len(reports) < len(clients):
            ready = wait([client.pipe for client in clients if client.pipe not in reports])
            for client in (each for each in clients if each.pipe in ready):
                message = client.receive()
                if isinstance(message, ClientReport):
                    reports[client.pipe] = message
                else:
                    on_progress(message)
        return [reports[client.pipe] for client in clients]


@dataclass(frozen=True, slots=True)
class _ClientProcess:
    process: BaseProcess
    pipe: Connection

    def receive(self) -> int | ClientReport:
        """
        Returns:
            the number of requests that have ended, or as the last message the report.
        """
        try:
            message: int | ClientReport = self.pipe.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"a client process ended with {self.process.exitcode}") from None
        return message


@contextlib.contextmanager
def _client_process(part: Share) -> Iterator[_ClientProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_share, args=(os.getpid(), theirs, part), daemon=True)
    with end_signals_blocked():
        process.start()
        kill = at_exit(process.kill)
    theirs.close()
    try:
        yield _ClientProcess(process, ours)
        process.join()
    finally:
        process.kill()
        kill.cancel()
        ours.close()


# In a client process.


def _serve_share(parent_pid: int, pipe: Connection, part: Share) -> None:
    die_with_parent(parent_pid)
    ignore_end_signals()
    requests = [
        part.endpoint.request(part.prompts.prompt(each.prompt), each.num_output)
        for each in part.requests
    ]
    pipe.send(0)
    origin_s = pipe.recv()
    gc.freeze()
    gc.disable()  # a collection would stop all streams; records make no cycles
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pipe.send(runner.run(_run(pipe, part, requests, origin_s)))


async def _run(
    pipe: Connection, part: Share, requests: list[bytes], origin_s: float
) -> ClientReport:
    client = Client(part.endpoint, origin_s)
    records = [
        RequestRecord(each.group, due_s=each.start_s, num_read=each.num_read)
        for each in part.requests
    ]
    gate = _gate(part.concurrency)
    await asyncio.sleep(-client.now_s())
    cpu_s = time.process_time()
    async with _watched(pipe, records) as lags_s, asyncio.TaskGroup() as tasks:
        for request, record in zip(requests, records, strict=True):
            tasks.create_task(_send_when_due(client, request, record, gate))
    cpu_share = (time.process_time() - cpu_s) / client.now_s()
    client.close()
    return ClientReport(records, cpu_share, lags_s)


def _gate(concurrency: int | None) -> contextlib.AbstractAsyncContextManager[None]:
    return contextlib.nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)


async def _send_when_due(
    client: Client,
    request: bytes,
    record: RequestRecord,
    gate: contextlib.AbstractAsyncContextManager[None],
) -> None:
    await asyncio.sleep(record.due_s - client.now_s())
    async with gate:
        await client.send(request, record)


@contextlib.asynccontextmanager
async def _watched(pipe: Connection, records: list[RequestRecord]) -> AsyncIterator[list[float]]:
    """Measure meanwhile how late the event loop is, and report the requests that have ended."""
    watch = _Watch(pipe, records)
    task = asyncio.create_task(watch.run())
    try:
        yield watch.lags_s
    finally:
        task.cancel()
        watch.report()


@dataclass(slots=True)
class _Watch:
    pipe: Connection
    records: list[RequestRecord]
    lags_s: list[float] = field(default_factory=list)
    num_reported: int = 0

    async def run(self) -> None:
        while True:
            for _ in range(_TICKS_PER_REPORT):
                began_s = time.monotonic()
                await asyncio.sleep(_TICK_S)
                self.lags_s.append(time.monotonic() - began_s - _TICK_S)
            self.report()

    def report(self) -> None:
        num_ended = sum(record.ended_s > 0 for record in self.records)
        self.pipe.send(num_ended - self.num_reported)
        self.num_reported = num_ended
