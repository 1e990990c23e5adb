"""Products of some tokens with a large weight: csrc/row_tiles.cu on Hopper, or the stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.kernel import gpu_products
from minisgl.kernel.row_tiles import MOST_TOKENS_OF_ROWS, RowTile, row_tile, sizes_in_rows

# Dimensions: F mlp width, I inputs of a linear layer, O outputs of a linear layer, T tokens of a
# step, U both halves of a gated mlp, X a selection out of another dimension: parts of the inputs.

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def hopper() -> None:
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the GPU is not a Hopper")


def numbers(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=random).bfloat16()


def multiply(
    kernels: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, rows: int, parts: int
) -> Tensor:
    """The parts of the sums. What lies before and behind them is not written."""
    dtype = torch.float32 if parts > 1 else torch.bfloat16
    shape = (parts, len(x_TI), len(weight_OI))
    surrounded = torch.full((parts * len(x_TI) + 2, len(weight_OI)), 7, dtype=dtype, device=DEVICE)
    parts_XTO = surrounded[1:-1].view(shape)
    bias = weight_OI.new_empty(0) if bias_O is None else bias_O
    tensors = (tensor.to(DEVICE) for tensor in (x_TI, weight_OI, bias))
    kernels.row_tiles(*tensors, parts_XTO, rows)
    assert (surrounded[0] == 7).all()
    assert (surrounded[-1] == 7).all()
    return parts_XTO.cpu()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17, 64, 65, 128, 129, 192])
@pytest.mark.parametrize(
    ("outputs", "inputs", "rows", "parts"),
    [
        (8, 8, 8, 1),
        (72, 1096, 40, 1),  # more stages than there is room for
        (136, 456, 64, 3),  # parts of two and three stages
        (200, 328, 120, 2),
        (256, 512, 128, 1),
    ],
)
def test_products_equal_float64(
    cuda_kernels: Any,
    outputs: int,
    inputs: int,
    rows: int,
    parts: int,
    num_tokens: int,
    has_bias: bool,
) -> None:
    """Neither tokens, nor outputs, nor inputs fill the tiles, and the tokens' rows lie apart."""
    random = torch.Generator().manual_seed(num_tokens)
    x_TI = numbers(random, num_tokens, 2 * inputs)[:, :inputs]
    weight_OI = numbers(random, outputs, inputs)
    bias_O = numbers(random, outputs) if has_bias else None

    parts_XTO = multiply(cuda_kernels, x_TI, weight_OI, bias_O, rows, parts)

    expected_TO = x_TI.double() @ weight_OI.double().T
    size_TO = x_TI.double().abs() @ weight_OI.double().abs().T
    if bias_O is not None:
        expected_TO += bias_O.double()
    error_TO = (parts_XTO.double().sum(dim=0) - expected_TO).abs()
    rounding_TO = 2.0**-8 * expected_TO.abs() if parts == 1 else 0
    assert (error_TO <= rounding_TO + (inputs + 1) * 2.0**-23 * (size_TO + 1)).all()


@pytest.mark.parametrize("num_tokens", [1, 60, 100, 150])
@pytest.mark.parametrize("rows", [32, 56, 96, 112, 136])
def test_gate_and_up_with_their_activation_equal_float64(
    cuda_kernels: Any, rows: int, num_tokens: int
) -> None:
    """Rows fill the columns of a product, or a part of them; tokens one to three warpgroups."""
    if rows > {1: 136, 60: 136, 100: 136, 150: 64}[num_tokens]:
        pytest.skip("a tile of so many sums does not fit the registers")
    random = torch.Generator().manual_seed(rows)
    outputs = rows + 40
    inputs = 328
    x_TI = numbers(random, num_tokens, inputs)
    weight_UI = (numbers(random, 2 * outputs, inputs).double() * 3 / inputs**0.5).bfloat16()
    surrounded = torch.full((num_tokens + 2, outputs), 7, dtype=torch.bfloat16, device=DEVICE)

    cuda_kernels.row_tiles_silu(x_TI.to(DEVICE), weight_UI.to(DEVICE), surrounded[1:-1], rows)

    gate_TF, up_TF = (x_TI.double() @ weight_UI.double().T).bfloat16().float().chunk(2, dim=1)
    expected_TF = torch.nn.functional.silu(gate_TF) * up_TF
    # Either may have rounded gate and up to their neighbours. A negative gate's activation changes
    # by more than the gate, but is small.
    y_TF = surrounded[1:-1].float().cpu()
    torch.testing.assert_close(y_TF, expected_TF, atol=2**-6, rtol=2**-6)
    assert (surrounded[0] == 7).all()
    assert (surrounded[-1] == 7).all()


