"""Products against float64: CpuLinear, whichever kernel it chooses, and a GPU's of few tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.kernel import (
    CpuLinear,
    dispatch,
    gpu_products,
    load_cpu_kernels,
    sizes_without_padding,
)
from minisgl.kernel.gpu_products import few_token_linear, many_token_silu, small_weight_silu

# Dimensions: F mlp width, I inputs of a linear layer, O outputs of a linear layer, T tokens of a
# step, U both halves of a gated mlp.

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INPUTS = 96
OUTPUTS = 40
# Relative to the sum of absolute products.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


@pytest.fixture
def mkldnn_enabled() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    yield
    torch._C._set_mkldnn_enabled(before)


@pytest.fixture(params=["small", "large"])
def weight_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of small weights, or of the others, for weights of any size."""
    most = 0 if request.param == "large" else 1 << 62
    for limit in ("_SMALL_SIDE", "_SMALL_WEIGHT"):
        monkeypatch.setattr(gpu_products, limit, most)


@pytest.fixture
def no_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "load_cpu_kernels", lambda: None)


def products(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> tuple[Tensor, Tensor]:
    """In float64: the results, and for each the sum of its absolute products and bias."""
    bias = bias_O.double() if bias_O is not None else torch.zeros(len(weight_OI)).double()
    expected_TO = x_TI.double() @ weight_OI.double().T + bias
    size_TO = x_TI.double().abs() @ weight_OI.double().abs().T + bias.abs()
    return expected_TO, size_TO


def assert_rounded_once(
    y_TO: Tensor, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None
) -> None:
    """The sums are in float32, and bfloat16 is what they were rounded to."""
    expected_TO, size_TO = products(x_TI, weight_OI, bias_O)
    rounding_TO = 2.0**-8 * expected_TO.abs()
    summing_TO = (x_TI.shape[1] + 1) * 2.0**-23 * size_TO
    assert ((y_TO.double() - expected_TO).abs() <= rounding_TO + summing_TO).all()


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 31, 128, 129, 200])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_cpu_linear_equals_float64(
    dtype: torch.dtype, pack: bool, bias: bool, num_tokens: int
) -> None:
    random = torch.Generator().manual_seed(num_tokens)
    weight_OI = torch.randn(OUTPUTS, INPUTS, generator=random).to(dtype)
    bias_O = torch.randn(OUTPUTS, generator=random).to(dtype) if bias else None
    x_TI = torch.randn(num_tokens, INPUTS, generator=random).to(dtype)

    y_TO = CpuLinear(weight_OI, pack=pack)(x_TI, bias_O)

    expected_TO, size_TO = products(x_TI, weight_OI, bias_O)
    assert y_TO.dtype == dtype
    assert y_TO.shape == expected_TO.shape
    assert ((y_TO.double() - expected_TO).abs() <= TOLERANCE[dtype] * size_TO).all()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 8, 9, 12, 13, 60, 128])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [0, 1, 7, 40, 48, 64, 1001])
@pytest.mark.parametrize("inputs", [0, 1, 31, 32, 33, 100, 576])
def test_up_to_128_tokens_are_summed_in_float32_and_rounded_once(
    inputs: int, outputs: int, bias: bool, num_tokens: int
) -> None:
    random = torch.Generator().manual_seed(inputs)
    weight_OI = torch.randn(outputs, inputs, generator=random).bfloat16()
    bias_O = torch.randn(outputs, generator=random).bfloat16() if bias else None
    x_TI = torch.randn(num_tokens, inputs, generator=random).bfloat16()

    y_TO = CpuLinear(weight_OI, pack=False)(x_TI, bias_O)

    assert y_TO.shape == (num_tokens, outputs)
    assert_rounded_once(y_TO, x_TI, weight_OI, bias_O)


@pytest.fixture
def matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN multiplies nothing with the weights that a processor's matrix unit takes."""
    kernels = load_cpu_kernels()
    if kernels is None or not kernels.matrix_unit_takes(torch.empty(16, 32).bfloat16()):
        pytest.skip("there is no matrix unit")
    monkeypatch.delattr(CpuLinear, "_by_onednn")


