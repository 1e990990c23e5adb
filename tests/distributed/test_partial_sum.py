"""What is still to be added up: over the ranks, or over parts of the inputs on one."""

# Dimensions: D model width, T tokens of a step.

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from minisgl.distributed import DistributedCommunicator, SumOverInputs, SumOverRanks, whole
from minisgl.kernel import residual_norm, rms_norm
from tests.distributed.groups import in_group

T = 5
D = 8
PARTS = torch.randn(2, T, D, generator=torch.Generator().manual_seed(0))


def part_of(comm: DistributedCommunicator) -> SumOverRanks:
    return SumOverRanks(PARTS[comm.info.rank].clone(), comm)


def test_the_whole_is_the_sum_over_the_ranks(tmp_path: Path) -> None:
    def work(comm: DistributedCommunicator) -> tuple[Tensor, Tensor]:
        return whole(part_of(comm)), whole(PARTS[0])

    for added_up, tensor in in_group(2, tmp_path / "rendezvous", work):
        torch.testing.assert_close(added_up, PARTS.sum(dim=0))
        assert torch.equal(tensor, PARTS[0])


@pytest.mark.parametrize("has_residual", [True, False])
def test_a_norm_adds_up_first(has_residual: bool, tmp_path: Path) -> None:
    weight_D = torch.rand(D, generator=torch.Generator().manual_seed(1))
    residual_TD = PARTS[0].flip(0) if has_residual else None

    def own_residual() -> Tensor | None:
        return None if residual_TD is None else residual_TD.clone()

    def work(comm: DistributedCommunicator) -> tuple[Tensor, Tensor]:
        return part_of(comm).add_up_and_norm(own_residual(), weight_D, 1e-5)

    expected = residual_norm(PARTS.sum(dim=0), own_residual(), weight_D, 1e-5)
    for result in in_group(2, tmp_path / "rendezvous", work):
        torch.testing.assert_close(result, expected)


def test_a_norm_without_a_residual_adds_up_first(tmp_path: Path) -> None:
    weight_D = torch.rand(D, generator=torch.Generator().manual_seed(1))

    def work(comm: DistributedCommunicator) -> Tensor:
        return part_of(comm).norm(weight_D, 1e-5)

    expected_TD = rms_norm(PARTS.sum(dim=0), weight_D, 1e-5)
    for normed_TD in in_group(2, tmp_path / "rendezvous", work):
        torch.testing.assert_close(normed_TD, expected_TD)


@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_one_rank_are_added_up(has_residual: bool, dtype: torch.dtype) -> None:
    weight_D = torch.rand(D, generator=torch.Generator().manual_seed(1)).to(dtype)
    residual_TD = PARTS[0].flip(0).to(dtype) if has_residual else None
    total_TD = PARTS.sum(dim=0)
    parts = SumOverInputs(PARTS, dtype)
    assert torch.equal(whole(parts), total_TD.to(dtype))

    normed_TD, sum_TD = parts.add_up_and_norm(
        None if residual_TD is None else residual_TD.clone(), weight_D, 1e-5
    )

    if residual_TD is not None:
        total_TD = total_TD + residual_TD.float()
    assert torch.equal(sum_TD, total_TD.to(dtype))
    expected_TD, _ = residual_norm(total_TD.to(dtype), None, weight_D, 1e-5)
    assert torch.equal(normed_TD, expected_TD)
    alone_TD = rms_norm(PARTS.sum(dim=0), weight_D.float(), 1e-5).to(dtype)
    assert torch.equal(parts.norm(weight_D, 1e-5), alone_TD)