@pytest.mark.parametrize("seed", range(1, 9))
def test_any_order_of_blocks_and_threads(cuda_kernels: Any, seed: int) -> None:
    """Stages are filled again while other warps still read those before."""
    if DEVICE.type == "cuda":
        pytest.skip("a GPU chooses itself")
    random = torch.Generator().manual_seed(0)
    x_TI = numbers(random, 100, 1160)
    weight_OI = numbers(random, 264, 1160)
    expected_XTO = multiply(cuda_kernels, x_TI, weight_OI, None, 128, 2)
    try:
        cuda_kernels.set_blocks(seed, 1)
        parts_XTO = multiply(cuda_kernels, x_TI, weight_OI, None, 128, 2)
    finally:
        cuda_kernels.set_blocks(0, 1)
    assert torch.equal(parts_XTO, expected_XTO)


def test_a_block_ends_after_others_have_what_it_copied_to_them(cuda_kernels: Any) -> None:
    if DEVICE.type == "cuda":
        pytest.skip("the stand-in knows which blocks run")
    random = torch.Generator().manual_seed(0)
    x_TI = numbers(random, 20, 64)
    weight_OI = numbers(random, 128, 64)
    expected_1TO = multiply(cuda_kernels, x_TI, weight_OI, None, 64, 1)
    try:
        for seed in range(1, 65):
            cuda_kernels.set_blocks(seed, 1)
            assert torch.equal(multiply(cuda_kernels, x_TI, weight_OI, None, 64, 1), expected_1TO)
    finally:
        cuda_kernels.set_blocks(0, 1)


def test_tokens_may_arrive_late(cuda_kernels: Any) -> None:
    """The weight is copied before the kernel before this one has ended, and the tokens are not."""
    if DEVICE.type == "cuda":
        pytest.skip("the stand-in knows when inputs arrive")
    x_TI = torch.full((3, 64), float("nan"), dtype=torch.bfloat16)
    cuda_kernels.arrives_late(x_TI, torch.ones_like(x_TI))
    y_1TO = multiply(cuda_kernels, x_TI, torch.ones(16, 64, dtype=torch.bfloat16), None, 16, 1)
    cuda_kernels.forget_late()
    assert (y_1TO == 64).all()


@pytest.mark.parametrize(("num_tokens", "rows"), [(1, 144), (65, 144), (129, 80), (193, 8)])
def test_too_many_rows_are_refused(cuda_kernels: Any, num_tokens: int, rows: int) -> None:
    x_TI = torch.ones(num_tokens, 8, dtype=torch.bfloat16, device=DEVICE)
    y_TF = torch.ones_like(x_TI)
    refusal = f"a tile of {2 * rows} rows and {num_tokens} tokens is too large"
    with pytest.raises(ValueError, match=refusal):
        cuda_kernels.row_tiles_silu(x_TI, x_TI[:1].expand(16, 8), y_TF, rows)
    with pytest.raises(ValueError, match=f"a tile of 136 rows and {num_tokens} tokens"):
        cuda_kernels.row_tiles(x_TI, x_TI[:1].expand(8, 8), x_TI[:0], y_TF.unsqueeze(0), 136)


@pytest.mark.parametrize(("outputs", "rows"), [(16, 12), (12, 16)])
def test_rows_and_outputs_of_no_whole_pieces_are_refused(
    cuda_kernels: Any, outputs: int, rows: int
) -> None:
    ones = torch.ones(16, 8, dtype=torch.bfloat16)
    refusal = f"{rows} rows and {outputs} outputs, but both have to be multiples of 8"
    with pytest.raises(ValueError, match=refusal):
        multiply(cuda_kernels, ones, ones[:outputs], None, rows, 1)


def test_more_parts_than_stages_are_refused(cuda_kernels: Any) -> None:
    ones = torch.ones(8, 72, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="3 parts, but there are 2 times 64 inputs"):
        multiply(cuda_kernels, ones, ones, None, 8, 3)


