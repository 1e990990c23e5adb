"""One contract for every MoE backend, and which backend is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.kernel import MOST_PAIRS_AT_ONCE, ExpertTiles, ProductTile, moe_reference
from minisgl.moe import (
    BaseMoeBackend,
    FusedMoeBackend,
    TiledSteps,
    TileTable,
    TorchMoeBackend,
    create_moe_backend,
)
from minisgl.moe import fused as fused_module

CPU = torch.device("cpu")
NUM_EXPERTS = 5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}


def arguments(
    num_tokens: int, dtype: torch.dtype, device: torch.device, first: int = 0
) -> list[Tensor]:
    """`first` is the expert that has the number 0; as many others are not there."""
    random = torch.Generator().manual_seed(num_tokens)
    weight_TA, expert_TA = torch.rand(num_tokens, NUM_EXPERTS, generator=random).topk(2)
    expert_TA -= first
    floats = [
        torch.randn(num_tokens, 12, generator=random),
        torch.randn(NUM_EXPERTS, 20, 12, generator=random) / 12**0.5,
        torch.randn(NUM_EXPERTS, 12, 10, generator=random) / 10**0.5,
        weight_TA,
    ]
    return [*(x.to(device, dtype) for x in floats), expert_TA.to(device)]


def check(
    backend: BaseMoeBackend, num_tokens: int, dtype: torch.dtype, device: str, first: int = 0
) -> None:
    x_TD, *others = arguments(num_tokens, dtype, torch.device(device), first)
    before = x_TD.clone()
    y_TD = backend.forward(x_TD, *others)
    wide = [x.float() if x.is_floating_point() else x for x in (x_TD, *others)]
    expected = moe_reference(wide[0], wide[1], wide[2], wide[3], wide[4])
    assert y_TD.dtype == dtype
    torch.testing.assert_close(y_TD.float(), expected, atol=TOLERANCE[dtype], rtol=0.02)
    assert torch.equal(x_TD, before)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("first", [0, 3, -3, NUM_EXPERTS])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 40])
def test_the_torch_backend_equals_the_reference(
    num_tokens: int, first: int, dtype: torch.dtype
) -> None:
    check(TorchMoeBackend(), num_tokens, dtype, "cpu", first)


def test_the_torch_backend_does_not_read_experts_that_no_token_chose() -> None:
    gate_up_EUD = torch.full((3, 20, 12), torch.nan)
    down_EDF = torch.full((3, 12, 10), torch.nan)
    gate_up_EUD[1] = 1.0
    down_EDF[1] = 1.0
    x_TD = torch.ones(2, 12)
    chosen_TA = torch.ones(2, 1)
    y_TD = TorchMoeBackend().forward(x_TD, gate_up_EUD, down_EDF, chosen_TA, chosen_TA.long())
    assert torch.isfinite(y_TD).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("first", [0, 3, -3, NUM_EXPERTS])
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5, 40])
def test_the_fused_backend_equals_the_reference(
    num_tokens: int, first: int, dtype: torch.dtype
) -> None:
    check(FusedMoeBackend(), num_tokens, dtype, "cuda", first)


class Kernels:
    """Kernels that note their names and compute nothing."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def moe_by_token(self, *_arguments: Any) -> None:
        self.called.append("by token")

    def moe_by_expert(self, *arguments: Any) -> None:
        self.called.append("by expert")
        self.tiles = arguments[-1]


@pytest.mark.parametrize(
    ("num_tokens", "kernel"),
    [(0, "by token"), (1, "by token"), (4, "by token"), (5, "by expert"), (40, "by expert")],
)
def test_the_fused_backend_lists_tokens_that_share_experts(
    num_tokens: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Kernels()
    monkeypatch.setattr(fused_module, "triton_kernels_for", lambda x: kernels)
    x_TD, *others = arguments(num_tokens, torch.float32, CPU)
    assert FusedMoeBackend().forward(x_TD, *others).shape == x_TD.shape
    assert kernels.called == [kernel]


def test_the_fused_backend_takes_the_tiles_that_were_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels()
    monkeypatch.setattr(fused_module, "triton_kernels_for", lambda x: kernels)
    tile = ProductTile(64, 128, 4, 3, 132)
    few = ExpertTiles(16, tile, tile)
    many = ExpertTiles(32, tile, tile)
    backend = FusedMoeBackend(TileTable(2, (TiledSteps(7, few), TiledSteps(40, many))))
    for num_tokens, tiles in ((3, few), (7, few), (8, many), (41, many)):
        x_TD, *others = arguments(num_tokens, torch.float32, CPU)
        backend.forward(x_TD, *others)
        assert kernels.tiles is tiles
    assert backend.nums_of_tokens(NUM_EXPERTS, 2) == [1, 7, 40, MOST_PAIRS_AT_ONCE // 2 + 1]


@pytest.mark.parametrize(
    ("device", "dtype", "backend"),
    [
        ("cuda", torch.bfloat16, FusedMoeBackend),
        ("cuda", torch.float16, FusedMoeBackend),
        ("cuda", torch.float32, FusedMoeBackend),
        ("cuda", torch.float64, TorchMoeBackend),
        ("cpu", torch.bfloat16, TorchMoeBackend),
        ("cpu", torch.float32, TorchMoeBackend),
    ],
)
def test_the_backend_follows_from_device_and_dtype(
    device: str, dtype: torch.dtype, backend: type[BaseMoeBackend]
) -> None:
    assert type(create_moe_backend(torch.device(device), dtype)) is backend
