"""Chooses the source of a model's weights: one that reads its folder, or random numbers.

A folder holds safetensors (`safetensors_files.py`; quantized: `quantized.py`) or one `model.gguf`
(`gguf_file.py`). All are a `WeightSource`. Pickled checkpoints are not read.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from minisgl.checkpoint import Quantization
from minisgl.checkpoint.files import GGUF_NAME
from minisgl.errors import CheckpointError
from minisgl.layers import BaseOP, WeightSource
from minisgl.models.checkpoint_files import CheckpointFiles, slice_of
from minisgl.models.gguf_file import GGUFCheckpoint
from minisgl.models.quantized import QuantizedCheckpoint
from minisgl.models.safetensors_files import SafetensorsCheckpoint

_NUM_SHOWN = 5  # tensors that an error names


class DummyWeights:
    """A `WeightSource` of random numbers, small enough that activations stay finite.

    One-dimensional tensors, such as norms, are 1.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def __contains__(self, name: str) -> bool:
        """False: what a checkpoint may leave out is left out."""
        return False

    def read(
        self,
        name: str,  # noqa: ARG002 - all are alike
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        cols: range | None = None,
    ) -> Tensor:
        whole = torch.empty(shape, dtype=self._dtype, device="meta")
        part = whole[(slice_of(rows), slice_of(cols))[: len(shape)]]
        # Not `empty_like`: of a tensor without storage it imports sympy, which takes a second.
        weight = torch.empty(part.shape, dtype=self._dtype, device=self._device)
        return weight.normal_(std=0.02) if len(shape) > 1 else weight.fill_(1.0)


class WatchedWeights:
    """A `WeightSource` over another, which finds tensors with NaN or infinity.

    The minimum and maximum of each tensor are found in one pass, without a copy. They stay on the
    device until all tensors are read, so the host waits for a GPU once.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        # The name, the least and the greatest of each: one append, because several threads read.
        self._bounds: list[tuple[str, Tensor, Tensor]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        cols: range | None = None,
    ) -> Tensor:
        weight = self._source.read(name, shape, rows=rows, cols=cols)
        if weight.numel():
            self._bounds.append((name, *weight.aminmax()))  # NaN is both, if there is one
        return weight

    def not_finite(self) -> list[str]:
        """The tensors with NaN or infinity."""
        bounds = torch.stack([bound for _, *pair in self._bounds for bound in pair])
        are_finite = bounds.isfinite().view(-1, 2).all(dim=1).tolist()
        return [
            name
            for (name, _, _), is_finite in zip(self._bounds, are_finite, strict=True)
            if not is_finite
        ]


def open_checkpoint(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None = None,
) -> CheckpointFiles | QuantizedCheckpoint:
    """
    Args:
        quantization: as config.json says it; a GGUF file knows its own.

    Raises:
        CheckpointError: there are no weights, or a file is damaged.
    """
    if (folder / GGUF_NAME).exists():
        return GGUFCheckpoint(folder / GGUF_NAME, dtype, device)
    files = SafetensorsCheckpoint(folder, dtype, device)
    return files if quantization is None else QuantizedCheckpoint(files, quantization, dtype)


def load_weight(
    model: BaseOP,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None = None,
    *,
    dummy: bool = False,
) -> list[str]:
    """Give a model this rank's shard of the weights in a folder, or random ones.

    Returns:
        the names of tensors that the model has not read, though they may mean something. Those of
        rank 0 are those of the group.

    Raises:
        CheckpointError: a tensor is missing, damaged, of another shape than the config says, has
            NaN or infinity, or is quantized in another way; or a GGUF file has a tensor that the
            model does not read.
    """
    if dummy:
        model.load(DummyWeights(dtype, device))
        return []
    source = open_checkpoint(folder, dtype, device, quantization)
    watched = WatchedWeights(source)
    model.load(watched)
    not_finite = watched.not_finite()
    if not_finite:
        advice = "; see --dtype" if dtype == torch.float16 else ""
        raise CheckpointError(
            f"{folder}: {not_finite[0]!r} has NaN or infinity in {_name_of(dtype)}{advice}"
        )
    unread = source.unread_names()
    # A GGUF file's config follows from the file: what is in it belongs to the model.
    if unread and isinstance(source, GGUFCheckpoint):
        raise CheckpointError(
            f"{source} has tensors that this engine's model of its architecture does not read: "
            f"{', '.join(unread[:_NUM_SHOWN])}{', ...' if len(unread) > _NUM_SHOWN else ''}"
        )
    return unread


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
