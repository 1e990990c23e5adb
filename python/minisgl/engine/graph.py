"""Steps recorded as CUDA graphs: decodes, decodes that begin with the same pages, and one short prompt.

A replay costs the host one call instead of hundreds, and the device no gaps between kernels. A graph reads its rows and
positions from fixed places that are filled before each replay; tokens, slots and page lists it looks up itself in the
device's tables. What is smaller than a recorded size is padded with tokens of a row and a page of nobody.
"""

# Dimension key: G tokens of a graph, R requests of a graph, D model width.

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from minisgl.attention import BaseAttnMetadata
from minisgl.core import Batch, BatchPlan, Context, IntArray
from minisgl.kernel import look_up
from minisgl.utils.staging import Staging

_PROMPTS = [32, 64, 128, 256, 512, 1024]
_PROMPT_WORK = 2 * 10**13  # tokens times bytes of weights: beyond, the device takes longer than the host to launch
_MIN_SHARED = 256  # tokens that all decodes must share, and
_MIN_SHARING = 16  # decodes that must share them, for it to pay


class Kind(Enum):
    """What a graph computes."""

    DECODES = "decodes"
    SHARING = "decodes that share their first pages"
    PROMPT = "a prompt"


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    metadata: BaseAttnMetadata
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a graph is fed: the row and position of each token, and three numbers whose meaning is its kind's.

    Attributes:
        extra_3: of a prompt, its row, the padding's row, and the last token's index; else the number of shared tokens.
    """

    row_G: IntArray
    position_G: IntArray
    extra_3: IntArray


class GraphRunner:
    """Records and replays.

    Args:
        forward: from a batch to the hidden states that are sampled from.
        idle_row: a row of the tables whose page belongs to nobody.
        weight_bytes: that a step reads.
    """

    @torch.inference_mode()
    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        context: Context,
        max_decodes: int,
        idle_row: int,
        weight_bytes: int,
    ) -> None:
        self._forward = forward
        self._context = context
        self._idle_row = idle_row
        max_prompt = min(_PROMPTS[-1], context.token_pool_RL.shape[1], _PROMPT_WORK // weight_bytes)
        self._sizes = sizes(max_decodes, max_prompt)
        self._staging = Staging(context.page_table_RP.device, capacity=2 * max(max_decodes, max_prompt) + 3)
        self._pool = torch.cuda.graph_pool_handle()
        wanted = [(kind, size) for kind, sizes in self._sizes.items() for size in sizes[::-1]]
        self._recorded = {
            (kind, size): self._record(kind, size)
            for kind, size in tqdm(wanted, desc="Recording CUDA graphs", unit="graph", leave=False)
        }

    def fit(self, plan: BatchPlan) -> tuple[Kind, int] | None:
        """The graph for a plan, if there is one."""
        return fit(plan, self._sizes)

    def run(self, plan: BatchPlan, fit: tuple[Kind, int]) -> Tensor:
        """hidden_BD of a plan; valid until the next run."""
        kind, size = fit
        recorded = self._recorded[fit]
        if kind is Kind.PROMPT:
            [part] = plan.slices
            padding = size - len(part)
            inputs = self._inputs(size, [part.row] * len(part), range(part.start, part.end))
            inputs.position_G[len(part) :] = np.arange(padding)
            inputs.extra_3[:] = part.row, self._idle_row, len(part) - 1
            start_R, end_R = np.array([part.start, 0], dtype=np.int32), np.array([part.end, padding], dtype=np.int32)
        else:
            inputs = self._inputs(size, [part.row for part in plan.slices], [part.start for part in plan.slices])
            inputs.extra_3[0] = plan.num_shared
            start_R, end_R = inputs.position_G, inputs.position_G + 1
        self._staging.send(inputs.row_G, inputs.position_G, inputs.extra_3)
        self._context.attn_backend.prepare_replay(recorded.metadata, start_R, end_R)
        recorded.graph.replay()
        return recorded.hidden[: len(plan.slices)]

    def _inputs(self, size: int, rows: list[int], positions: list[int] | range) -> _Inputs:
        inputs = _Inputs(
            np.full(size, self._idle_row, dtype=np.int32), np.zeros(size, dtype=np.int32), np.zeros(3, dtype=np.int32)
        )
        inputs.row_G[: len(rows)], inputs.position_G[: len(rows)] = rows, positions
        return inputs

    def _record(self, kind: Kind, size: int) -> _Recorded:
        idle = self._inputs(size, [], [])
        idle.extra_3[:2] = self._idle_row
        row_G, position_G, extra_3 = self._staging.send(idle.row_G, idle.position_G, idle.extra_3)
        backend = self._context.attn_backend
        if kind is Kind.PROMPT:
            metadata, last_1 = backend.prepare_capture(extra_3[:2], size), extra_3[2:]
        else:
            shared_1 = extra_3[:1] if kind is Kind.SHARING else None
            metadata, last_1 = backend.prepare_capture(row_G, size, shared_1), None

        def run() -> Tensor:
            tables = (self._context.token_pool_RL, self._context.page_table_RP)
            input_ids_G, slot_G = look_up(row_G, position_G, *tables, self._context.kv_pool.page_size)
            return self._forward(Batch(row_G, position_G, input_ids_G, slot_G, last_1, metadata))

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # what is compiled or allocated once is not to be recorded
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # NCCL's threads go on
            hidden = run()
        return _Recorded(graph, metadata, hidden)


def sizes(max_decodes: int, max_prompt: int) -> dict[Kind, list[int]]:
    """What is recorded, smallest first; of decodes that share every second size."""
    decodes = ladder(max_decodes)
    return {
        Kind.DECODES: decodes,
        Kind.SHARING: [size for size in decodes if size >= _MIN_SHARING and (size % 16 == 0 or size == max_decodes)],
        Kind.PROMPT: [size for size in _PROMPTS if size <= max_prompt],
    }


def fit(plan: BatchPlan, recorded: dict[Kind, list[int]]) -> tuple[Kind, int] | None:
    """The smallest recorded graph that takes a plan, if there is one."""
    num_tokens = len(plan.slices)
    if all(len(part) == 1 and part.samples for part in plan.slices):
        can_share = plan.num_shared >= _MIN_SHARED and num_tokens >= _MIN_SHARING
        kind = Kind.SHARING if can_share else Kind.DECODES
    elif len(plan.slices) == 1 and plan.slices[0].num_wanted <= 1:
        kind, num_tokens = Kind.PROMPT, len(plan.slices[0])
    else:
        return None
    size = next((size for size in recorded[kind] if size >= num_tokens), None)
    return None if size is None else (kind, size)


def ladder(largest: int) -> list[int]:
    """1, 2, 4, then multiples of 8, and the largest."""
    steps = itertools.chain((1, 2, 4), range(8, largest, 8))
    return [*(size for size in steps if size < largest), largest]
