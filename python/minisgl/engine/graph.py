"""Decode steps recorded as CUDA graphs, one for each of a ladder of batch sizes.

A replay costs the host one call instead of hundreds, and the device no gaps between kernels. A graph reads its rows
and positions from fixed places that are filled before each replay; tokens, slots and page lists it looks up itself in
the device's tables. A batch between two sizes is padded with requests of a row and a page of nobody.
"""

# Dimension key: G requests of a graph, B requests, D model width.

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from minisgl.attention import BaseAttnMetadata
from minisgl.core import Batch, BatchPlan, Context
from minisgl.engine.staging import Staging
from minisgl.kernel import look_up

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    metadata: BaseAttnMetadata
    hidden_GD: Tensor


class GraphRunner:
    """Records and replays.

    Args:
        forward: from a batch to the hidden states that are sampled from.
        idle_row: a row of the tables whose page belongs to nobody.
    """

    def __init__(
        self, forward: Callable[[Batch], Tensor], context: Context, max_batch_size: int, idle_row: int
    ) -> None:
        self._forward = forward
        self._context = context
        self._idle_row = idle_row
        self._sizes = ladder(max_batch_size)
        self._staging = Staging(context.page_table_RP.device, capacity=2 * max_batch_size)
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[int, _Recorded] = {}
        for size in tqdm(self._sizes[::-1], desc="Recording CUDA graphs", unit="size", leave=False):
            self._recorded[size] = self._record(size)

    def takes(self, plan: BatchPlan) -> bool:
        """Whether the plan is of decodes alone, and not too many."""
        return len(plan.slices) <= self._sizes[-1] and all(part.samples and len(part) == 1 for part in plan.slices)

    def run(self, plan: BatchPlan) -> Tensor:
        """hidden_BD of a plan that it takes; valid until the next run."""
        num_requests = len(plan.slices)
        size = next(size for size in self._sizes if size >= num_requests)
        recorded = self._recorded[size]
        row_G = np.full(size, self._idle_row, dtype=np.int32)
        row_G[:num_requests] = [part.row for part in plan.slices]
        position_G = np.zeros(size, dtype=np.int32)
        position_G[:num_requests] = [part.start for part in plan.slices]
        self._staging.send(row_G, position_G)
        self._context.attn_backend.prepare_replay(recorded.metadata, position_G)
        recorded.graph.replay()
        return recorded.hidden_GD[:num_requests]

    def _record(self, size: int) -> _Recorded:
        row_G, position_G = self._staging.send(
            np.full(size, self._idle_row, dtype=np.int32), np.zeros(size, dtype=np.int32)
        )
        metadata = self._context.attn_backend.prepare_capture(row_G)

        def run() -> Tensor:
            tables = (self._context.token_pool_RL, self._context.page_table_RP)
            input_ids_G, slot_G = look_up(row_G, position_G, *tables, self._context.kv_pool.page_size)
            return self._forward(Batch(row_G, position_G, input_ids_G, slot_G, None, metadata))

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # what is compiled or allocated once is not to be recorded
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden_GD = run()
        return _Recorded(graph, metadata, hidden_GD)


def ladder(max_batch_size: int) -> list[int]:
    """1, 2, 4, then each multiple of 8 below the largest, and the largest."""
    return sorted(
        {size for size in (1, 2, 4, *range(8, max_batch_size, 8)) if size < max_batch_size} | {max_batch_size}
    )
