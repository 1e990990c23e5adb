"""Checks the header of a GGUF file before the package `gguf` reads it.

That reader trusts the header: it makes an object for each number that an array is said to have, and
a view for each range that a tensor is said to have. The check takes time linear in the header's
bytes, and memory only for the ranges of tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from minisgl.checkpoint.files import check_size
from minisgl.errors import CheckpointError

_MAX_FILE_BYTES = 1 << 50
_MAX_FIELDS = 4096  # files have 20 to 60
_MAX_TENSORS = 1 << 16
_MAX_ITEMS = 1 << 20  # in all arrays together: tokens, their types and scores, merges
_MAX_NAME_BYTES = 1024
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 16
_UINT32 = 4
_STRING = 8
_ARRAY = 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, _UINT32: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of numbers


def check_gguf_header(path: Path) -> None:
    """Check counts, lengths and ranges of a file.

    Raises:
        CheckpointError: the file cannot be read, or a number in its header is beyond its bounds.
    """
    check_size(path, _MAX_FILE_BYTES)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            _Header(data).check()
    except (OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"{path} is no readable GGUF file: {error}") from None


@dataclass(frozen=True, slots=True)
class _Range:
    """The bytes of a tensor, counted from the first tensor."""

    start: int
    end: int
    name: str


class _Header:
    """Walks through a header once."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0
        self._num_items = 0
        self._alignment = 32

    def check(self) -> None:
        """
        Raises:
            ValueError, struct.error: the header is wrong, or ends too soon.
        """
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        if self._number("I") & 0xFFFF == 0:  # the version, in the other order of bytes
            raise ValueError(
                "its numbers are big-endian, which are not read; convert it with "
                "gguf-convert-endian of the package gguf"
            )
        num_tensors = self._count("Q", "tensors", _MAX_TENSORS, at=8)
        num_fields = self._count("Q", "fields", _MAX_FIELDS)
        for _ in range(num_fields):
            self._field()
        ranges = [self._tensor() for _ in range(num_tensors)]
        self._check_ranges(ranges)

    def _number(self, code: str) -> int:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return int(value)

    def _count(self, code: str, what: str, most: int, *, at: int | None = None) -> int:
        if at is not None:
            self._at = at
        count = self._number(code)
        if count > most:
            raise ValueError(f"it has {count} {what}, at most {most} are read")
        return count

    def _skip(self, num_bytes: int) -> int:
        """Move past the next bytes; return where they begin."""
        start = self._at
        if num_bytes > len(self._data) - start:
            raise ValueError(f"{num_bytes} bytes at {start} reach beyond the end of the file")
        self._at = start + num_bytes
        return start

    def _name(self) -> str:
        start = self._skip(self._count("Q", "bytes in a name", _MAX_NAME_BYTES))
        return self._data[start : self._at].decode()

    def _field(self) -> None:
        name = self._name()
        kind = self._number("I")
        if name == "general.alignment":
            self._read_alignment(kind)
        elif kind == _ARRAY:
            self._array(name)
        else:
            self._items(kind, 1)

    def _read_alignment(self, kind: int) -> None:
        alignment = self._number("I")
        is_power = alignment.bit_count() == 1
        if kind != _UINT32 or not is_power or alignment > _MAX_ALIGNMENT:
            raise ValueError(f"general.alignment must be a power of two, got {alignment}")
        self._alignment = alignment

    def _array(self, name: str) -> None:
        kind = self._number("I")
        if kind == _ARRAY:
            raise ValueError(f"the field {name!r} is an array of arrays")
        left = _MAX_ITEMS - self._num_items
        num_items = self._count("Q", f"items up to those of {name!r}", left)
        self._num_items += num_items
        self._items(kind, num_items)

    def _items(self, kind: int, num_items: int) -> None:
        if kind == _STRING:
            for _ in range(num_items):
                self._skip(self._number("Q"))
        elif kind in _SIZES:
            self._skip(_SIZES[kind] * num_items)
        else:
            raise ValueError(f"a field has the type {kind}, which is not known")

    def _tensor(self) -> _Range:
        name = self._name()
        num_dimensions = self._count("I", f"dimensions of {name!r}", _MAX_DIMENSIONS)
        shape = [self._number("Q") for _ in range(num_dimensions)]
        kind = GGMLQuantizationType(self._number("I"))
        start = self._number("Q")
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or min(shape) < 1 or shape[0] % block_size:
            raise ValueError(f"the tensor {name!r} cannot have the shape {shape}")
        if start % self._alignment:
            raise ValueError(f"the tensor {name!r} begins at {start}, which is not aligned")
        return _Range(start, start + math.prod(shape) // block_size * block_bytes, name)

    def _check_ranges(self, ranges: list[_Range]) -> None:
        if len({tensor.name for tensor in ranges}) < len(ranges):
            raise ValueError("two tensors have one name")
        space = len(self._data) - -(-self._at // self._alignment) * self._alignment
        end = 0
        for tensor in sorted(ranges, key=lambda tensor: tensor.start):
            if tensor.start < end:
                raise ValueError(f"the tensor {tensor.name!r} begins within another one")
            end = tensor.end
            if end > space:
                raise ValueError(f"the tensor {tensor.name!r} reaches beyond the end of the file")
