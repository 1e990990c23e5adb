"""Quantized weights as safetensors hold them, dequantized into the compute dtype as they are read.

    weight = (stored - zero point) * scale      in float32, then rounded to the compute dtype

A layer `x` is stored as `x.weight` (fp8, int8), or as `x.weight_packed`: integers of 4 or 8 bits,
shifted to be unsigned, in words of 32 bits, the first in the lowest. Beside it is `x.weight_scale`
or `x.weight_scale_inv`, which despite its name is multiplied too, and there may be
`x.weight_zero_point`.
"""

# Dimensions: I inputs of a linear layer, O outputs of a linear layer. A grid has one entry a scale
# block, along both.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.checkpoint import Quantization, StoredFormat
from minisgl.errors import CheckpointError
from minisgl.models.safetensors_files import PLAIN_DTYPES, SafetensorsCheckpoint

_WORD_BITS = 32
_ZERO_POINT_DTYPES = ("I8", "I32", "F8_E4M3")
_NUMBERS_AT_A_TIME = 1 << 22  # that are in float32 at once


@dataclass(frozen=True, slots=True)
class _Shard:
    """Some outputs and inputs of a layer's weight, and the blocks that have a scale each.

    Attributes:
        shape: outputs and inputs of the whole weight.
        block: outputs and inputs of a block; the last ones of the weight may be smaller.
    """

    layer: str
    shape: tuple[int, int]
    block: tuple[int, int]
    outputs: range
    inputs: range

    @property
    def grid_shape(self) -> tuple[int, int]:
        """Blocks of the whole weight."""
        return -(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1])

    @property
    def grid_rows(self) -> range:
        return _blocks_of(self.outputs, self.block[0])

    @property
    def grid_cols(self) -> range:
        return _blocks_of(self.inputs, self.block[1])


