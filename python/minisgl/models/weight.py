"""Weight files, read in parts: each rank touches only the bytes of its shard.

A folder holds safetensors (one file, or several with an index) or one `model.gguf`; both are a
`WeightSource`. Pickled checkpoints are not read.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minisgl.checkpoint.gguf import GGUF_NAME, GGUFFile
from minisgl.errors import CheckpointError
from minisgl.layers import BaseOP

_INDEX = "model.safetensors.index.json"


class Checkpoint(ABC):
    """A `WeightSource` over files: checks presence and shape, converts dtype and device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        cols: range | None = None,
    ) -> Tensor:
        if name not in self:
            raise CheckpointError(f"{self} has no tensor {name!r}")
        if self._shape(name) != shape:
            raise CheckpointError(
                f"{self}: {name!r} has the shape {self._shape(name)}, expected {shape}"
            )
        wanted = [_slice(rows), _slice(cols)]
        tensor = self._read(name, tuple(wanted[: len(shape)]))
        return tensor.to(self._device, self._dtype, copy=True).contiguous()

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def _shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def _read(self, name: str, part: tuple[slice, ...]) -> Tensor: ...


class SafetensorsCheckpoint(Checkpoint):
    """One or several safetensors files, mapped into memory."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._folder = folder
        self._file_of: dict[str, safe_open] = {}
        for path in _safetensors_files(folder):
            file = _open_safetensors(path)
            self._file_of |= dict.fromkeys(file.keys(), file)

    def __str__(self) -> str:
        return str(self._folder)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def _read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        tensor: Tensor = self._file_of[name].get_slice(name)[part]
        return tensor


class GGUFCheckpoint(Checkpoint):
    """A GGUF file under Hugging Face's tensor names; each tensor is dequantized as it is read."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._file = GGUFFile(path)

    def __str__(self) -> str:
        return str(self._file)

    def __contains__(self, name: str) -> bool:
        return name in self._file.shapes

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._file.shapes[name]

    def _read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        return torch.from_numpy(self._file.tensor(name, part))


class DummyWeights:
    """A `WeightSource` of random numbers, small enough that activations stay finite.

    One-dimensional tensors, such as norms, are 1.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def read(
        self,
        name: str,  # noqa: ARG002 - all are alike
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        cols: range | None = None,
    ) -> Tensor:
        whole = torch.empty(shape, dtype=self._dtype, device="meta")
        weight = torch.empty_like(
            whole[(_slice(rows), _slice(cols))[: len(shape)]], device=self._device
        )
        return weight.normal_(std=0.02) if len(shape) > 1 else weight.fill_(1.0)


def open_checkpoint(folder: Path, dtype: torch.dtype, device: torch.device) -> Checkpoint:
    """
    Raises:
        CheckpointError: there are no weights, or a file is damaged.
    """
    if (folder / GGUF_NAME).exists():
        return GGUFCheckpoint(folder / GGUF_NAME, dtype, device)
    return SafetensorsCheckpoint(folder, dtype, device)


def load_weight(
    model: BaseOP, folder: Path, dtype: torch.dtype, device: torch.device, *, dummy: bool = False
) -> None:
    """Give a model this rank's part of the weights in a folder, or random ones.

    Raises:
        CheckpointError: a tensor is missing, damaged or of another shape than the config says.
    """
    model.load(DummyWeights(dtype, device) if dummy else open_checkpoint(folder, dtype, device))


def _slice(part: range | None) -> slice:
    return slice(None) if part is None else slice(part.start, part.stop)


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.exists():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} cannot be read: {error}") from None
        files = [folder / name for name in sorted(names)]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [str(path) for path in files if not path.exists()]
    if missing or not files:
        raise CheckpointError(
            f"weights are missing: {', '.join(missing) or folder / '*.safetensors'}"
        )
    return files


def _open_safetensors(path: Path) -> safe_open:
    try:
        file: safe_open = safe_open(path, framework="pt").__enter__()
        return file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
