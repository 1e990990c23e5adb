"""The device's page table and token pool: take the host's changes, look up a step's inputs."""

# Dimension key: T tokens in the batch, R table rows, L positions, P pages, X changes.

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernel.dispatch import kernels_for


def scatter(table: Tensor, index_X: Tensor, value_X: Tensor) -> None:
    """table.view(-1)[index] = value, all int32; where an index is repeated, so is its value."""
    if table.is_cuda:
        kernels = kernels_for(table)
        assert kernels is not None
        kernels.scatter(table, index_X, value_X)
    else:
        table.view(-1)[index_X.long()] = value_X


def look_up(
    row_T: Tensor, position_T: Tensor, token_pool_RL: Tensor, page_table_RP: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    """The token at each place, and the slot of its KV: two int64 [T]."""
    if not row_T.is_cuda:
        page_T = page_table_RP[row_T, position_T // page_size].long()
        return token_pool_RL[row_T, position_T].long(), page_T * page_size + position_T % page_size
    input_ids_T, slot_T = torch.empty(
        2, len(row_T), dtype=torch.int64, device=row_T.device
    ).unbind()
    kernels = kernels_for(row_T)
    assert kernels is not None
    kernels.look_up(row_T, position_T, token_pool_RL, page_table_RP, page_size, input_ids_T, slot_T)
    return input_ids_T, slot_T