class QuantizedCheckpoint:
    """A `WeightSource` over safetensors of which some weights are quantized.

    A weight that the config calls quantized may be stored unquantized, and is then read as it is.
    The reverse is an error, and so is a weight without its scale.
    """

    def __init__(
        self, files: SafetensorsCheckpoint, quantization: Quantization, dtype: torch.dtype
    ) -> None:
        self._files = files
        self._quantization = quantization
        self._dtype = dtype

    def __contains__(self, name: str) -> bool:
        return self._is_stored(name)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        cols: range | None = None,
    ) -> Tensor:
        layer, _, kind = name.rpartition(".")
        stored_format = self._format_of(layer) if kind == "weight" else None
        if stored_format is None or len(shape) != 2:
            return self._files.read(name, shape, rows=rows, cols=cols)
        outputs, inputs = shape
        scale_name = self._scale_name(layer)
        block = stored_format.block or self._implied_block(scale_name, (outputs, inputs))
        shard = _Shard(
            layer,
            (outputs, inputs),
            block,
            range(outputs) if rows is None else rows,
            range(inputs) if cols is None else cols,
        )
        if stored_format.block is not None:
            _check_whole_blocks(shard)
        return _dequantize(
            self._numbers(shard, stored_format),
            self._grid(shard, scale_name, PLAIN_DTYPES),
            self._zero_points(shard, stored_format),
            block,
            self._dtype,
        )

    def unread_names(self) -> list[str]:
        """As `CheckpointFiles.unread_names`."""
        return self._files.unread_names()

    def _format_of(self, layer: str) -> StoredFormat | None:
        """How a layer is stored; None if it is plain, not there, or not called quantized."""
        if not self._is_stored(f"{layer}.weight") or self._files.is_plain(f"{layer}.weight"):
            return None
        return self._quantization.format_of(layer)

    def _is_stored(self, weight: str) -> bool:
        return weight in self._files or f"{weight}_packed" in self._files

    def _scale_name(self, layer: str) -> str:
        for kind in ("weight_scale", "weight_scale_inv"):
            if f"{layer}.{kind}" in self._files:
                return f"{layer}.{kind}"
        raise CheckpointError(f"{self._files}: {layer!r} is quantized, but has no weight_scale")

    def _implied_block(self, scale_name: str, shape: tuple[int, int]) -> tuple[int, int]:
        """The scale block, by the shape of the scales: the whole tensor, or each output."""
        outputs, inputs = shape
        stored = self._files.shape_of(scale_name)
        if stored in ((), (1,), (1, 1)):
            return outputs, inputs
        if stored in ((outputs,), (outputs, 1)):
            return 1, inputs
        raise CheckpointError(
            f"{self._files}: {scale_name!r} has the shape {stored}, expected one scale or one for"
            f" each of {outputs} outputs"
        )

    def _numbers(self, shard: _Shard, stored_format: StoredFormat) -> Tensor:
        """The stored numbers of a shard; packed ones are uint8."""
        stored = stored_format.stored
        if stored != "I32":
            return self._files.read_stored(
                f"{shard.layer}.weight", shard.shape, [stored], shard.outputs, shard.inputs
            )
        a_word = _WORD_BITS // stored_format.bits
        words = _blocks_of(shard.inputs, a_word)
        packed = self._files.read_stored(
            f"{shard.layer}.weight_packed",
            (shard.shape[0], -(-shard.shape[1] // a_word)),
            [stored],
            shard.outputs,
            words,
        )
        before = shard.inputs.start - words.start * a_word
        numbers = _unpack(packed, stored_format.bits)
        return numbers[:, before : before + len(shard.inputs)]

    def _grid(self, shard: _Shard, name: str, dtypes: tuple[str, ...]) -> Tensor:
        """The scales or zero points of a shard, [blocks of outputs, blocks of inputs]."""
        shape: tuple[int, ...] = shard.grid_shape
        while shape and shape[-1] == 1 and not self._files.has_shape(name, shape):
            shape = shape[:-1]  # dimensions of one may be left out
        parts = (shard.grid_rows, shard.grid_cols)[: len(shape)]
        grid = self._files.read_stored(name, shape, dtypes, *parts)
        return grid.reshape(len(shard.grid_rows), len(shard.grid_cols)).float()

    def _zero_points(self, shard: _Shard, stored_format: StoredFormat) -> Tensor | float:
        """What to subtract from the numbers of `_numbers`: a grid, or one number."""
        is_packed = stored_format.stored == "I32"
        name = f"{shard.layer}.weight_zero_point"
        if not stored_format.has_zero_point:
            self._refuse_zero_points(name)
            return float(1 << (stored_format.bits - 1)) if is_packed else 0.0
        if not is_packed:
            return self._grid(shard, name, ("I8",))
        # Packed along the outputs, and shifted like the numbers, so that the shift cancels out.
        rows, cols = shard.grid_shape
        words = -(-rows // (_WORD_BITS // stored_format.bits))
        packed = self._files.read_stored(
            name, (words, cols), ["I32"], range(words), shard.grid_cols
        )
        # Not `contiguous`: of one word a column it leaves the strides, and then there is no view.
        by_cols = packed.T.clone(memory_format=torch.contiguous_format)
        zero_points = _unpack(by_cols, stored_format.bits).T
        return zero_points[shard.grid_rows.start : shard.grid_rows.stop].float()

    def _refuse_zero_points(self, name: str) -> None:
        """A layer that is called symmetric may only have zeros, which older writers stored."""
        if name not in self._files:
            return
        stored = self._files.read_stored(name, self._files.shape_of(name), _ZERO_POINT_DTYPES)
        if stored.float().any():
            raise CheckpointError(f"{self._files}: {name!r} is not 0, but config.json says so")


def _blocks_of(part: range, size: int) -> range:
    """The blocks of a size that hold a part."""
    return range(part.start // size, -(-part.stop // size))


def _check_whole_blocks(shard: _Shard) -> None:
    """
    Raises:
        CheckpointError: the shard cuts a block, whose scale two ranks would then need.
    """
    parts = (("outputs", shard.outputs), ("inputs", shard.inputs))
    for (kind, part), size, total in zip(parts, shard.block, shard.shape, strict=True):
        ends_in_block = part.stop % size and part.stop != total
        if part and (part.start % size or ends_in_block):
            raise CheckpointError(
                f"{shard.layer}: {total} {kind} over {-(-total // len(part))} ranks are"
                f" {len(part)} a rank, no whole number of scale blocks of"
                f" {shard.block[0]}x{shard.block[1]} (outputs x inputs); use fewer ranks (--tp)"
            )


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] to uint8 [rows, numbers], from the lowest bits of a word on."""
    bytes_ = packed.view(torch.uint8)
    if bits == 8:
        return bytes_
    assert bits == 4
    return torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(1)


def _dequantize(
    numbers_OI: Tensor,
    scale_grid: Tensor,
    zero_points: Tensor | float,
    block: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """(numbers - zero points) * scale, some rows at a time, because float32 takes more memory."""
    num_outputs, num_inputs = numbers_OI.shape
    weight_OI = torch.empty(numbers_OI.shape, dtype=dtype, device=numbers_OI.device)
    block_inputs = block[1]
    scale = _to_rows(scale_grid, block[0], num_outputs)
    if isinstance(zero_points, Tensor):
        zero_points = _to_rows(zero_points, block[0], num_outputs)
    step = max(1, _NUMBERS_AT_A_TIME // max(1, num_inputs))
    for start in range(0, num_outputs, step):
        rows = slice(start, start + step)
        wide = numbers_OI[rows].float()
        if isinstance(zero_points, Tensor):
            wide -= _to_cols(zero_points[rows], block_inputs, num_inputs)
        elif zero_points:
            wide -= zero_points
        weight_OI[rows] = wide.mul_(_to_cols(scale[rows], block_inputs, num_inputs))
    return weight_OI


def _to_rows(grid: Tensor, block_outputs: int, num_outputs: int) -> Tensor:
    return grid.repeat_interleave(block_outputs, dim=0)[:num_outputs]


def _to_cols(rows: Tensor, block_inputs: int, num_inputs: int) -> Tensor:
    return rows.repeat_interleave(block_inputs, dim=1)[:, :num_inputs]