# The last ones are multiplied in chunks, as their tokens do not fit a cache.
@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [16, 48, 64])
@pytest.mark.parametrize(
    ("num_tokens", "inputs"),
    [(5, 32), (129, 576), (160, 576), (301, 64), (129, 4096), (300, 4096), (1030, 1024)],
)
def test_a_matrix_unit_multiplies_any_number_of_tokens(
    num_tokens: int, inputs: int, outputs: int, bias: bool
) -> None:
    random = torch.Generator().manual_seed(inputs)
    weight_OI = torch.randn(outputs, inputs, generator=random).bfloat16()
    bias_O = torch.randn(outputs, generator=random).bfloat16() if bias else None
    x_TI = torch.randn(num_tokens, inputs, generator=random).bfloat16()
    linear = CpuLinear(weight_OI, pack=True)

    y_TO = linear(x_TI, bias_O)

    assert_rounded_once(y_TO, x_TI, weight_OI, bias_O)
    assert torch.equal(linear(x_TI[-5:], bias_O), y_TO[-5:])


@pytest.mark.parametrize(
    "counts", [range(1, 5), range(5, 9), range(9, 13), range(13, 129)], ids=str
)
@pytest.mark.parametrize("outputs", [40, 48])
@pytest.mark.parametrize("inputs", [100, 576])
def test_a_token_gets_the_same_result_beside_others(
    inputs: int, outputs: int, counts: range
) -> None:
    """So a captured step, which is padded, computes what the step alone would."""
    random = torch.Generator().manual_seed(0)
    linear = CpuLinear(torch.randn(outputs, inputs, generator=random).bfloat16(), pack=True)
    x_TI = torch.randn(counts[-1], inputs, generator=random).bfloat16()
    expected_TO = linear(x_TI, None)
    for num_tokens in counts:
        first = counts[-1] - num_tokens
        assert torch.equal(linear(x_TI[:num_tokens], None), expected_TO[:num_tokens])
        assert torch.equal(linear(x_TI[first:], None), expected_TO[first:])


@pytest.mark.parametrize("num_threads", [2, 3, 16])
@pytest.mark.parametrize("num_tokens", [5, 20, 100])
@pytest.mark.parametrize("outputs", [33, 200, 208, 3000, 3008])
def test_any_number_of_threads_computes_all_outputs(
    outputs: int, num_tokens: int, num_threads: int
) -> None:
    """Some have no tile or chunk of their own, or no processor, so they take those of others."""
    kernels = load_cpu_kernels()
    if kernels is None:
        pytest.skip("there is no compiler")
    weight_OI = torch.randn(outputs, 128).bfloat16()
    x_TI = torch.randn(num_tokens, 128).bfloat16()
    expected_TO = torch.empty(num_tokens, outputs).bfloat16()
    no_bias = torch.empty(0).bfloat16()
    torch.set_num_threads(1)
    kernels.linear(x_TI, weight_OI, no_bias, expected_TO)

    torch.set_num_threads(num_threads)
    for _ in range(50):
        y_TO = torch.full_like(expected_TO, torch.nan)
        kernels.linear(x_TI, weight_OI, no_bias, y_TO)
        assert torch.equal(y_TO, expected_TO)


