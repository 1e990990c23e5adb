"""Queues between processes: ZMQ push and pull over a private folder, one message a frame.

Nothing is lost: there is no high-water mark and no PUB/SUB. A queue has one reader, which binds;
writers connect, and may start first. The messages of one writer arrive in order. The queues know no
message type: functions that encode and decode are arguments.

Each queue has two threads of libzmq. Making one raises RuntimeError if the system has no threads
left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import zmq
import zmq.asyncio

from minisgl.utils.threads import check_threads_are_left

M = TypeVar("M")
_LINGER_MS = 1000
_BEAT_INTERVAL_MS = 500
# libzmq starts two with the first socket of a context, or aborts the process. One more, since the
# system may count a thread that has ended for a moment.
_NUM_THREADS = 3


class PushQueue(Generic[M]):
    """The writing end. `put` returns at once; messages wait here until the reader has connected."""

    def __init__(self, address: str, encode: Callable[[M], bytes]) -> None:
        check_threads_are_left(_NUM_THREADS)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.LINGER, _LINGER_MS)
        self._socket.connect(address)
        self._encode = encode

    def put(self, msg: M) -> None:
        self._socket.send(self._encode(msg))

    def close(self) -> None:
        """Wait up to a second until all messages are sent, then drop the rest."""
        self._context.destroy(linger=_LINGER_MS)

    def drop(self) -> None:
        """Close, and drop what is not sent."""
        self._context.destroy(linger=0)


class PullQueue(Generic[M]):
    """The reading end.

    Args:
        beat: is called at every look for a message, and twice a second while none comes.
    """

    def __init__(
        self, address: str, decode: Callable[[bytes], M], beat: Callable[[], None] = lambda: None
    ) -> None:
        check_threads_are_left(_NUM_THREADS)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._decode = decode
        self._beat = beat

    def get(self) -> M:
        """Wait for the next message."""
        self._beat()
        while not self._socket.poll(_BEAT_INTERVAL_MS):
            self._beat()
        return self._decode(self._socket.recv())

    def wait(self, *descriptors: int) -> bool:
        """Wait for a message, or until one of these descriptors can be read.

        Returns:
            whether there is a message.
        """
        poller = zmq.Poller()
        for readable in (self._socket, *descriptors):
            poller.register(readable, zmq.POLLIN)
        return self._socket in dict(poller.poll())

    def drain(self, *, block: bool = False) -> list[M]:
        """Return all messages that have arrived; with `block`, wait for at least one."""
        self._beat()
        msgs = [self.get()] if block else []
        while self._socket.poll(0):
            msgs.append(self.get())
        return msgs

    def close(self) -> None:
        self._context.destroy(linger=0)


class AsyncPullQueue(Generic[M]):
    """The reading end inside an event loop."""

    def __init__(self, address: str, decode: Callable[[bytes], M]) -> None:
        check_threads_are_left(_NUM_THREADS)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._decode = decode

    async def get(self) -> M:
        return self._decode(await self._socket.recv())

    def close(self) -> None:
        self._context.destroy(linger=0)