@pytest.mark.parametrize(
    ("num_tokens", "outputs", "inputs", "halves", "may_divide", "expected"),
    [
        (64, 7168, 5120, 1, False, RowTile(64, 1)),  # queries, keys and values of Qwen3-14B
        (2, 7168, 5120, 1, False, RowTile(64, 1)),
        (1, 7168, 5120, 1, False, None),
        (65, 7168, 5120, 1, False, None),
        (64, 16384, 5120, 1, False, RowTile(128, 1)),
        (64, 17408, 5120, 1, False, None),  # more rows than a tile may have
        (64, 5120, 5120, 1, True, RowTile(64, 1)),  # its output
        (64, 5120, 17408, 1, True, RowTile(40, 1)),  # its down
        (64, 5120, 17408, 1, False, RowTile(40, 1)),
        (65, 5120, 17408, 1, True, RowTile(128, 3)),
        (128, 5120, 17408, 1, True, RowTile(128, 3)),
        (128, 5120, 17408, 1, False, None),
        (129, 5120, 17408, 1, True, None),
        (64, 17408, 5120, 2, False, RowTile(136, 1)),  # its gate and up
        (128, 17408, 5120, 2, False, RowTile(136, 1)),
        (129, 17408, 5120, 2, False, None),
        (160, 17408, 5120, 2, False, None),
        (161, 17408, 5120, 2, False, RowTile(72, 1)),  # two tiles for each multiprocessor
        (192, 17408, 5120, 2, False, RowTile(72, 1)),
        (193, 17408, 5120, 2, False, None),
        (128, 14336, 4096, 2, False, RowTile(112, 1)),  # of Llama-3.1-8B
        (192, 14336, 4096, 2, False, RowTile(56, 1)),
        (64, 4096, 14336, 1, True, RowTile(128, 4)),
        (64, 4096, 14336, 1, False, None),
        (128, 4096, 14336, 1, True, RowTile(64, 2)),
        (64, 4096, 4096, 1, True, RowTile(64, 1)),
        (64, 2560, 4096, 1, True, RowTile(64, 1)),  # of Qwen3-4B
        (33, 2560, 4096, 1, True, RowTile(64, 1)),
        (32, 2560, 4096, 1, True, RowTile(128, 4)),  # 40 tiles of 64 rows are few
        (32, 2560, 4096, 1, False, RowTile(64, 1)),
        (32, 2944, 4096, 1, True, RowTile(64, 1)),  # 46 tiles
        (64, 2048, 6144, 1, True, None),  # 32 tiles
        (17, 2048, 6144, 1, True, None),
        (16, 2048, 6144, 1, True, RowTile(128, 4)),  # of Qwen3-1.7B
        (16, 2048, 6144, 1, False, None),
        (64, 2560, 9728, 1, True, RowTile(128, 6)),
        (64, 512, 32768, 1, True, RowTile(128, 6)),  # as many parts as there may be
        (64, 4096, 16_384, 1, True, RowTile(128, 4)),
        (64, 4200, 16_384, 1, True, RowTile(128, 3)),  # 33 tiles, so 34 blocks for each part
        (192, 6400, 5120, 2, False, RowTile(56, 1)),  # of a quarter of Qwen3-32B
        (150, 6400, 5120, 2, False, None),
        (128, 25600, 5120, 2, False, None),  # of Qwen3-32B: 200 rows
        (192, 25600, 5120, 2, False, None),
        (64, 4096, 5120, 2, False, None),  # tiles of 32 rows
        (64, 4096, 1024, 1, False, None),  # a small weight
        (64, 151_936, 1024, 1, False, None),
        (64, 7168 + 4, 5120, 1, False, None),
        (64, 7168, 5120 + 4, 1, False, None),
    ],
    ids=str,
)
def test_which_tile_a_product_takes(
    num_tokens: int,
    outputs: int,
    inputs: int,
    halves: int,
    may_divide: bool,
    expected: RowTile | None,
) -> None:
    tile = row_tile(
        num_tokens,
        outputs,
        inputs,
        halves=halves,
        may_divide=may_divide,
        num_processors=132,
    )
    assert tile == expected


