"""A GGUF file as a source of weights. What is in such a file is read by `checkpoint/gguf.py`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from minisgl.models.checkpoint_files import CheckpointFiles


class GGUFCheckpoint(CheckpointFiles):
    """A GGUF file under Hugging Face's tensor names; each tensor is dequantized as it is read."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        # Imported here: its libraries take a while, and only GGUF files need them.
        from minisgl.checkpoint.gguf import GGUFFile

        super().__init__(dtype, device)
        self._file = GGUFFile(path)

    def __str__(self) -> str:
        return str(self._file)

    def __contains__(self, name: str) -> bool:
        return name in self._file.shapes

    def names(self) -> Iterable[str]:
        return [*self._file.shapes, *self._file.unknown_names]

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._file.shapes[name]

    def _read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        return torch.from_numpy(self._file.tensor(name, part))
