"""Encoding: msgpack with the message's type as a tag, checked against the declared fields on arrival."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from minisgl.core import IntArray
from minisgl.errors import InvalidRequest

_WIRE = np.dtype("<i4")
_encoder = msgspec.msgpack.Encoder()


class BaseMsg(msgspec.Struct, frozen=True, tag=True):
    """Root of all messages."""


def encode(msg: BaseMsg) -> bytes:
    return _encoder.encode(msg)


def decoder(types: Any) -> Callable[[bytes], Any]:
    """A function that reads messages of the given type or union of types.

    It raises msgspec.ValidationError if the bytes are no such message.
    """
    return msgspec.msgpack.Decoder(types).decode


def pack_ids(ids: Sequence[int] | IntArray) -> bytes:
    """
    Raises:
        InvalidRequest: an id does not fit 32 bits.
    """
    given = np.asarray(ids)
    limits = np.iinfo(_WIRE)
    if given.size and (given.min() < limits.min or given.max() > limits.max):
        raise InvalidRequest(f"token ids must be in [{limits.min}, {limits.max}]", param="prompt")
    return given.astype(_WIRE).tobytes()


def unpack_ids(raw: bytes) -> IntArray:
    """The ids as a read-only view of `raw`."""
    return np.frombuffer(raw, dtype=_WIRE)