def test_onednn_sees_few_numbers_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps code for each: a scheduler grew by 336 MiB."""
    seen: set[int] = set()
    by_onednn = CpuLinear._by_onednn

    def watched(self: CpuLinear, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        seen.add(len(x_TI))
        return by_onednn(self, x_TI, bias_O)

    monkeypatch.setattr(CpuLinear, "_by_onednn", watched)
    linear = CpuLinear(torch.ones(OUTPUTS, INPUTS, dtype=torch.bfloat16), pack=True)
    for num_tokens in range(1, 769):
        y_TO = linear(torch.ones(num_tokens, INPUTS, dtype=torch.bfloat16), None)
        assert y_TO.shape == (num_tokens, OUTPUTS)
        assert (y_TO == INPUTS).all()
    assert len(seen) == 20


@pytest.mark.parametrize("num_tokens", [1, 4, 9, 20])
@pytest.mark.parametrize(("outputs", "inputs"), [(3, 33), (16, 64)])
def test_infinities_and_nans_reach_their_outputs_only(
    outputs: int, inputs: int, num_tokens: int
) -> None:
    weight_OI = torch.ones(outputs, inputs, dtype=torch.bfloat16)
    weight_OI[0, -1] = torch.inf
    weight_OI[2, 0] = torch.nan
    x_TI = torch.ones(num_tokens, inputs, dtype=torch.bfloat16)
    for y_O in CpuLinear(weight_OI, pack=False)(x_TI, None):
        assert str(y_O[:3].tolist()) == f"[inf, {inputs:.1f}, nan]"
        assert (y_O[3:] == inputs).all()


@pytest.mark.parametrize("num_tokens", [4, 9, 20])
@pytest.mark.parametrize(("outputs", "inputs"), [(3, 33), (16, 64)])
def test_infinities_of_a_token_reach_its_outputs_only(
    outputs: int, inputs: int, num_tokens: int
) -> None:
    x_TI = torch.ones(num_tokens, inputs, dtype=torch.bfloat16)
    x_TI[1, 0] = torch.inf
    y_TO = CpuLinear(torch.ones(outputs, inputs).bfloat16(), pack=False)(x_TI, None)
    expected_T = torch.full((num_tokens, 1), float(inputs))
    expected_T[1] = torch.inf
    assert (y_TO == expected_T).all()


@pytest.mark.parametrize("num_tokens", [1, 3, 8, 9, 130])
@pytest.mark.parametrize("outputs", [40, 48])
def test_a_view_with_strides_is_multiplied_like_a_copy(outputs: int, num_tokens: int) -> None:
    random = torch.Generator().manual_seed(0)
    linear = CpuLinear(torch.randn(outputs, INPUTS, generator=random).bfloat16(), pack=True)
    wide_TI = torch.randn(num_tokens, 2 * INPUTS, generator=random).bfloat16()
    for x_TI in (wide_TI[:, ::2], wide_TI[:, INPUTS:]):
        assert torch.equal(linear(x_TI, None), linear(x_TI.contiguous(), None))


@pytest.mark.usefixtures("no_compiled_kernels")
@pytest.mark.parametrize("num_tokens", [1, 2, 4])
def test_without_compiled_kernels_torch_multiplies(num_tokens: int) -> None:
    random = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(OUTPUTS, INPUTS, generator=random).bfloat16()
    x_TI = torch.randn(num_tokens, INPUTS, generator=random).bfloat16()
    y_TO = CpuLinear(weight_OI, pack=True)(x_TI, None)
    expected_TO, size_TO = products(x_TI, weight_OI, None)
    assert ((y_TO.double() - expected_TO).abs() <= TOLERANCE[torch.bfloat16] * size_TO).all()


@pytest.mark.usefixtures("mkldnn_enabled", "no_compiled_kernels")
@pytest.mark.parametrize("enabled", [True, False])
def test_one_token_leaves_torchs_settings_as_they_were(enabled: bool) -> None:
    torch._C._set_mkldnn_enabled(enabled)
    linear = CpuLinear(torch.ones(OUTPUTS, INPUTS, dtype=torch.bfloat16), pack=False)
    linear(torch.ones(1, INPUTS, dtype=torch.bfloat16), None)
    assert torch._C._get_mkldnn_enabled() == enabled


def test_tokens_of_another_dtype_are_refused() -> None:
    linear = CpuLinear(torch.ones(OUTPUTS, INPUTS, dtype=torch.bfloat16), pack=False)
    with pytest.raises(AssertionError):
        linear(torch.ones(1, INPUTS), None)


@pytest.mark.usefixtures("weight_kernels")
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 8, 9, 15, 16])
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(8, 1), (256, 40), (264, 2056), (1096, 17), (2056, 33), (2312, 2056), (3336, 5), (4608, 290)],
)
@pytest.mark.parametrize("bias", [False, True])
def test_few_tokens_on_a_gpu_equal_float64(
    cuda_kernels: Any, bias: bool, inputs: int, outputs: int, num_tokens: int
) -> None:
    """Neither inputs nor outputs fill the blocks of the kernel."""
    random = torch.Generator().manual_seed(num_tokens)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).bfloat16()

    x_TI = numbers(num_tokens, inputs)
    weight_OI = numbers(outputs, inputs)
    bias_O = numbers(outputs) if bias else None
    on_device = (None if x is None else x.to(DEVICE) for x in (x_TI, weight_OI, bias_O))

    y_TO = few_token_linear(cuda_kernels, *on_device).cpu()

    expected_TO, size_TO = products(x_TI, weight_OI, bias_O)
    assert y_TO.shape == expected_TO.shape
    assert ((y_TO.double() - expected_TO).abs() <= TOLERANCE[torch.bfloat16] * size_TO).all()


@pytest.mark.parametrize("num_tokens", [0, 1, 8, 9, 16])
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 1), (256, 40), (1096, 17), (9000, 270)])
def test_few_tokens_and_their_activation_equal_two_kernels(
    cuda_kernels: Any, monkeypatch: pytest.MonkeyPatch, inputs: int, outputs: int, num_tokens: int
) -> None:
    monkeypatch.setattr(gpu_products, "_is_small", lambda weight_OI, most_numbers: True)
    random = torch.Generator().manual_seed(num_tokens)
    x_TI = torch.randn(num_tokens, inputs, generator=random).bfloat16().to(DEVICE)
    weight_UI = torch.randn(2 * outputs, inputs, generator=random).bfloat16().to(DEVICE)
    weight_UI /= inputs**0.5

    y_TF = small_weight_silu(cuda_kernels, x_TI, weight_UI)

    gate_TF, up_TF = few_token_linear(cuda_kernels, x_TI, weight_UI, None).float().chunk(2, dim=1)
    expected_TF = torch.nn.functional.silu(gate_TF) * up_TF
    # Either may have rounded a gate to its neighbour: sums of other parts.
    torch.testing.assert_close(y_TF.float(), expected_TF, atol=1e-6, rtol=2**-7)


def test_more_inputs_than_a_block_takes_need_clusters(cuda_kernels: Any) -> None:
    """The stand-in and Hopper have clusters. A part is at most ten rounds, and there are four."""
    weight_OI = torch.ones(3, 4 * 2560, dtype=torch.bfloat16, device=DEVICE)
    assert cuda_kernels.most_inputs_of_few_tokens(weight_OI) == 4 * 2560
    y_TO = torch.zeros(3, 3, dtype=torch.bfloat16, device=DEVICE)
    no_bias_O = weight_OI.new_empty(0)
    cuda_kernels.few_token_linear(torch.ones_like(weight_OI), weight_OI, no_bias_O, y_TO)
    assert (y_TO == 4 * 2560).all()
    wide_OI = torch.ones(3, 4 * 2560 + 8, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(RuntimeError, match="10248 inputs are too many"):
        cuda_kernels.few_token_linear(torch.ones_like(wide_OI), wide_OI, no_bias_O, y_TO)


@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("inputs", [1096, 4608])
def test_in_any_order_of_blocks_and_threads(cuda_kernels: Any, inputs: int, seed: int) -> None:
    """Each block takes several groups of outputs, and joins those of its cluster several times."""
    if DEVICE.type == "cuda":
        pytest.skip("a GPU chooses itself")
    random = torch.Generator().manual_seed(0)
    x_TI = torch.randn(9, inputs, generator=random).bfloat16()
    weight_OI = torch.randn(300, inputs, generator=random).bfloat16()
    no_bias_O = weight_OI.new_empty(0)
    y_TO = x_TI.new_empty(9, 300)
    cuda_kernels.few_token_linear(x_TI, weight_OI, no_bias_O, y_TO)
    expected_TO = y_TO.clone()
    try:
        cuda_kernels.set_blocks(seed, 2)
        cuda_kernels.set_most_behind(1 << 15)
        cuda_kernels.few_token_linear(x_TI, weight_OI, no_bias_O, y_TO.zero_())
    finally:
        cuda_kernels.set_blocks(0, 1)
        cuda_kernels.set_most_behind(1000)
    assert torch.equal(y_TO, expected_TO)


@pytest.mark.usefixtures("weight_kernels")
@pytest.mark.parametrize("inputs", [1096, 4608])
def test_a_token_of_few_gets_the_same_result_beside_others(cuda_kernels: Any, inputs: int) -> None:
    random = torch.Generator().manual_seed(0)
    x_TI = torch.randn(16, inputs, generator=random).bfloat16().to(DEVICE)
    weight_OI = torch.randn(40, inputs, generator=random).bfloat16().to(DEVICE)
    expected_TO = few_token_linear(cuda_kernels, x_TI, weight_OI, None)
    expected_TF = small_weight_silu(cuda_kernels, x_TI, weight_OI)
    for num_tokens in (1, 2, 8, 9, 15):
        some_TI = x_TI[:num_tokens]
        y_TO = few_token_linear(cuda_kernels, some_TI, weight_OI, None)
        assert torch.equal(y_TO, expected_TO[:num_tokens])
        assert torch.equal(
            small_weight_silu(cuda_kernels, some_TI, weight_OI), expected_TF[:num_tokens]
        )


@pytest.mark.usefixtures("weight_kernels")
def test_few_tokens_wait_for_the_kernel_before(cuda_kernels: Any) -> None:
    """The weight may be read before, the tokens may not."""
    if DEVICE.type == "cuda":
        pytest.skip("the stand-in knows when inputs arrive")
    x_TI = torch.full((3, 64), float("nan"), dtype=torch.bfloat16)
    ones_TI = torch.ones_like(x_TI)
    cuda_kernels.arrives_late(x_TI, ones_TI)
    ones_OI = torch.ones(6, 64, dtype=torch.bfloat16)
    y_TO = few_token_linear(cuda_kernels, x_TI, ones_OI, None)
    y_TF = small_weight_silu(cuda_kernels, x_TI, ones_OI)
    cuda_kernels.forget_late()
    assert (y_TO == 64).all()
    assert (y_TF == 64 * 64).all()


@pytest.mark.parametrize(
    ("num_tokens", "shape", "dtype", "takes"),
    [
        (2, (64, 4096), torch.bfloat16, True),
        (16, (64, 4096), torch.bfloat16, True),
        (2, (64, 781_250), torch.bfloat16, True),
        (2, (64, 781_252), torch.bfloat16, False),  # weights of more numbers are torch's
        (2, (128, 66_000), torch.bfloat16, True),
        (2, (136, 66_000), torch.bfloat16, False),  # so many inputs are too many for the device
        (2, (136, 64), torch.bfloat16, True),  # but not of a small weight
        (2, (68, 64), torch.bfloat16, False),
        (17, (64, 64), torch.bfloat16, False),
        (0, (64, 64), torch.bfloat16, False),
        (2, (64, 64), torch.float16, False),
    ],
    ids=str,
)
def test_which_products_the_kernel_of_few_tokens_takes(
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    takes: bool,
) -> None:
    """No tokens come of a step in which no prompt ends, in a model's last layer."""
    kernels = SimpleNamespace(
        small_linear=lambda x_TI, weight_OI, bias_O, y_TO: y_TO.fill_(7),
        few_token_linear=lambda x_TI, weight_OI, bias_O, y_TO: y_TO.fill_(7),
        most_inputs_of_few_tokens=lambda weight_OI: 128,
    )
    monkeypatch.setattr(
        gpu_products, "cuda_kernels_for", lambda x: kernels if x.dtype == torch.bfloat16 else None
    )
    inputs, outputs = shape
    x_TI = torch.zeros(num_tokens, inputs, dtype=dtype)
    weight_OI = torch.zeros(outputs, inputs, dtype=dtype)
    y_TO = gpu_products.gpu_linear(x_TI, weight_OI, None)
    assert y_TO.shape == (num_tokens, outputs)
    assert (y_TO == (7 if takes else 0)).all()
    if num_tokens:
        wide_TI = torch.zeros(num_tokens, 2 * inputs, dtype=dtype)[:, ::2]
        assert not gpu_products.gpu_linear(wide_TI, weight_OI, None).any()


