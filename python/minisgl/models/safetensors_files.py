"""Safetensors files as a source of weights: each rank reads only the bytes of its shard."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minisgl.checkpoint.files import MAX_INDEX_BYTES, check_size, read_json
from minisgl.errors import CheckpointError
from minisgl.models.checkpoint_files import CheckpointFiles, slice_of

logger = logging.getLogger(__name__)

_MAX_FILE_BYTES = 1 << 50
_MAX_NAME_BYTES = 255  # of a file system
_SINGLE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
PLAIN_DTYPES = ("F32", "F16", "BF16")  # as safetensors name them
_QUANTIZED_PARTS = (  # of a layer, beside or in place of its weight
    "weight_scale",
    "weight_scale_inv",
    "weight_packed",
    "weight_zero_point",
    "qweight",
    "scales",
)


class SafetensorsCheckpoint(CheckpointFiles):
    """One or several safetensors files, mapped into memory.

    `read` reads only unquantized weights; `read_stored` returns a tensor as it is stored.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._folder = folder
        self._file_of: dict[str, safe_open] = {}
        self._path_of: dict[str, Path] = {}
        self._indexed_path_of = _index_of(folder)
        files = {
            path: _open_safetensors(path)
            for path in _safetensors_files(folder, self._indexed_path_of)
        }
        holders_of: dict[str, list[Path]] = {}
        for path, file in files.items():
            for name in file.keys():  # noqa: SIM118 - it is no dict
                holders_of.setdefault(name, []).append(path)
        for name, path in self._choose_files(holders_of).items():
            self._file_of[name] = files[path]
            self._path_of[name] = path

    def _choose_files(self, holders_of: dict[str, list[Path]]) -> dict[str, Path]:
        """The file to read each tensor from; an index decides between those that hold it."""
        indexed = self._indexed_path_of or {}
        path_of = {}
        undecided = []
        for name, holders in holders_of.items():
            is_decided = indexed.get(name) in holders
            path_of[name] = indexed[name] if is_decided else holders[0]
            if len(holders) > 1 and not is_decided:
                undecided.append(name)
        if undecided:
            name = undecided[0]
            first, second = holders_of[name][:2]
            if self._indexed_path_of is None:
                raise CheckpointError(
                    f"{name!r} is in two files, {first} and {second.name}; remove one"
                )
            logger.warning(
                "%r is in %s and %s, and %s does not say which counts; the first is read, as for "
                "%d more tensors",
                *(name, first, second.name, _INDEX, len(undecided) - 1),
            )
        return path_of

    def __str__(self) -> str:
        return str(self._folder)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        indexed = self._indexed_path_of or {}
        if name not in self and name in indexed:
            raise CheckpointError(
                f"{indexed[name]} has no tensor {name!r}, though {_INDEX} says so"
            )
        super()._check(name, shape)

    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def has_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        return name in self and self.shape_of(name) == shape

    def is_plain(self, name: str) -> bool:
        """Whether a tensor is there as floating-point numbers and has no scale beside it."""
        return name in self and self._trace_of_quantization(name) is None

    def read_stored(
        self, name: str, shape: tuple[int, ...], dtypes: Sequence[str], *parts: range
    ) -> Tensor:
        """A tensor as it is stored, on the engine's device.

        Args:
            dtypes: those that the tensor may have, by their names in safetensors.
            parts: what to read of each dimension; none for a tensor without dimensions.

        Raises:
            CheckpointError: the tensor is missing, or of another shape or dtype.
        """
        self._check(name, shape)
        if self._dtype_of(name) not in dtypes:
            raise CheckpointError(
                f"{self._path_of[name]}: {name!r} is stored as {self._dtype_of(name)}, expected "
                f"{' or '.join(dtypes)}"
            )
        stored = self._read(name, tuple(slice_of(part) for part in parts))
        return stored.to(self._device)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        cols: range | None = None,
    ) -> Tensor:
        trace = self._trace_of_quantization(name)
        if trace is not None:
            raise CheckpointError(
                f"{self._path_of.get(name, self)}: {name!r} is no plain weight ({trace}; plain are "
                f"{', '.join(PLAIN_DTYPES)}), and quantization_config in config.json does not say "
                "how it is stored"
            )
        return super().read(name, shape, rows=rows, cols=cols)

    def _read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        file = self._file_of[name]
        try:
            tensor: Tensor = file.get_slice(name)[part] if part else file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self}: {name!r} cannot be read: {error}") from None
        return tensor

    def _dtype_of(self, name: str) -> str:
        return str(self._file_of[name].get_slice(name).get_dtype())

    def _trace_of_quantization(self, name: str) -> str | None:
        """What shows that a tensor is quantized: its dtype, or a tensor beside it."""
        if name in self and self._dtype_of(name) not in PLAIN_DTYPES:
            return f"stored as {self._dtype_of(name)}"
        layer, _, kind = name.rpartition(".")
        if kind != "weight":
            return None
        beside = [part for part in _QUANTIZED_PARTS if f"{layer}.{part}" in self]
        return f"beside it is {beside[0]}" if beside else None


def _safetensors_files(folder: Path, indexed: dict[str, Path] | None) -> list[Path]:
    """The files to read: those of the index, else the one that holds all, else whatever is there.

    A second file beside `model.safetensors` is an older or another model's, which transformers does
    not read either.
    """
    if indexed is not None:
        files = sorted(set(indexed.values()))
    elif (folder / _SINGLE_FILE).exists():
        files = [folder / _SINGLE_FILE]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [str(path) for path in files if not path.exists()]
    if missing or not files:
        raise CheckpointError(
            f"weights are missing: {', '.join(missing) or folder / '*.safetensors'}"
        )
    return files


def _index_of(folder: Path) -> dict[str, Path] | None:
    """What the index says; None if there is none, or one beside the file that holds all.

    Such an index is left from another saving; transformers does not read it either.
    """
    index = folder / _INDEX
    is_read = index.exists() and not (folder / _SINGLE_FILE).exists()
    return _weight_map(index) if is_read else None


def _weight_map(index: Path) -> dict[str, Path]:
    """The file of each tensor that an index names. None of them leaves the folder."""
    try:
        file_name_of = dict(read_json(index, MAX_INDEX_BYTES)["weight_map"].items())
        file_names = set(file_name_of.values())
    except (KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error}") from None
    for file_name in file_names:
        # The file itself may be a link, as in a hub's cache.
        if not _is_file_name(file_name):
            raise CheckpointError(f"{index} names {file_name!r}, which is no file of its folder")
    return {name: index.parent / file_name for name, file_name in file_name_of.items()}


def _is_file_name(name: object) -> bool:
    if not isinstance(name, str) or name in ("", ".."):
        return False
    is_short = len(name.encode(errors="replace")) <= _MAX_NAME_BYTES
    return is_short and Path(name).name == name and "\0" not in name


def _open_safetensors(path: Path) -> safe_open:
    """Open a file.

    The library checks its header: at most 100 MB, shapes that fit their bytes, ranges without gaps
    or overlaps that end with the file.
    """
    check_size(path, _MAX_FILE_BYTES)
    try:
        file: safe_open = safe_open(path, framework="pt").__enter__()
        return file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
