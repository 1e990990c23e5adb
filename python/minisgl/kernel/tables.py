"""The device's page table and token pool: writes the host's changes, looks up a step's inputs."""

# Dimensions: L positions of a sequence, P pages, R rows of the tables, T tokens of a step,
# Z entries of a flat list.

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernel.dispatch import kernels_for


def scatter(table: Tensor, index_Z: Tensor, value_Z: Tensor) -> None:
    """Write table.view(-1)[index] = value, in place. A negative value is written as 0.

    So what reads the token pool finds a token also where none was sampled (`NO_TOKEN`).

    Args:
        table, index_Z, value_Z: int32, contiguous. Entries with equal indexes have equal values.
            An index is not range-checked.
    """
    kernels = kernels_for(table)
    if kernels is None:
        table.view(-1)[index_Z.long()] = value_Z.clamp(min=0)
        return
    kernels.scatter(table, index_Z, value_Z)


def look_up(
    row_T: Tensor, position_T: Tensor, token_pool_RL: Tensor, page_table_RP: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    """Look up the token at each row and position, and the slot of its keys and values.

    Args:
        row_T, position_T: int32, contiguous; not range-checked.
        token_pool_RL, page_table_RP: int32.

    Returns:
        input_ids_T, slot_T: int64.
    """
    kernels = kernels_for(row_T)
    if kernels is None:
        page_T = page_table_RP[row_T, position_T // page_size].long()
        slot_T = page_T * page_size + position_T % page_size
        return token_pool_RL[row_T, position_T].long(), slot_T
    outputs_2T = torch.empty(2, len(row_T), dtype=torch.int64, device=row_T.device)
    input_ids_T, slot_T = outputs_2T.unbind()
    kernels.look_up(row_T, position_T, token_pool_RL, page_table_RP, page_size, input_ids_T, slot_T)
    return input_ids_T, slot_T