@pytest.mark.parametrize(
    ("num_tokens", "shape", "takes"),
    [
        (2, (1024, 8192), True),  # inputs, and outputs of gate and up
        (16, (1024, 8192), True),
        (17, (1024, 8192), False),
        (2, (1024, 8194), False),
        (2, (1032, 8064), False),
        (2, (1020, 64), False),
    ],
    ids=str,
)
def test_which_gated_products_the_kernel_of_small_weights_takes(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, shape: tuple[int, int], takes: bool
) -> None:
    kernels = SimpleNamespace(
        small_silu=lambda x_TI, weight_UI, y_TF: y_TF.fill_(7),
        few_token_linear=lambda x_TI, weight_OI, bias_O, y_TO: y_TO.fill_(0),
        most_inputs_of_few_tokens=lambda weight_OI: 1 << 20,
        fills_gated_tiles=lambda x_TI, weight_UI: False,
    )
    monkeypatch.setattr(gpu_products, "cuda_kernels_for", lambda x: kernels)
    inputs, outputs = shape
    x_TI = torch.zeros(num_tokens, inputs, dtype=torch.bfloat16)
    y_TF = gpu_products.gpu_linear_silu(x_TI, x_TI.new_zeros(outputs, inputs))
    assert y_TF.shape == (num_tokens, outputs // 2)
    assert (y_TF == (7 if takes else 0)).all()


@pytest.mark.parametrize("num_tokens", [0, 1, 64, 65, 300])
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 8), (64, 136), (328, 256), (200, 392)])
def test_many_tokens_and_their_activation_equal_float64(
    cuda_kernels: Any, inputs: int, outputs: int, num_tokens: int
) -> None:
    """Neither tokens, nor outputs, nor inputs fill the tiles of the kernel; some are of its blocks
    twice. What lies before and behind the result is not written."""
    random = torch.Generator().manual_seed(num_tokens)
    x_TI = torch.randn(num_tokens, inputs, generator=random).bfloat16()
    weight_UI = (torch.randn(2 * outputs, inputs, generator=random) * 3 / inputs**0.5).bfloat16()
    surrounded = torch.full((num_tokens + 2, outputs), 7, dtype=torch.bfloat16, device=DEVICE)
    y_TF = surrounded[1:-1]

    cuda_kernels.gated_tiles(x_TI.to(DEVICE), weight_UI.to(DEVICE), y_TF)

    gate_TF, up_TF = (x_TI.double() @ weight_UI.double().T).bfloat16().float().chunk(2, dim=1)
    expected_TF = torch.nn.functional.silu(gate_TF) * up_TF
    # Either may have rounded gate and up to their neighbours. A negative gate's activation changes
    # by more than the gate, but is small.
    torch.testing.assert_close(y_TF.float().cpu(), expected_TF, atol=2**-6, rtol=2**-6)
    assert (surrounded[0] == 7).all()
    assert (surrounded[-1] == 7).all()


