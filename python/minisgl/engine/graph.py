"""Steps recorded as CUDA graphs: decodes, decodes that begin with the same pages, and one short prompt.

A replay costs the host one call instead of hundreds, and the device no gaps between kernels. A step is two graphs: from
tokens to logits, and from logits to tokens; between them masks come, and the logits may be looked at. They read their
numbers from fixed places that are filled, by one copy, before each replay; tokens, slots and page lists they look up
themselves in the device's tables. What is smaller than a recorded size is padded with tokens of a row and a page of
nobody.
"""

# Dimension key: G tokens of a graph, R requests of a graph, D model width, V vocab.

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from minisgl.attention import BaseAttnMetadata
from minisgl.core import Batch, BatchPlan, IntArray, TableWrites
from minisgl.engine.choose import LogitsStep, TokenChooser
from minisgl.engine.record import record, unowned
from minisgl.engine.sample import BatchSamplingArgs, has_filters, sampling_arrays
from minisgl.kernel import cuda_kernels_for, look_up, scatter
from minisgl.layers import Context
from minisgl.utils.staging import Numbers, Staging

_PROMPTS = [32, 64, 128, 256, 512, 1024]
_PROMPT_WORK = (
    2 * 10**13
)  # tokens times bytes of weights: beyond, the device takes longer than the host to launch
_MIN_SHARED = 256  # tokens that all decodes must share, and
_MIN_SHARING = 16  # decodes that must share them, for it to pay


class Kind(Enum):
    """What a graph computes."""

    DECODES = "decodes"
    SHARING = "decodes that share their first pages"
    PROMPT = "a prompt"


Fit = tuple[Kind, int]  # a graph's kind and its size in tokens


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A step: the graph up to its logits, and what is needed for the rest. Tensors are valid after their replay."""

    metadata: BaseAttnMetadata
    graph: torch.cuda.CUDAGraph
    hidden_RD: Tensor
    step: LogitsStep


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a graph is fed of its tokens and of its requests.

    Attributes:
        row_G, position_G: where each token stands.
        extra_3: of a prompt, its row, the padding's row, and the last token's index; else the number of shared tokens.
        row_R, end_R: of the requests that sample.
        start_A, end_A: the slices that attention sees; of a prompt also its padding.
    """

    row_G: IntArray
    position_G: IntArray
    extra_3: IntArray
    row_R: IntArray
    end_R: IntArray
    start_A: IntArray
    end_A: IntArray


# A step that can start: its graph, what that is fed, how all is sent, and whether filters come apart from the graph.
Prepared = tuple[Fit, _Inputs, Callable[[], list[Tensor]], bool]


