"""The tree of operators that a model is, and where its weights come from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from torch import Tensor

_LOADERS = 8


class WeightSource(Protocol):
    """A checkpoint, read tensor by tensor and only in the parts asked for."""

    def read(self, name: str, shape: tuple[int, ...], **parts: range) -> Tensor:
        """Read a tensor of the given whole shape.

        Args:
            parts: `rows` and `cols`: the part of dimension 0 and 1 to read; all of it by default.

        Returns:
            a tensor of its own in the engine's dtype, on its device.

        Raises:
            CheckpointError: it is missing, damaged or of another shape.
        """

    def __contains__(self, name: str) -> bool: ...


class BaseOP:
    """An operator; its children are those attributes that are operators themselves.

    An attribute's name is its part of the checkpoint's tensor names.
    """

    def children(self) -> Iterator[tuple[str, BaseOP]]:
        return ((name, child) for name, child in vars(self).items() if isinstance(child, BaseOP))

    def walk(self) -> Iterator[BaseOP]:
        """This operator and all below it."""
        yield self
        for _, child in self.children():
            yield from child.walk()

    def load(self, source: WeightSource, name: str = "") -> None:
        """Take this rank's part of the weights called `name`."""
        for part, child in self.children():
            child.load(source, f"{name}.{part}".lstrip("."))


class StateLessOP(BaseOP):
    """An operator without weights."""

    def load(self, source: WeightSource, name: str = "") -> None:
        pass


Op = TypeVar("Op", bound=BaseOP)


class OPList(BaseOP, Generic[Op]):
    """Operators named by their index."""

    def __init__(self, ops: list[Op]) -> None:
        self._ops = ops

    def __iter__(self) -> Iterator[Op]:
        return iter(self._ops)

    def children(self) -> Iterator[tuple[str, BaseOP]]:
        return ((str(index), op) for index, op in enumerate(self._ops))

    def load(self, source: WeightSource, name: str = "") -> None:
        """Side by side: while the tensors of one go to the device, those of another are read."""
        with ThreadPoolExecutor(min(_LOADERS, len(os.sched_getaffinity(0)))) as pool:
            for _ in pool.map(
                lambda child: child[1].load(source, f"{name}.{child[0]}"), self.children()
            ):
                pass
