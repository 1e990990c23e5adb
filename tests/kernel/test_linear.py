"""CpuLinear against float64, whichever way it multiplies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from minisgl.kernel import CpuLinear

INPUTS, OUTPUTS = 96, 40
TOLERANCE = {
    torch.float32: 1e-5,
    torch.bfloat16: 2.0**-7,
}  # relative to the sum of absolute products


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
    weight_FD = torch.randn(OUTPUTS, INPUTS, generator=random).to(dtype)
    bias_F = torch.randn(OUTPUTS, generator=random).to(dtype) if bias else None
    x_TD = torch.randn(num_tokens, INPUTS, generator=random).to(dtype)

    y_TF = CpuLinear(weight_FD, pack=pack)(x_TD, bias_F)

    offset = bias_F.double() if bias_F is not None else 0.0
    expected = x_TD.double() @ weight_FD.double().T + offset
    size = x_TD.double().abs() @ weight_FD.double().abs().T + abs(offset)
    assert y_TF.dtype == dtype
    assert y_TF.shape == expected.shape
    assert ((y_TF.double() - expected).abs() <= TOLERANCE[dtype] * size).all()


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_view_with_strides_is_multiplied_like_a_copy(num_tokens: int) -> None:
    random = torch.Generator().manual_seed(0)
    linear = CpuLinear(torch.randn(OUTPUTS, INPUTS, generator=random).bfloat16(), pack=True)
    x_TD = torch.randn(num_tokens, 2 * INPUTS, generator=random).bfloat16()[:, ::2]
    assert torch.equal(linear(x_TD, None), linear(x_TD.contiguous(), None))


@pytest.mark.usefixtures("mkldnn_enabled")
@pytest.mark.parametrize("enabled", [True, False])
def test_one_token_leaves_torchs_settings_as_they_were(enabled: bool) -> None:
    torch._C._set_mkldnn_enabled(enabled)
    linear = CpuLinear(torch.ones(OUTPUTS, INPUTS, dtype=torch.bfloat16), pack=False)
    linear(torch.ones(1, INPUTS, dtype=torch.bfloat16), None)
    assert torch._C._get_mkldnn_enabled() == enabled