class GraphRunner:
    """Records and replays.

    Args:
        forward: from a batch to the hidden states that are sampled from, and their logits.
        context: of which the last row of the tables, and the pages in it, belong to nobody.
        weight_bytes: that a step reads.
        is_trial: record few of each kind, to see how much memory all would take.

    Attributes:
        missing_bytes: what those would take that a trial leaves out.
    """

    @torch.inference_mode()
    def __init__(
        self,
        forward: Callable[[Batch], tuple[Tensor, Tensor | None]],
        chooser: TokenChooser,
        context: Context,
        max_decodes: int,
        weight_bytes: int,
        *,
        is_trial: bool = False,
    ) -> None:
        self._forward = forward
        self._chooser = chooser
        self._context = context
        num_rows, self._num_row_tokens = context.token_pool_RL.shape
        self._idle_row, self._num_row_pages = num_rows - 1, context.page_table_RP.shape[1]
        self._idle_page = int(context.page_table_RP[-1, 0])
        self._records_filters = cuda_kernels_for(context.kv_pool.k_cache(0)) is not None
        max_prompt = min(_PROMPTS[-1], self._num_row_tokens, _PROMPT_WORK // weight_bytes)
        self._sizes = sizes(max_decodes, max_prompt)
        capacity = 16 * (
            max(max_decodes, max_prompt) + 4
        )  # it must not grow: more than `_load` ever loads
        self._staging = Staging(context.page_table_RP.device, capacity)
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[Fit, _Recorded] = {}
        self.missing_bytes = 0
        if is_trial:
            self._try()
        else:
            self._record_all(self._sizes)

    def _record_all(self, sizes: dict[Kind, list[int]]) -> None:
        """The largest of each kind first, which make the room that all share."""
        wanted = [(kind, size) for kind, sizes in sizes.items() for size in sizes[::-1]]
        for kind, size in tqdm(wanted, desc="Recording CUDA graphs", unit="graph", leave=False):
            self._recorded[kind, size] = self._record(kind, size)

    def _try(self) -> None:
        """Beside what the largest take, the others are assumed to take as much as a few of them do."""
        num_graphs = sum(map(len, self._sizes.values()))
        self._sizes = {kind: few(sizes) for kind, sizes in self._sizes.items()}
        self._record_all({kind: sizes[-1:] for kind, sizes in self._sizes.items()})
        num_largest, (free, _) = len(self._recorded), torch.cuda.mem_get_info()
        self._record_all({kind: sizes[:-1] for kind, sizes in self._sizes.items()})
        taken, num_few = free - torch.cuda.mem_get_info()[0], len(self._recorded) - num_largest
        self.missing_bytes = (num_graphs - len(self._recorded)) * max(0, taken) // max(1, num_few)

    def fit(self, plan: BatchPlan) -> Fit | None:
        """The graph for a plan, if there is one."""
        return fit(plan, self._sizes)

    def prepare(self, plan: BatchPlan, fit: Fit) -> Prepared:
        """What the host has to do for a plan.

        Args:
            plan: its writes have room (`has_room`).
        """
        inputs = self._inputs(plan, fit)
        sampling = sampling_arrays(plan.slices, inputs.end_R)
        filters_apart = not self._records_filters and has_filters(sampling)
        return fit, inputs, self._load(plan, inputs, sampling), filters_apart

    def replay(self, prepared: Prepared) -> tuple[Tensor, LogitsStep]:
        """hidden_RD of a plan and its padding, and its logits; valid until the next replay."""
        fit, inputs, send, filters_apart = prepared
        recorded, step = self._recorded[fit], self._recorded[fit].step
        send()
        self._context.attn_backend.prepare_replay(recorded.metadata, inputs.start_A, inputs.end_A)
        recorded.graph.replay()
        if filters_apart:
            step = replace(step, args=replace(step.args, is_filtered=True), recorded=None)
        return recorded.hidden_RD, step

    def _load(
        self, plan: BatchPlan, inputs: _Inputs, sampling: list[Numbers]
    ) -> Callable[[], list[Tensor]]:
        """All of a step, for one copy. What pads it has a page and a token written to places that nobody reads."""
        place_R = inputs.row_R * self._num_row_tokens + inputs.end_R
        place_R[len(plan.slices) :] = (self._idle_row + 1) * self._num_row_tokens - 1
        index_R = np.full(len(place_R), self._idle_row * self._num_row_pages, dtype=np.int32)
        page_R = np.full(len(place_R), self._idle_page, dtype=np.int32)
        num_writes = len(plan.writes.pages)
        index_R[:num_writes], page_R[:num_writes] = plan.writes.page_index, plan.writes.pages
        tokens = (inputs.row_G, inputs.position_G, inputs.extra_3)
        return self._staging.load(*tokens, index_R, page_R, place_R, *sampling)

    def _inputs(self, plan: BatchPlan, fit: Fit) -> _Inputs:
        """Without slices, of padding alone."""
        kind, size = fit
        row_G, end_G = np.full(size, self._idle_row, dtype=np.int32), np.ones(size, dtype=np.int32)
        extra_3 = np.zeros(3, dtype=np.int32)
        if kind is not Kind.PROMPT:
            num = len(plan.slices)
            row_G[:num], end_G[:num] = (
                [part.row for part in plan.slices],
                [part.end for part in plan.slices],
            )
            extra_3[0] = plan.num_shared_tokens
            return _Inputs(row_G, end_G - 1, extra_3, row_G, end_G, end_G - 1, end_G)
        row, start, end = next(
            ((part.row, part.start, part.end) for part in plan.slices), (self._idle_row, 0, 1)
        )
        length = end - start
        row_G[:length] = row
        position_G = np.concatenate(
            (np.arange(start, end), np.arange(size - length)), dtype=np.int32
        )
        extra_3[:] = row, self._idle_row, length - 1
        start_A, end_A = (
            np.array([start, 0], dtype=np.int32),
            np.array([end, size - length], dtype=np.int32),
        )
        return _Inputs(row_G, position_G, extra_3, row_G[:1], end_A[:1], start_A, end_A)

    def _record(self, kind: Kind, size: int) -> _Recorded:
        nothing = BatchPlan([])
        inputs = self._inputs(nothing, (kind, size))
        send = self._load(nothing, inputs, sampling_arrays([], inputs.end_R))
        row_G, position_G, extra_3, index_R, page_R, place_R, *sampling = send()
        context, backend = self._context, self._context.attn_backend
        if kind is Kind.PROMPT:
            metadata, last_1 = backend.prepare_capture(extra_3[:2], size), extra_3[2:]
        else:
            shared_1 = extra_3[:1] if kind is Kind.SHARING else None
            metadata, last_1 = backend.prepare_capture(row_G, size, shared_1), None

        def forward() -> tuple[Tensor, Tensor | None]:
            scatter(context.page_table_RP, index_R, page_R)
            tables = (context.token_pool_RL, context.page_table_RP)
            input_ids_G, slot_G = look_up(row_G, position_G, *tables, context.kv_pool.page_size)
            return self._forward(Batch(row_G, position_G, input_ids_G, slot_G, last_1, metadata))

        graph, (hidden_RD, logits_RV) = record(forward, self._pool)
        step = LogitsStep(
            logits_RV, BatchSamplingArgs(self._records_filters, True, *sampling), place_R
        )
        recorded = record(lambda: self._chooser.choose(step), self._pool)
        logits_RV = None if logits_RV is None else unowned(logits_RV)
        return _Recorded(
            metadata, graph, hidden_RD, replace(step, logits_BV=logits_RV, recorded=recorded)
        )


def has_room(writes: TableWrites, fit: Fit) -> bool:
    """Whether a graph can do the writes of its step: no tokens, and at most one page a request."""
    kind, size = fit
    return len(writes.tokens) == 0 and len(writes.pages) <= (1 if kind is Kind.PROMPT else size)


def few(sizes: list[int]) -> list[int]:
    """The smallest, one in the middle, and the two largest."""
    return [
        size
        for i, size in enumerate(sizes)
        if i in (0, len(sizes) // 2, len(sizes) - 2, len(sizes) - 1)
    ]


def sizes(max_decodes: int, max_prompt: int) -> dict[Kind, list[int]]:
    """What is recorded, smallest first; of decodes that share every second size."""
    decodes = ladder(max_decodes)
    return {
        Kind.DECODES: decodes,
        Kind.SHARING: [
            size
            for size in decodes
            if size >= _MIN_SHARING and (size % 16 == 0 or size == max_decodes)
        ],
        Kind.PROMPT: [size for size in _PROMPTS if size <= max_prompt],
    }


def fit(plan: BatchPlan, recorded: dict[Kind, list[int]]) -> Fit | None:
    """The smallest recorded graph that takes a plan, if there is one."""
    num_tokens = len(plan.slices)
    if all(part.samples and part.start + 1 == part.end for part in plan.slices):
        can_share = plan.num_shared_tokens >= _MIN_SHARED and num_tokens >= _MIN_SHARING
        kind = Kind.SHARING if can_share else Kind.DECODES
    elif len(plan.slices) == 1 and plan.slices[0].num_hidden_states <= 1:
        kind, num_tokens = Kind.PROMPT, len(plan.slices[0])
    else:
        return None
    size = next((size for size in recorded[kind] if size >= num_tokens), None)
    return None if size is None else (kind, size)


def ladder(largest: int) -> list[int]:
    """1, 2, 4, then multiples of 8, and the largest."""
    steps = itertools.chain((1, 2, 4), range(8, largest, 8))
    return [*(size for size in steps if size < largest), largest]
