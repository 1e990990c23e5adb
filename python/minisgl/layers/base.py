"""A model is a tree of operators; each takes its weights from a `WeightSource`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from torch import Tensor

_LOADERS = 8


class WeightSource(Protocol):
    """A checkpoint, read tensor by tensor and only as far as a rank needs it."""

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name, in whatever way it is stored."""

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        cols: range | None = None,
    ) -> Tensor:
        """Read a tensor, dequantized if the checkpoint stores it quantized.

        Args:
            shape: of the whole tensor.
            rows, cols: what to read of dimension 0 and 1; None for all.

        Returns:
            a new tensor in the compute dtype, on the engine's device.

        Raises:
            CheckpointError: the tensor is missing, damaged, of another shape or of an unknown
                format, or `rows` and `cols` cut a scale block of a quantized tensor.
        """


class BaseOP:
    """An operator; its children are those attributes that are operators themselves.

    The names of the checkpoint's tensors are made of the attributes' names, unless an operator's
    `load` says otherwise.
    """

    def children(self) -> Iterator[tuple[str, BaseOP]]:
        return ((name, child) for name, child in vars(self).items() if isinstance(child, BaseOP))

    def walk(self) -> Iterator[BaseOP]:
        """This operator and all below it."""
        yield self
        for _, child in self.children():
            yield from child.walk()

    def load(self, source: WeightSource, name: str = "") -> None:
        """Read this rank's shard of the weights called `name`."""
        for child_name, child in self.children():
            child.load(source, f"{name}.{child_name}".lstrip("."))


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
        """Load the operators in threads.

        While the tensors of one go to the device, those of another are read. After an error no
        further operator is begun.
        """

        def load_child(child: tuple[str, BaseOP]) -> None:
            child_name, op = child
            op.load(source, f"{name}.{child_name}")

        with ThreadPoolExecutor(min(_LOADERS, len(os.sched_getaffinity(0)))) as pool:
            for _ in pool.map(load_child, self.children()):
                pass
