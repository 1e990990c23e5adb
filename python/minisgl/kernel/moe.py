"""Mixture of experts: routes tokens to experts; the reference of what the experts compute.

The sizes of tiles that a GPU's kernels take are words of this file, too.
"""

# Dimensions: A experts that a token chooses, D model width, E experts, F mlp width,
# T tokens of a step, U both halves of a gated mlp: 2 F.

from __future__ import annotations

from typing import Annotated

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel.dispatch import triton_kernels_for

# More pairs of a token and an expert are counted before a GPU sorts them: another kernel.
MOST_PAIRS_AT_ONCE = 4096

_Size = Annotated[int, msgspec.Meta(ge=16, le=512)]


class ProductTile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a program of a GPU multiplies at a time, and how.

    Attributes:
        rows: of the weight.
        row_bytes: of such a row, and of a pair's input.
        programs: at most; each multiplies one tile after the other.

    Raises:
        ValueError: a size is no power of two.
    """

    rows: _Size
    row_bytes: _Size
    num_warps: Annotated[int, msgspec.Meta(ge=1, le=16)]
    num_stages: Annotated[int, msgspec.Meta(ge=1, le=8)]
    programs: Annotated[int, msgspec.Meta(ge=1)]

    def __post_init__(self) -> None:
        _check_powers_of_two(rows=self.rows, row_bytes=self.row_bytes, num_warps=self.num_warps)


class ExpertTiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tiles of a step's two products.

    Attributes:
        pairs: of a token and an expert, in a tile of either product.

    Raises:
        ValueError: `pairs` is no power of two.
    """

    pairs: _Size
    gate_up: ProductTile
    down: ProductTile

    def __post_init__(self) -> None:
        _check_powers_of_two(pairs=self.pairs)


def _check_powers_of_two(**sizes: int) -> None:
    for name, size in sizes.items():
        if size & (size - 1):
            raise ValueError(f"{name} is {size}, which is no power of two")


def route(logits_TE: Tensor, num_chosen: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Choose for each token the A experts that rank first in its softmax.

    Args:
        normalize: whether the weights of a token are scaled to sum to one.

    Returns:
        weight_TA: computed in float32, in the dtype of the logits.
        expert_TA: int32.
    """
    kernels = triton_kernels_for(logits_TE)
    if kernels is None:
        return route_reference(logits_TE, num_chosen, normalize)
    weight_TA = logits_TE.new_empty(len(logits_TE), num_chosen)
    expert_TA = torch.empty_like(weight_TA, dtype=torch.int32)
    kernels.route(logits_TE, weight_TA, expert_TA, normalize)
    return weight_TA, expert_TA


def route_reference(logits_TE: Tensor, num_chosen: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Compute what `route` does, in plain torch."""
    probability_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    weight_TA, expert_TA = probability_TE.topk(num_chosen, dim=-1)
    if normalize:
        weight_TA = weight_TA / weight_TA.sum(dim=-1, keepdim=True)
    return weight_TA.to(logits_TE.dtype), expert_TA.int()


def moe_reference(
    x_TD: Tensor, gate_up_EUD: Tensor, down_EDF: Tensor, weight_TA: Tensor, expert_TA: Tensor
) -> Tensor:
    """The contract of `moe/base.py` in plain torch, which every other way is compared with.

    It takes one expert after the other, and reads those only that some token chose.
    """
    out_TD = torch.zeros_like(x_TD)
    for expert in expert_TA.unique().tolist():
        token, choice = (expert_TA == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x_TD[token], gate_up_EUD[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down_EDF[expert])
        out_TD.index_add_(0, token, y * weight_TA[token, choice, None])
    return out_TD
