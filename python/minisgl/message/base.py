"""Encoding: msgpack with the message's type as a tag, checked against the fields on arrival."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from minisgl.core import IntArray
from minisgl.errors import InvalidRequest
from minisgl.utils.excerpts import excerpt

_WIRE_DTYPE = np.dtype("<i4")
_LIMITS = np.iinfo(_WIRE_DTYPE)
_encoder = msgspec.msgpack.Encoder()


class BaseMsg(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Root of all messages.

    They are written as arrays: the names of fields would be most of a small message. No message is
    part of a cycle, so the garbage collector need not walk them.
    """


def encode(msg: BaseMsg) -> bytes:
    return _encoder.encode(msg)


def decoder(types: Any) -> Callable[[bytes], Any]:
    """Make a function that reads messages of the given type or union of types.

    The function raises msgspec.DecodeError if the bytes are no such message.
    """
    return msgspec.msgpack.Decoder(types).decode


def pack_ids(ids: Sequence[int] | IntArray) -> bytes:
    """Write ids as little-endian int32.

    Raises:
        InvalidRequest: they are no list of integers, or one does not fit 32 bits; names it.
    """
    if isinstance(ids, list):
        packed = _pack_list(ids)
        if packed is not None:
            return packed
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError, RuntimeError):  # lists of several lengths, a tensor elsewhere
        array = np.empty(())
    is_list_of_ids = array.ndim == 1 and (array.dtype.kind in "iu" or not array.size)
    if not is_list_of_ids or _has_flag(ids, array):
        raise InvalidRequest(_what_is_wrong(ids), param="prompt")
    if array.size and (array.min() < _LIMITS.min or array.max() > _LIMITS.max):
        raise InvalidRequest(_what_is_wrong(ids), param="prompt")
    return array.astype(_WIRE_DTYPE).tobytes()


def _what_is_wrong(ids: Any) -> str:
    """Name the first that is no id, or all if they are no list."""
    must_be_integers = "token ids must be a list of integers"
    for each in _items(ids):
        if not _is_integer(each):
            return f"{must_be_integers}, got {excerpt(each)}"
        if not _LIMITS.min <= each <= _LIMITS.max:
            return f"token ids must be in [{_LIMITS.min}, {_LIMITS.max}], got {excerpt(int(each))}"
    return f"{must_be_integers}, got {excerpt(ids)}"


def _items(ids: Any) -> Iterable[Any]:
    """What a list or an array has; nothing of what has no end, or no items."""
    try:
        len(ids)
        items: Iterable[Any] = iter(ids)
    except TypeError:  # an array of no dimension has the methods, but no items
        return ()
    return items


def _is_integer(value: Any) -> bool:
    if type(value) is int:  # of any size
        return True
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError):
        return False
    return array.ndim == 0 and array.dtype.kind in "iu"


def _pack_list(ids: list[int]) -> bytes | None:
    """What numpy would write too, in a fifth of the time; None if not all are ids.

    Unlike numpy it takes whatever has an index (`__index__`), as a tensor of one number.
    """
    try:
        packed = struct.pack(f"<{len(ids)}i", *ids)
    except (struct.error, ValueError, TypeError, RuntimeError):
        return None
    return None if _has_flag(ids, unpack_ids(packed)) else packed


def _has_flag(ids: Sequence[int] | IntArray, array: IntArray) -> bool:
    """Whether there is a flag among integers, of which numpy has made an integer.

    Args:
        array: what numpy has made of the ids.
    """
    if not isinstance(ids, Sequence):  # an array or a tensor, whose numbers are of one type
        return False
    maybe_flags = map(ids.__getitem__, (array <= 1).nonzero()[0].tolist())
    doubtful = [each for each in maybe_flags if type(each) is not int]
    return any(np.asarray(each).dtype.kind == "b" for each in doubtful)


def unpack_ids(raw: bytes) -> IntArray:
    """Return the ids as a read-only int32 view of `raw`."""
    return np.frombuffer(raw, dtype=_WIRE_DTYPE)