@pytest.mark.parametrize("seed", range(1, 5))
def test_tiles_in_any_order_of_blocks_and_threads(cuda_kernels: Any, seed: int) -> None:
    if DEVICE.type == "cuda":
        pytest.skip("a GPU chooses itself")
    random = torch.Generator().manual_seed(0)
    x_TI = torch.randn(300, 328, generator=random).bfloat16()
    weight_UI = torch.randn(2 * 264, 328, generator=random).bfloat16()
    expected_TF = many_token_silu(cuda_kernels, x_TI, weight_UI)
    try:
        cuda_kernels.set_blocks(seed, 1)
        y_TF = many_token_silu(cuda_kernels, x_TI, weight_UI)
    finally:
        cuda_kernels.set_blocks(0, 1)
    assert torch.equal(y_TF, expected_TF)


def test_tiles_wait_for_the_kernel_before(cuda_kernels: Any) -> None:
    if DEVICE.type == "cuda":
        pytest.skip("the stand-in knows when inputs arrive")
    x_TI = torch.full((3, 64), float("nan"), dtype=torch.bfloat16)
    cuda_kernels.arrives_late(x_TI, torch.ones_like(x_TI))
    y_TF = many_token_silu(cuda_kernels, x_TI, torch.ones(16, 64, dtype=torch.bfloat16))
    cuda_kernels.forget_late()
    assert (y_TF == 64 * 64).all()


