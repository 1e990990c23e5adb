"""One contract for every MoE backend."""

from __future__ import annotations

import pytest
import torch

from minisgl.errors import ConfigError
from minisgl.kernel import moe_reference
from minisgl.moe import MOE_BACKENDS, create_moe_backend


@pytest.mark.parametrize("name", MOE_BACKENDS.names)
def test_a_backend_equals_the_reference(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    x_TD = torch.randn(7, 12, generator=random)
    gate_up_EXD = torch.randn(5, 20, 12, generator=random)
    down_EDF = torch.randn(5, 12, 10, generator=random)
    weight_TA, expert_TA = torch.rand(7, 5, generator=random).topk(2)
    before = x_TD.clone()

    out_TD = create_moe_backend(name).forward(x_TD, gate_up_EXD, down_EDF, weight_TA, expert_TA)

    expected = moe_reference(x_TD, gate_up_EXD, down_EDF, weight_TA, expert_TA)
    torch.testing.assert_close(out_TD, expected, atol=1e-4, rtol=0)
    assert torch.equal(x_TD, before)


def test_an_unknown_backend_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"unknown MoE backend 'triton-x'; there is .*torch"):
        create_moe_backend("triton-x")
