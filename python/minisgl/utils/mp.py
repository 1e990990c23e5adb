"""Queues between processes: ZMQ push and pull over a private folder, one message a frame.

Nothing is lost: there is no high-water mark and no PUB/SUB. A queue has one reader, which binds;
writers connect, and may start first. The messages of one writer arrive in order. The queues know no
message type: functions that encode and decode are arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, Self, TypeVar

import zmq
import zmq.asyncio

M = TypeVar("M")
DETOKENIZER = "detokenizer"  # the name of the process
_LINGER_MS = 1000
_BEAT_INTERVAL_MS = 500


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of the queues of one server: sockets in a folder that its processes have access to.

    Attributes:
        num_tokenizer: tokenizers with a queue of their own; with zero the detokenizer's queue is
            used.
        epoch: how often the workers were started again. Every start has sockets of its own but for
            those of API processes, so that no worker reads what was meant for one before it.
        num_api: API processes.
        lives: how often each tokenizer and the detokenizer was replaced in this epoch, by name. A
            successor has a socket of its own, for the same reason.
    """

    folder: Path
    num_tokenizer: int = 0
    epoch: int = 0
    num_api: int = 1
    lives: Mapping[str, int] = field(default_factory=dict)

    def in_epoch(self, epoch: int) -> Self:
        """The addresses at the beginning of another epoch."""
        return replace(self, epoch=epoch, lives={})

    def in_life(self, name: str, life: int) -> Self:
        """The addresses after a tokenizer or the detokenizer was replaced so often."""
        return replace(self, lives={**self.lives, name: life})

    def life_of(self, name: str) -> int:
        return self.lives.get(name, 0)

    @property
    def frontends(self) -> list[str]:
        """Where the API processes get replies."""
        return [f"ipc://{self.folder / f'frontend-{i}'}" for i in range(self.num_api)]

    @property
    def peers(self) -> list[str]:
        """Where the API processes get messages of each other."""
        return [f"ipc://{self.folder / f'peer-{i}'}" for i in range(self.num_api)]

    @property
    def backend(self) -> str:
        return self._socket("backend")

    @property
    def detokenizer(self) -> str:
        return self._socket(DETOKENIZER)

    @property
    def tokenizer_names(self) -> list[str]:
        """The names of the processes that tokenize."""
        if self.num_tokenizer == 0:
            return [DETOKENIZER]
        return [f"tokenizer-{i}" for i in range(self.num_tokenizer)]

    @property
    def tokenizers(self) -> list[str]:
        return [self._socket(name) for name in self.tokenizer_names]

    def rank(self, rank: int) -> str:
        return self._socket(f"rank-{rank}")

    @property
    def rendezvous(self) -> Path:
        """The file through which tensor-parallel ranks find each other."""
        return self.folder / f"rendezvous.{self.epoch}"

    def _socket(self, name: str) -> str:
        return f"ipc://{self.folder / name}.{self.epoch}.{self.life_of(name)}"


def uids_of_api(api: int, num_api: int) -> Iterator[int]:
    """The uids that an API process gives: a uid says whose request it is."""
    return itertools.count(api, num_api)


def api_of(uid: int, num_api: int) -> int:
    """The API process that gave a uid."""
    return uid % num_api


def tokenizer_of(uid: int, num_api: int, num_tokenizer: int) -> int:
    """The tokenizer to which all messages of a request go."""
    return uid // num_api % num_tokenizer


class PushQueue(Generic[M]):
    """The writing end. `put` returns at once; messages wait here until the reader has connected."""

    def __init__(self, address: str, encode: Callable[[M], bytes]) -> None:
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
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._decode = decode

    async def get(self) -> M:
        return self._decode(await self._socket.recv())

    def close(self) -> None:
        self._context.destroy(linger=0)
