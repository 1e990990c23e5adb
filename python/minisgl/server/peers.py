"""The queues between the API processes of a server.

Several API processes accept connections from one socket, each with requests of its own. The first
is the parent: it alone has the workers and the signals, and tells the others what they need to
know. Any of them answers for all when it is asked for the metrics. Next to read: `api_worker.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from minisgl.errors import Unavailable
from minisgl.message import (
    MetricSample,
    MetricsQuery,
    MetricsReply,
    PeerMsg,
    decoder,
    encode,
)
from minisgl.processes.addresses import Addresses
from minisgl.processes.queues import AsyncPullQueue, PushQueue

_ANSWER_S = 5.0


class Peers:
    """The queues between an API process and the others.

    Args:
        api: which of the processes this is.
    """

    def __init__(self, addresses: Addresses, api: int) -> None:
        self._api = api
        self._inbox: AsyncPullQueue[PeerMsg] = AsyncPullQueue(
            addresses.peers[api], decoder(PeerMsg)
        )
        self._others = {
            other: PushQueue[PeerMsg](address, encode)
            for other, address in enumerate(addresses.peers)
            if other != api
        }
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Queue[MetricsReply]] = {}

    def post(self, msg: PeerMsg) -> None:
        """Send a message to all others."""
        for queue in self._others.values():
            queue.put(msg)

    async def receive(self) -> PeerMsg:
        """The next message of another process."""
        return await self._inbox.get()

    async def run(
        self, samples: Callable[[], list[MetricSample]], apply: Callable[[PeerMsg], None]
    ) -> None:
        """Answer the others, for ever.

        Args:
            samples: returns the numbers of this process.
            apply: is called with what is no question.
        """
        while True:
            msg = await self.receive()
            match msg:
                case MetricsQuery(api, number):
                    self._others[api].put(MetricsReply(number, samples()))
                case MetricsReply(number):
                    if number in self._replies:
                        self._replies[number].put_nowait(msg)
                case _:
                    apply(msg)

    async def samples(self) -> list[MetricSample]:
        """The numbers of all others.

        Raises:
            Unavailable: one of them does not answer.
        """
        number = next(self._numbers)
        replies = self._replies[number] = asyncio.Queue()
        self.post(MetricsQuery(self._api, number))
        try:
            async with asyncio.timeout(_ANSWER_S):
                answers = [await replies.get() for _ in self._others]
        except TimeoutError:
            raise Unavailable("another API process does not send its metrics") from None
        finally:
            del self._replies[number]
        return [sample for answer in answers for sample in answer.samples]

    def close(self) -> None:
        for queue in self._others.values():
            queue.close()
        self._inbox.close()
