"""Products of some tokens in small tiles: on a GPU, or else in Triton's interpreter."""

# Dimensions: D model width, F mlp width, I inputs of a linear layer, O outputs of a linear layer,
# T tokens of a step, U both halves of a gated mlp, X a selection out of another dimension.

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch

from minisgl.kernel import gpu_products
from minisgl.kernel.linear_tiles import (
    MOST_TILED_TOKENS,
    LinearTile,
    linear_tile,
    tiled_sizes,
)

pytest.importorskip("triton", reason="the kernels of a GPU need Triton")
from minisgl.kernel import gpu
from tests.kernel.harness import DEVICE, DTYPES, numbers

pytestmark = pytest.mark.gpu
# A tile is made for numbers of two bytes. The interpreter multiplies neither kind.
PRODUCT_DTYPES = [torch.bfloat16, torch.float16] if DEVICE.type == "cuda" else [torch.float32]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@pytest.mark.parametrize("dtype", PRODUCT_DTYPES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "outputs", "inputs", "tile"),
    [
        (1, 1, 128, LinearTile(16, 32, 1, 128, 4)),
        (16, 64, 256, LinearTile(16, 32, 2, 64, 2)),
        (17, 72, 768, LinearTile(64, 32, 3, 128, 4)),
        (65, 33, 384, LinearTile(64, 64, 1, 64, 4)),
        (130, 130, 512, LinearTile(64, 128, 4, 128, 4)),
        (130, 70, 384, LinearTile(128, 64, 2, 64, 8)),
    ],
    ids=str,
)
def test_products_equal_float64(
    random: torch.Generator,
    num_tokens: int,
    outputs: int,
    inputs: int,
    tile: LinearTile,
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    """Neither tokens nor outputs fill the tiles, and the tokens' rows lie apart."""
    x_TI = numbers(random, num_tokens, 2 * inputs, dtype=dtype)[:, :inputs]
    weight_OI = numbers(random, outputs, inputs, dtype=dtype)
    bias_O = numbers(random, outputs, dtype=dtype) if has_bias else None

    parts_XTO = gpu.tiled_linear(x_TI, weight_OI, bias_O, tile)

    assert parts_XTO.shape == (tile.parts, num_tokens, outputs)
    assert parts_XTO.dtype == (torch.float32 if tile.parts > 1 else dtype)
    expected_TO = x_TI.double() @ weight_OI.double().T
    size_TO = x_TI.double().abs() @ weight_OI.double().abs().T
    if bias_O is not None:
        expected_TO += bias_O.double()
        size_TO += bias_O.double().abs()
    error_TO = (parts_XTO.double().sum(dim=0) - expected_TO).abs()
    assert (error_TO <= TOLERANCE[parts_XTO.dtype] * size_TO).all()


@pytest.mark.parametrize("dtype", PRODUCT_DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "outputs", "inputs", "tile"),
    [
        (1, 1, 128, LinearTile(16, 32, 1, 128, 4)),
        (33, 72, 256, LinearTile(64, 64, 1, 64, 4)),
        (70, 33, 384, LinearTile(64, 32, 1, 128, 3)),
    ],
    ids=str,
)
def test_products_and_their_activation_equal_two_kernels(
    random: torch.Generator,
    num_tokens: int,
    outputs: int,
    inputs: int,
    tile: LinearTile,
    dtype: torch.dtype,
) -> None:
    x_TI = numbers(random, num_tokens, inputs, dtype=dtype)
    weight_UI = numbers(random, 2 * outputs, inputs, dtype=dtype) / inputs**0.5

    y_TF = gpu.tiled_silu(x_TI, weight_UI, tile)

    assert y_TF.dtype == dtype
    (y_TU,) = gpu.tiled_linear(x_TI, weight_UI, None, tile)
    gate_TF, up_TF = y_TU.float().chunk(2, dim=1)
    expected_TF = torch.nn.functional.silu(gate_TF) * up_TF
    torch.testing.assert_close(y_TF.float(), expected_TF, atol=1e-6, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", PRODUCT_DTYPES)
def test_a_part_does_not_read_the_inputs_of_another(
    random: torch.Generator, dtype: torch.dtype
) -> None:
    x_TI = numbers(random, 3, 512, dtype=dtype)
    weight_OI = numbers(random, 8, 512, dtype=dtype)
    parts_XTO = gpu.tiled_linear(x_TI, weight_OI, None, LinearTile(16, 32, 4, 128, 4))
    for part, parts_TO in enumerate(parts_XTO):
        inputs = slice(part * 128, (part + 1) * 128)
        own_TO = x_TI[:, inputs].double() @ weight_OI[:, inputs].double().T
        torch.testing.assert_close(parts_TO.double(), own_TO, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_parts", "num_tokens", "width"), [(2, 0, 64), (2, 3, 576), (4, 5, 1)])
def test_a_norm_adds_up_the_parts(
    random: torch.Generator, num_parts: int, num_tokens: int, width: int, dtype: torch.dtype
) -> None:
    parts_XTD = numbers(random, num_parts, num_tokens, width, dtype=torch.float32)
    residual_TD = numbers(random, num_tokens, width, dtype=dtype)
    weight_D = numbers(random, width, dtype=dtype)
    total_TD = parts_XTD.double().sum(dim=0) + residual_TD.double()
    y_TD = torch.empty_like(residual_TD)

    gpu.add_parts_rms_norm(parts_XTD, residual_TD, weight_D, 1e-5, y_TD)

    rtol = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(residual_TD.double(), total_TD, atol=1e-6, rtol=rtol)
    squares_T1 = residual_TD.double().square().mean(dim=1, keepdim=True)
    normed_TD = residual_TD.double() / torch.sqrt(squares_T1 + 1e-5) * weight_D.double()
    torch.testing.assert_close(y_TD.double(), normed_TD, atol=1e-6, rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_without_a_residual_adds_up_the_parts(
    random: torch.Generator, dtype: torch.dtype
) -> None:
    parts_XTD = numbers(random, 4, 3, 576, dtype=torch.float32)
    weight_D = numbers(random, 576, dtype=dtype)
    y_TD = torch.empty(3, 576, dtype=dtype, device=DEVICE)
    gpu.parts_rms_norm(parts_XTD, weight_D, 1e-5, y_TD)
    total_TD = parts_XTD.double().sum(dim=0)
    squares_T1 = total_TD.square().mean(dim=1, keepdim=True)
    normed_TD = total_TD / torch.sqrt(squares_T1 + 1e-5) * weight_D.double()
    rtol = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(y_TD.double(), normed_TD, atol=1e-6, rtol=rtol)


HOPPER = {"num_processors": 132, "shared_bytes": 232_448}  # as an H200 says


@pytest.mark.parametrize(
    ("num_tokens", "outputs", "inputs", "halves", "may_divide", "expected"),
    [
        (64, 1024, 2048, 1, True, LinearTile(64, 32, 4, 128, 4)),  # output of Qwen3-0.6B
        (65, 1024, 2048, 1, True, LinearTile(64, 64, 4, 128, 4)),
        (256, 1024, 3072, 1, True, LinearTile(64, 64, 2, 128, 5)),
        (20, 1024, 2048, 1, False, None),  # 32 programs would leave most of the device idle
        (64, 4096, 1024, 1, False, LinearTile(64, 32, 1, 128, 4)),
        (256, 4096, 1024, 1, False, None),
        (65, 4096, 14336, 1, True, LinearTile(128, 64, 2, 64, 8)),  # down of Llama-3.1-8B
        (129, 4096, 14336, 1, True, None),
        (128, 2560, 4096, 1, True, None),  # 80 programs would leave a part of the device idle
        (17, 3072, 1024, 2, False, LinearTile(64, 32, 1, 128, 4)),
        (16, 3072, 1024, 2, False, LinearTile(16, 32, 1, 128, 4)),
        (64, 9728, 2560, 2, False, LinearTile(64, 64, 1, 64, 4)),  # two programs each
        (64, 5120, 17408, 1, True, LinearTile(64, 128, 2, 128, 4)),  # down of Qwen3-14B
        (64, 17408, 5120, 2, False, None),
        (128, 5120, 5120, 1, True, None),
        (64, 4096, 1024 + 32, 1, False, None),
        (0, 1024, 2048, 1, True, None),
    ],
    ids=str,
)
def test_which_tile_a_product_takes(
    num_tokens: int,
    outputs: int,
    inputs: int,
    halves: int,
    may_divide: bool,
    expected: LinearTile | None,
) -> None:
    tile = linear_tile(num_tokens, outputs, inputs, halves=halves, may_divide=may_divide, **HOPPER)
    assert tile == expected


def test_a_long_tile_needs_room_for_all_its_stages() -> None:
    for shared_bytes, has_room in ((204_799, False), (204_800, True)):
        tile = linear_tile(
            128,
            4096,
            4096,
            halves=1,
            may_divide=True,
            num_processors=132,
            shared_bytes=shared_bytes,
        )
        assert (tile is not None and tile.tokens == 128) == has_room


@pytest.mark.parametrize("shared_bytes", [0, 101_376, 166_912, 232_448])
@pytest.mark.parametrize("halves", [1, 2])
def test_tiles_fit_the_device_and_all_run_at_once(halves: int, shared_bytes: int) -> None:
    num_tiles = 0
    for num_tokens, inputs, outputs in itertools.product(
        range(1, 257, 5), (128, 192, 1024, 3072, 9728), (64, 1024, 2560, 5120, 19456)
    ):
        tile = linear_tile(
            num_tokens,
            outputs,
            inputs,
            halves=halves,
            may_divide=halves == 1,
            num_processors=108,
            shared_bytes=shared_bytes,
        )
        if tile is None:
            continue
        num_tiles += 1
        assert inputs % (tile.parts * tile.inputs) == 0
        programs = -(-outputs // tile.outputs) * -(-num_tokens // tile.tokens) * tile.parts
        assert 54 <= programs <= (216 if tile.parts == 1 else 108)
        stage_bytes = (tile.tokens + halves * tile.outputs) * tile.inputs * 2
        assert tile.stages * stage_bytes <= shared_bytes // -(-programs // 108)
    assert (num_tiles > 100) == (shared_bytes > 0)


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("outputs", [1024, 3072, 4096, 6144])
@pytest.mark.parametrize("inputs", [1024, 2048, 9728])
def test_the_sizes_have_all_tiles_of_a_weight(inputs: int, outputs: int, halves: int) -> None:
    def tiles(sizes: Iterable[int]) -> set[LinearTile | None]:
        return {
            linear_tile(size, outputs, inputs, halves=halves, may_divide=halves == 1, **HOPPER)
            for size in sizes
        }

    assert tiles(tiled_sizes()) == tiles(range(1, MOST_TILED_TOKENS + 1))


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "is_tiled"),
    [
        (0, torch.bfloat16, False),
        (1, torch.bfloat16, True),
        (256, torch.float16, True),
        (257, torch.bfloat16, False),
        (64, torch.float32, False),
    ],
)
def test_which_sizes_and_dtypes_are_tiled(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, dtype: torch.dtype, is_tiled: bool
) -> None:
    device = SimpleNamespace(
        num_processors=lambda x: HOPPER["num_processors"],
        shared_bytes=lambda x: HOPPER["shared_bytes"],
    )
    monkeypatch.setattr(gpu_products, "triton_kernels_for", lambda x: device)
    tile = gpu_products.gpu_linear_tile(
        torch.empty(0, dtype=dtype), (num_tokens, 1024, 2048), halves=1, may_divide=True
    )
    assert (tile is not None) == is_tiled
