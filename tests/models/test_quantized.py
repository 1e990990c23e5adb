"""Quantized checkpoints give the tensors of their dequantized copies, on one rank and on
several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minisgl.checkpoint import ModelConfig
from minisgl.checkpoint.quantization import read_quantization
from minisgl.errors import CheckpointError
from minisgl.layers import WeightSource
from minisgl.models import BaseLLMModel, get_model_class, load_weight, open_checkpoint
from tests.distributed.groups import Alone
from tests.quantized import (
    SCHEMES,
    compressed_config,
    fp8_config,
    group,
    packed_ints,
    quantize_checkpoint,
    to_fp8,
    uniform,
    write_config,
)

CPU = torch.device("cpu")
LAYER = "model.layers.0.self_attn.q_proj"
SHAPE = (64, 64)


class Recorder:
    """A source that keeps what it hands out."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.tensors: dict[tuple[str, range | None, range | None], Tensor] = {}

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
        tensor = self._source.read(name, shape, rows=rows, cols=cols)
        self.tensors[name, rows, cols] = tensor
        return tensor


def source_of(folder: Path, dtype: torch.dtype = torch.float32) -> WeightSource:
    return open_checkpoint(folder, dtype, CPU, ModelConfig.from_folder(folder).quantization)


def make(folder: Path, comm: Alone) -> BaseLLMModel:
    config = ModelConfig.from_folder(folder)
    return get_model_class(config.architecture)(config, comm, 64, torch.float32)


def loaded(folder: Path, dtype: torch.dtype, comm: Alone) -> Recorder:
    recorder = Recorder(source_of(folder, dtype))
    make(folder, comm).load(recorder)
    return recorder


