"""Queues between processes: ZMQ push and pull over a private folder, one message a frame.

Lossless by construction: no high-water mark, no PUB/SUB. A queue has one reader, which binds; writers connect
and may start first. What one writer sends is read in its order. Knows no message: it is given how to encode
and decode.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Generic, TypeVar

import zmq
import zmq.asyncio

from minisgl.errors import ConfigError

M = TypeVar("M")
_LINGER_MS = 1000


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the queues of one server are: sockets in a folder that its processes share.

    Attributes:
        num_tokenizer: tokenizers with a queue of their own; at zero the detokenizer's serves.
    """

    folder: Path
    num_tokenizer: int = 0

    def _of(self, name: str) -> str:
        return f"ipc://{self.folder / name}"

    @property
    def frontend(self) -> str:
        return self._of("frontend")

    @property
    def backend(self) -> str:
        return self._of("backend")

    @property
    def detokenizer(self) -> str:
        return self._of("detokenizer")

    @property
    def tokenizers(self) -> list[str]:
        return [self._of(f"tokenizer-{i}") for i in range(self.num_tokenizer)] or [self.detokenizer]

    def rank(self, rank: int) -> str:
        return self._of(f"rank-{rank}")

    @property
    def meeting(self) -> Path:
        """The file through which tensor-parallel ranks find each other."""
        return self.folder / "meeting"


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that only this user can enter (0700), removed at the end.

    Raises:
        ConfigError: its path is too long for a socket.
    """
    with TemporaryDirectory(prefix="minisgl-", ignore_cleanup_errors=True) as name:
        if len(os.fsencode(name)) + len("/tokenizer-000") > zmq.IPC_PATH_MAX_LEN:
            raise ConfigError(
                f"the temporary folder {name} is too long for a socket name; set TMPDIR"
            )
        yield Path(name)


class PushQueue(Generic[M]):
    """The writing end. `put` returns at once; a message waits here until the reader has come."""

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
        """Give what was put a second to leave, then drop it."""
        self._context.destroy(linger=_LINGER_MS)


class PullQueue(Generic[M]):
    """The reading end."""

    def __init__(self, address: str, decode: Callable[[bytes], M]) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._decode = decode

    def get(self) -> M:
        """Wait for the next message."""
        return self._decode(self._socket.recv())

    def drain(self, *, block: bool = False) -> list[M]:
        """Everything that has come; with `block`, wait for at least one message."""
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