@pytest.mark.parametrize(
    ("num_tokens", "outputs", "fills"),
    [
        (512, 768, True),
        (511, 768, False),  # too few tokens
        (513, 768, True),
        (512, 128, False),  # each second tile lies outside
        (512, 896, False),  # each eighth
        (512, 1152, True),  # each tenth
    ],
)
def test_which_products_fill_the_tiles(
    cuda_kernels: Any, num_tokens: int, outputs: int, fills: bool
) -> None:
    if DEVICE.type == "cuda":
        pytest.skip("for the multiprocessors of the stand-in, of which a cluster runs at a time")
    x_TI = torch.empty(num_tokens, 8, dtype=torch.bfloat16)
    weight_UI = torch.empty(2 * outputs, 8, dtype=torch.bfloat16)
    assert cuda_kernels.fills_gated_tiles(x_TI, weight_UI) == fills


@pytest.mark.parametrize(
    ("num_tokens", "outputs", "inputs", "takes"),
    [(40, 64, 64, True), (40, 64, 68, False), (40, 68, 64, False), (33, 8, 8, True)],
)
def test_which_products_the_kernel_of_many_tokens_takes(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, outputs: int, inputs: int, takes: bool
) -> None:
    kernels = SimpleNamespace(
        gated_tiles=lambda x_TI, weight_UI, y_TF: y_TF.fill_(7),
        fills_gated_tiles=lambda x_TI, weight_UI: True,
    )
    monkeypatch.setattr(gpu_products, "cuda_kernels_for", lambda x: kernels)
    x_TI = torch.zeros(num_tokens, inputs, dtype=torch.bfloat16)
    weight_UI = torch.zeros(2 * outputs, inputs, dtype=torch.bfloat16)
    y_TF = gpu_products.gpu_linear_silu(x_TI, weight_UI)
    assert y_TF.shape == (num_tokens, outputs)
    assert (y_TF == (7 if takes else 0)).all()
    wide_TI = torch.zeros(num_tokens, 2 * inputs, dtype=torch.bfloat16)[:, ::2]
    assert not gpu_products.gpu_linear_silu(wide_TI, weight_UI).any()


