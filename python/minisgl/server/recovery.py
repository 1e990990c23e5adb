"""Recovery when a worker dies or hangs: it is replaced, or all workers start again.

A tokenizer or the detokenizer is replaced alone. Its successor has queues of its own. API processes
send it at once what may be lost; service goes on meanwhile.

    a scheduler fails ─▶ new requests get a 503 ─▶ the others are killed ─▶ a new epoch starts
                                                                              │
       requests without a token are sent again, new ones are accepted ◀─ ready ◀─┘

A standby process is no part of the service: its failure is not counted.

A request that has begun to answer ends with an error if its state is lost: its answer cannot go on,
since its client has the beginning. One that has not is sent again, once. Three failures within a
minute of service, or one before the workers are ready, end the server. So does the failure of an
API process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from minisgl.errors import EngineFailed, MiniSGLError
from minisgl.message import ReplaceMsg, ResumeMsg, SuspendMsg
from minisgl.processes.failures import Failure
from minisgl.server.frontend import Frontend
from minisgl.server.peers import Peers
from minisgl.server.workers import Workers

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3
_WITHIN_S = 60.0


class Recovery:
    """Starts workers again, until too many failures end the server.

    Args:
        frontend: of the first API process.
        peers: the others.
    """

    def __init__(self, workers: Workers, frontend: Frontend, peers: Peers) -> None:
        self._workers = workers
        self._frontend = frontend
        self._peers = peers
        self._served_s: deque[float] = deque(maxlen=_MAX_FAILURES)  # between failures
        frontend.metrics.watch_workers(workers.names)

    async def run(self) -> None:
        """Recover from every failure, until there are too many.

        Raises:
            EngineFailed: three workers failed within a minute, or one before it was ready again, or
                an API process has failed.
        """
        while True:
            began_at = time.monotonic()
            failure = await self._next_failure_of_service()
            self._served_s.append(time.monotonic() - began_at)
            self._frontend.metrics.count_failure(failure.name)
            if self._workers.is_api_worker(failure.name):  # its clients are gone with it
                raise EngineFailed(failure.reason)
            if failure.is_at_start:
                raise EngineFailed(f"{failure.name} does not start again: {failure.reason}")
            self._check_rate(failure)
            if self._workers.is_replaceable(failure.name):
                self._replace(failure)
            else:
                await self._restart(failure)

    async def _next_failure_of_service(self) -> Failure:
        while True:
            failure = await self._workers.next_failure()
            if not self._workers.is_standby(failure.name):
                return failure
            self._workers.drop_standby(failure)

    def _check_rate(self, failure: Failure) -> None:
        later = list(self._served_s)[1:]
        if len(later) == _MAX_FAILURES - 1 and sum(later) < _WITHIN_S:
            raise EngineFailed(f"{failure.reason}; {_MAX_FAILURES} failures within a minute")

    def _replace(self, failure: Failure) -> None:
        """Start a successor, and let requests go to it; they wait there until it is ready."""
        name = failure.name
        logger.error("%s; it is replaced", failure.reason)
        self._workers.replace(name)
        addresses = self._workers.addresses
        self._frontend.replace_worker(name, addresses, failure.reason)
        self._peers.post(ReplaceMsg(name, addresses.life_of(name), failure.reason))

    async def _restart(self, failure: Failure) -> None:
        logger.error("%s; the engine starts again", failure.reason)
        self._frontend.suspend(failure.reason, self._workers.start_s)
        self._peers.post(SuspendMsg(failure.reason, self._workers.start_s))
        self._workers.kill()
        await asyncio.to_thread(self._workers.end_epoch)
        # Here and not in a thread, which would start processes though this task is cancelled. If
        # processes that stand by are stopped, this holds the loop for two seconds, however many.
        self._workers.start()
        try:
            await asyncio.to_thread(self._workers.wait_ready)
        except asyncio.CancelledError:
            self._workers.kill()  # or the thread would wait for their reports
            raise
        except MiniSGLError as error:
            raise EngineFailed(f"{failure.reason}; it does not start again: {error}") from None
        self._frontend.resume(self._workers.addresses)
        self._peers.post(ResumeMsg(self._workers.addresses.epoch))
        logger.info("the engine is ready again, after %d s", self._workers.start_s)
