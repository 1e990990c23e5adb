"""Attention to prefixes that decodes share, on a GPU.

Decodes whose contexts begin with the same pages attend to these together. `BalancedDecode` attends
to the rest of each context, and merges the results from here.
"""

# Dimensions: B requests of a step, H head width, K kv heads, N query heads, P pages,
# Q positions of a page, R rows of the tables, X a selection out of another dimension, Z entries of
# a flat list.

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from minisgl.kernel.dispatch import triton_kernels_for


class GroupTensors(NamedTuple):
    """Queries whose contexts begin with the same pages; all int32.

    The kernel launched just before one that gets these does not write them.

    Attributes:
        num_shared_B: the tokens that the context of each query shares with its group, in whole
            pages; 0 for a query in no group.
        member_B: the queries of all groups, group by group; the entries after them are not read.
        indptr: where in `member_B` each group begins, and where the last one ends. A group may have
            no queries.
    """

    num_shared_B: Tensor
    member_B: Tensor
    indptr: Tensor


class PrefixPlan(NamedTuple):
    """How attention to shared prefixes is divided, for all layers of a step; int32.

    Attributes:
        member_B: that of the groups.
        program_ZX: of each of Z programs: where its part of a prefix begins and ends, a row of the
            page table that has it, where the group begins in `member_B`, which of the rows of the
            group is its first one, and how many follow it, itself included. A query has a row for
            each head of a kv head. Two numbers are not used.
        place_BX: where the results of each query are in `PrefixParts`, for a kv head: the place of
            its first head in the first part, the distance to its place in the next part, and the
            number of parts. One number is not used. Not written for a query in no group.
    """

    member_B: Tensor
    program_ZX: Tensor
    place_BX: Tensor


class PrefixParts(NamedTuple):
    """Partial results of attention, from parts of the prefixes of groups.

    Attributes:
        output_KZH: float32, at each of Z places, before it is divided by the sum.
        top_KZ: float32, the largest score.
        sum_KZ: float32, the sum of weights: exponentials of scores less the largest one.
        place_BX: that of the plan. Places that it does not name are not written.
    """

    output_KZH: Tensor
    top_KZ: Tensor
    sum_KZ: Tensor
    place_BX: Tensor


def plan_shared_prefixes(
    row_B: Tensor, groups: GroupTensors, *, num_heads: int, num_kv_heads: int
) -> PrefixPlan:
    """Divide the shared prefixes over the programs that a GPU runs at once, on the device.

    Args:
        row_B: int32, the row of the page table of each query.
    """
    kernels = triton_kernels_for(row_B)
    assert kernels is not None
    plan = kernels.plan_shared_prefixes(row_B, *groups, num_heads, num_kv_heads)
    return PrefixPlan(groups.member_B, *plan)


def attend_shared_prefixes(
    q_BNH: Tensor,
    k_PQKH: Tensor,
    v_PQKH: Tensor,
    page_table_RP: Tensor,
    plan: PrefixPlan,
    *,
    scale: float,
) -> PrefixParts:
    """The attention of queries to the tokens that they share with their groups.

    These tokens are read once for up to 64 heads of queries, as one matrix product.

    Args:
        k_PQKH, v_PQKH: of equal strides; pages follow each other without a gap.
        plan: of the same rows; other kernels must have been launched since.
        scale: as in `AttentionSpec`.
    """
    kernels = triton_kernels_for(q_BNH)
    assert kernels is not None
    output_KZH, top_KZ, sum_KZ = kernels.attend_shared_prefixes(
        q_BNH, k_PQKH, v_PQKH, page_table_RP, plan.member_B, plan.program_ZX, scale=scale
    )
    return PrefixParts(output_KZH, top_KZ, sum_KZ, plan.place_BX)