@pytest.mark.parametrize(
    ("shape", "is_small"),
    [((4096, 1024), True), ((1024, 4096), True), ((1024, 4104), False), ((2048, 2048), False)],
    ids=str,
)
def test_which_weights_are_small(shape: tuple[int, int], is_small: bool) -> None:
    def kernel(name: str) -> Callable[..., None]:
        return lambda *_: taken.append(name)

    names = ("small_linear", "few_token_linear")
    kernels = SimpleNamespace(**{name: kernel(name) for name in names})
    taken: list[str] = []
    weight_OI = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    few_token_linear(kernels, weight_OI.new_empty(2, shape[1]), weight_OI, None)
    assert taken == ["small_linear" if is_small else "few_token_linear"]


@pytest.mark.parametrize("num_others", [0, 1, 8, 63, 64, 120, 127, 128, 159, 300])
def test_sizes_without_padding_are_multiplied_as_they_are(
    num_others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplied: list[int] = []
    by_onednn = CpuLinear._by_onednn

    def watched(self: CpuLinear, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        multiplied.append(len(x_TI))
        return by_onednn(self, x_TI, bias_O)

    monkeypatch.setattr(CpuLinear, "_by_onednn", watched)
    linear = CpuLinear(torch.ones(OUTPUTS, INPUTS, dtype=torch.bfloat16), pack=False)
    sizes = sizes_without_padding(num_others, 512)

    assert sizes == sorted(set(sizes))
    assert sizes[0] >= 8
    assert sizes[-1] > 512 - 32
    for size in sizes:
        multiplied.clear()
        linear(torch.ones(num_others + size, INPUTS, dtype=torch.bfloat16), None)
        assert multiplied in ([], [num_others + size])
    assert sizes_without_padding(num_others, 7) == []


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 20, 40])
def test_a_rank_without_outputs_has_none(num_tokens: int) -> None:
    """Of a vocabulary that is too small for all ranks."""
    linear = CpuLinear(torch.empty(0, INPUTS, dtype=torch.bfloat16), pack=True)
    assert linear(torch.ones(num_tokens, INPUTS).bfloat16(), None).shape == (num_tokens, 0)