@pytest.mark.parametrize(
    ("num_tokens", "halves", "turns"), [(2, 1, 1), (64, 1, 1), (2, 2, 1), (128, 2, 1), (192, 2, 2)]
)
def test_tiles_fill_the_device_and_the_kernel_takes_them(
    cuda_kernels: Any, num_tokens: int, halves: int, turns: int
) -> None:
    """The rule and the kernel agree on how many rows a tile may have."""
    largest = 0
    for outputs in range(64, 20_000, 1000 // 8 * 8):
        for inputs in (5120, 20_480):
            tile = row_tile(
                num_tokens, outputs, inputs, halves=halves, may_divide=True, num_processors=132
            )
            if tile is not None:
                num_blocks = -(-outputs // (2 * tile.rows)) * 2 * tile.parts
                assert 6 <= num_blocks <= turns * 132
                largest = max(largest, tile.rows)
    assert largest > 0
    x_TI = torch.ones(num_tokens, 8, dtype=torch.bfloat16, device=DEVICE)
    weight_UI = torch.ones(halves * largest, 8, dtype=torch.bfloat16, device=DEVICE)
    tile = RowTile(largest, 1)
    if halves == 2:
        y_TF = gpu_products.row_tiles_silu(cuda_kernels, x_TI, weight_UI, tile)
        assert (y_TF == 64).all()
    else:
        y_1TO = gpu_products.row_tiles(cuda_kernels, x_TI, weight_UI, None, tile)
        assert (y_1TO == 8).all()


@pytest.mark.parametrize("may_divide", [False, True])
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(17408, 5120), (5120, 17408), (7168, 5120), (2560, 4096), (2048, 6144)]
)
def test_some_sizes_meet_each_choice(
    outputs: int, inputs: int, halves: int, may_divide: bool
) -> None:
    def tile(num_tokens: int) -> RowTile | None:
        return row_tile(
            num_tokens, outputs, inputs, halves=halves, may_divide=may_divide, num_processors=132
        )

    ends = sizes_in_rows()
    for num_tokens in range(2, MOST_TOKENS_OF_ROWS + 1):
        assert tile(num_tokens) == tile(next(end for end in ends if num_tokens <= end))


class Kernels(SimpleNamespace):
    """Stands in for the kernels of a Hopper GPU: each product is all 7."""

    def __init__(self) -> None:
        super().__init__(is_hopper=lambda x: True, num_processors=lambda x: 132)

    def row_tiles(self, x_TI: Any, weight_OI: Any, bias_O: Any, parts_XTO: Any, rows: int) -> None:
        parts_XTO.fill_(7)

    def row_tiles_silu(self, x_TI: Any, weight_UI: Any, y_TF: Any, rows: int) -> None:
        y_TF.fill_(7)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    kernels = Kernels()
    monkeypatch.setattr(gpu_products, "triton_kernels_for", lambda x: kernels)
    monkeypatch.setattr(gpu_products, "cuda_kernels_for", lambda x: kernels)
    return kernels


@pytest.mark.usefixtures("device")
def test_the_products_of_a_large_weight() -> None:
    x_TI = torch.zeros(20, 5120, dtype=torch.bfloat16)
    weight_OI = torch.zeros(12_288, 5120, dtype=torch.bfloat16)
    y_TO = gpu_products.gpu_linear(x_TI, weight_OI, None)
    assert y_TO.shape == (20, 12_288)
    assert (y_TO == 7).all()
    assert gpu_products.gpu_linear_in_parts(x_TI, weight_OI, None) is None  # there is one part
    parts_XTO = gpu_products.gpu_linear_in_parts(
        torch.zeros(20, 16_384, dtype=torch.bfloat16),
        torch.zeros(1024, 16_384, dtype=torch.bfloat16),
        None,
    )
    assert parts_XTO is not None
    assert parts_XTO.shape == (6, 20, 1024)
    assert parts_XTO.dtype == torch.float32
    y_TF = gpu_products.gpu_linear_silu(x_TI, weight_OI)
    assert y_TF.shape == (20, 6144)
    assert (y_TF == 7).all()


def test_which_weights_and_devices_have_tiles_of_rows(
    monkeypatch: pytest.MonkeyPatch, device: Kernels
) -> None:
    def has_tile(x: Tensor) -> bool:
        shape = (20, 5120, 5120)
        return gpu_products.gpu_row_tile(x, shape, halves=1, may_divide=False) is not None

    like = torch.empty(0, dtype=torch.bfloat16)
    assert has_tile(like)
    assert not has_tile(like.half())
    x_TI = torch.zeros(20, 5120, dtype=torch.bfloat16)
    wide_TI = torch.zeros(20, 10_240, dtype=torch.bfloat16)[:, ::2]
    weight_OI = torch.zeros(5120, 5120, dtype=torch.bfloat16)
    assert gpu_products._row_tile(x_TI, weight_OI) is not None
    assert gpu_products._row_tile(wide_TI, weight_OI) is None
    assert gpu_products._row_tile(x_TI, weight_OI.T) is None
    monkeypatch.setattr(gpu_products, "cuda_kernels_for", lambda x: None)
    assert gpu_products._row_tile(x_TI, weight_OI) is None  # there is no compiler
    device.is_hopper = lambda x: False
    assert not has_tile(like)
