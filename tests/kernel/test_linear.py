"""CpuLinear against float64, whichever kernel it chooses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from minisgl.kernel import CpuLinear

# Dimensions: I inputs of a linear layer, O outputs of a linear layer, T tokens of a step.

INPUTS = 96
OUTPUTS = 40
# Relative to the sum of absolute products.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


@pytest.fixture
def mkldnn_enabled() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    yield
    torch._C._set_mkldnn_enabled(before)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 31, 32, 33, 200])
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

    offset = bias_O.double() if bias_O is not None else 0.0
    expected = x_TI.double() @ weight_OI.double().T + offset
    size = x_TI.double().abs() @ weight_OI.double().abs().T + abs(offset)
    assert y_TO.dtype == dtype
    assert y_TO.shape == expected.shape
    assert ((y_TO.double() - expected).abs() <= TOLERANCE[dtype] * size).all()


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_view_with_strides_is_multiplied_like_a_copy(num_tokens: int) -> None:
    random = torch.Generator().manual_seed(0)
    linear = CpuLinear(torch.randn(OUTPUTS, INPUTS, generator=random).bfloat16(), pack=True)
    x_TI = torch.randn(num_tokens, 2 * INPUTS, generator=random).bfloat16()[:, ::2]
    assert torch.equal(linear(x_TI, None), linear(x_TI.contiguous(), None))


@pytest.mark.usefixtures("mkldnn_enabled")
@pytest.mark.parametrize("enabled", [True, False])
def test_one_token_leaves_torchs_settings_as_they_were(enabled: bool) -> None:
    torch._C._set_mkldnn_enabled(enabled)
    linear = CpuLinear(torch.ones(OUTPUTS, INPUTS, dtype=torch.bfloat16), pack=False)
    linear(torch.ones(1, INPUTS, dtype=torch.bfloat16), None)
    assert torch._C._get_mkldnn_enabled() == enabled