def load(folder: Path, comm: Alone | None = None) -> None:
    config = ModelConfig.from_folder(folder)
    load_weight(make(folder, comm or Alone()), folder, torch.float32, CPU, config.quantization)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_gets_the_weights_that_are_meant(
    scheme: str,
    arch: str,
    dtype: torch.dtype,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    quantized, dequantized = quantize_checkpoint(checkpoint(arch), SCHEMES[scheme], tmp_path)
    for rank, tp in ((0, 1), (0, 2), (1, 2)):
        expected = loaded(dequantized, dtype, Alone(rank, tp)).tensors
        given = loaded(quantized, dtype, Alone(rank, tp)).tensors
        assert given.keys() == expected.keys()
        for key, tensor in given.items():
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()
            assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("size", [(48, 40), (128, 128), (7, 5)])
def test_blocks_may_be_cut_at_the_end_of_a_weight(
    size: tuple[int, int], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    scheme = uniform(
        fp8_config(weight_block_size=list(size)),
        lambda weight: to_fp8(weight, size, "weight_scale_inv"),
    )
    quantized, dequantized = quantize_checkpoint(checkpoint("llama"), scheme, tmp_path)
    expected = source_of(dequantized).read(f"{LAYER}.weight", SHAPE)
    assert torch.equal(source_of(quantized).read(f"{LAYER}.weight", SHAPE), expected)


def test_zero_points_of_few_outputs_are_in_one_word(tmp_path: Path) -> None:
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    scheme = SCHEMES["compressed int4 groups with zero points"]
    stored, meant = scheme.quantize("q_proj")(weight)
    save_file(
        {f"q_proj.{end}": part for end, part in stored.items()}, tmp_path / "model.safetensors"
    )
    quantization = read_quantization({"quantization_config": scheme.config})
    source = open_checkpoint(tmp_path, torch.float32, CPU, quantization)
    assert torch.equal(source.read("q_proj.weight", (3, 64)), meant)


def test_a_large_weight_is_dequantized_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    monkeypatch.setattr("minisgl.models.quantized._NUMBERS_AT_A_TIME", 5 * SHAPE[1])
    quantized, dequantized = quantize_checkpoint(
        checkpoint("llama"), SCHEMES["compressed int4 groups with zero points"], tmp_path
    )
    expected = source_of(dequantized).read(f"{LAYER}.weight", SHAPE)
    assert torch.equal(source_of(quantized).read(f"{LAYER}.weight", SHAPE), expected)


def test_a_part_without_rows_is_empty(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    quantized, _ = quantize_checkpoint(checkpoint("llama"), SCHEMES["fp8 blocks"], tmp_path)
    part = source_of(quantized).read(f"{LAYER}.weight", SHAPE, rows=range(63, 63))
    assert part.shape == (0, 64)


def test_a_shard_that_cuts_a_scale_block_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    scheme = uniform(
        fp8_config(weight_block_size=[16, 32]),
        lambda weight: to_fp8(weight, (16, 32), "weight_scale_inv"),
    )
    quantized, _ = quantize_checkpoint(checkpoint("llama"), scheme, tmp_path)
    load(quantized)
    message = r"layers\.\d\.mlp\.down_proj: 96 inputs over 2 ranks are 48 .* blocks of 16x32"
    with pytest.raises(CheckpointError, match=message):
        load(quantized, Alone(1, 2))


def test_a_shard_that_cuts_a_group_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    scheme = uniform(
        compressed_config("pack-quantized", group("int", 4, "group", group_size=32)),
        lambda weight: packed_ints(weight, (1, 32), 4, symmetric=True),
    )
    quantized, _ = quantize_checkpoint(checkpoint("llama"), scheme, tmp_path)
    with pytest.raises(CheckpointError, match=r"down_proj: .* blocks of 1x32"):
        load(quantized, Alone(0, 2))


@pytest.fixture
def quantized(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint in fp8 blocks, to be damaged."""
    return quantize_checkpoint(checkpoint("llama"), SCHEMES["fp8 blocks"], tmp_path)[0]


def change(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Replace tensors of the one file; None removes."""
    [path] = folder.glob("*.safetensors")
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_a_quantized_weight_without_a_config_is_refused(quantized: Path) -> None:
    write_config(quantized, None)
    with pytest.raises(CheckpointError, match=r"F8_E4M3.*config\.json does not say how"):
        load(quantized)


def test_a_quantized_weight_that_the_config_leaves_out_is_refused(quantized: Path) -> None:
    config = {**SCHEMES["fp8 blocks"].config, "modules_to_not_convert": [LAYER]}
    write_config(quantized, config)
    with pytest.raises(CheckpointError, match=rf"{LAYER}.*config\.json does not say how"):
        load(quantized)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int8, torch.uint8])
def test_a_plain_weight_of_another_dtype_is_refused_with_its_file(
    dtype: torch.dtype, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    _, plain = quantize_checkpoint(checkpoint("llama"), SCHEMES["fp8 blocks"], tmp_path)
    [path] = plain.glob("*.safetensors")
    stored = {torch.float64: "F64", torch.int64: "I64", torch.int8: "I8", torch.uint8: "U8"}[dtype]
    change(plain, {f"{LAYER}.weight": torch.ones(SHAPE).to(dtype)})
    message = f"{path}: '{LAYER}.weight' is no plain weight .*stored as {stored}; .*F32, F16, BF16"
    with pytest.raises(CheckpointError, match=message):
        load(plain)


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_inv", "weight_packed", "qweight"])
def test_what_is_beside_a_plain_weight_is_not_overlooked(
    part: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    _, plain = quantize_checkpoint(checkpoint("llama"), SCHEMES["fp8 blocks"], tmp_path)
    change(plain, {f"{LAYER}.{part}": torch.ones(1)})
    with pytest.raises(CheckpointError, match=f"{LAYER}.*beside it is {part}"):
        load(plain)


def test_a_weight_without_its_scale_is_refused(quantized: Path) -> None:
    change(quantized, {f"{LAYER}.weight_scale_inv": None})
    with pytest.raises(CheckpointError, match=f"{LAYER}' is quantized, but has no weight_scale"):
        load(quantized)


def test_a_missing_weight_is_named(quantized: Path) -> None:
    change(quantized, {f"{LAYER}.weight": None})
    with pytest.raises(CheckpointError, match=f"{LAYER}.weight"):
        load(quantized)


def test_scales_of_another_shape_are_refused(quantized: Path) -> None:
    change(quantized, {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(4, 6)})
    with pytest.raises(CheckpointError, match=r"scale_inv' has the shape \(4, 6\), expected"):
        load(quantized)


def test_scales_for_neither_tensor_nor_outputs_are_refused(quantized: Path) -> None:
    write_config(quantized, fp8_config())
    with pytest.raises(CheckpointError, match=r"shape \(\d, \d\), expected one scale or one for"):
        load(quantized)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int8, torch.bfloat16])
def test_a_weight_of_another_dtype_than_the_format_says_is_refused(
    dtype: torch.dtype, quantized: Path
) -> None:
    name = f"{LAYER}.weight"
    change(quantized, {name: torch.ones(SHAPE).to(dtype)})
    with pytest.raises(CheckpointError, match=f"{name}' is stored as "):
        load(quantized)


def test_scales_that_are_no_floating_point_numbers_are_refused(quantized: Path) -> None:
    name = f"{LAYER}.weight_scale_inv"
    scales = torch.ones(4, 4, dtype=torch.uint8)
    change(quantized, {name: scales})
    with pytest.raises(CheckpointError, match=f"{name}' is stored as U8, expected F32 or"):
        load(quantized)


def test_zero_points_that_the_config_denies_are_refused(quantized: Path) -> None:
    name = f"{LAYER}.weight_zero_point"
    zeros = torch.zeros(4, 4, dtype=torch.int8)
    change(quantized, {name: zeros})
    load(quantized)
    change(quantized, {name: zeros + 1})
    with pytest.raises(CheckpointError, match=f"{name}' is not 0"):
        load(quantized)


def test_a_layer_that_is_stored_plain_is_read_as_it_is(quantized: Path) -> None:
    """Published configs do not always list the layers that were left out."""
    write_config(quantized, fp8_config(weight_block_size=[16, 16]))
    weight = torch.rand(SHAPE)
    change(quantized, {f"{LAYER}.weight": weight, f"{LAYER}.weight_scale_inv": None})
    assert torch.equal(source_of(quantized).read(f"{LAYER}.weight", SHAPE), weight)


def test_what_is_quantized_is_held_in_the_compute_dtype(quantized: Path) -> None:
    model = make(quantized, Alone())
    model.load(source_of(quantized, torch.bfloat16))
    assert model.lm_head.num_bytes == 301 * 64 * 2
