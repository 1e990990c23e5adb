"""Steps captured as graphs: decodes, and steps with prompts.

A replay costs the host one call instead of hundreds, and leaves no gaps between the kernels of a
GPU. A step is two graphs: from tokens to logits, and from logits to tokens. Between them the host
writes grammar masks, and the logits may be read. The graphs read their numbers at fixed addresses,
to which one copy goes before each replay. Tokens, slots and lists of pages are looked up on the
device, in the tables. A plan that is smaller than its graph is padded with tokens of the padding
row, which has only the padding page.
"""

# Dimensions: B requests of a step, or of a captured graph, D model width, P pages,
# L positions of a sequence, R rows of the tables, T tokens of a step, or of a captured graph,
# V vocabulary, X a selection out of another dimension, Y tokens whose hidden states are returned,
# Z entries of a flat list.

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from minisgl.core import NO_WRITES, Batch, BatchPlan, IntArray, Queries, TableWrites
from minisgl.engine.graphs.capture import Graph, GraphCapture, unowned
from minisgl.engine.graphs.inputs import (
    GraphInputs,
    GraphNumbers,
    captured_queries,
    graph_inputs,
)
from minisgl.engine.graphs.key import (
    GraphKey,
    GraphKeys,
    find_graph_key,
    unpadded_prompt_sizes,
)
from minisgl.engine.graphs.sizes import some_keys
from minisgl.engine.sampler import Sampler, SamplingGraph, SamplingInputs
from minisgl.engine.sampling_batch import (
    SamplingArrays,
    SamplingNumbers,
    has_filters,
    has_masks,
    sampling_arrays,
)
from minisgl.kernel import CannotBeCaptured, has_filter_kernels, look_up, scatter
from minisgl.layers import Context
from minisgl.utils.progress import ProgressBar
from minisgl.utils.staging import Numbers, StagedCopy, fixed_staging

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
ForwardFunction = Callable[[Batch], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """The graphs of a step. Tensors are valid from the replay that makes them to the next one.

    Attributes:
        queries, returned: as in `Batch`. A replay updates their metadata.
        forward_graph: from the inputs to hidden states and logits.
        hidden_YD: what the forward graph leaves, with padding.
        logits_BV, sampling, sampled_index_B: of `SamplingInputs`, whose `numbers` are `sampling`.
        sampling_graphs: from logits to tokens, by whether they apply filters. Without one, tokens
            are chosen eagerly.
    """

    queries: Queries
    returned: Queries | None
    forward_graph: Graph
    hidden_YD: Tensor
    logits_BV: Tensor
    sampling: SamplingNumbers[Tensor]
    sampled_index_B: Tensor
    sampling_graphs: dict[bool, SamplingGraph]


@dataclass(slots=True)
class PreparedReplay:
    """All that a captured step needs to start. Not frozen, to be made fast.

    Attributes:
        copy: the inputs, the table writes and the sampling parameters, ready to go to where the
            graph reads them.
        sampling_inputs: the logits and numbers for the sampler; valid after the replay.
    """

    key: GraphKey
    inputs: GraphInputs
    copy: StagedCopy
    sampling_inputs: SamplingInputs


class GraphRunner:
    """Captures all graphs when it is made, and replays them.

    Args:
        capture: of the engine's device.
        keys: of each kind, smallest first. Those that cannot be captured are left out. If none is
            left, every step runs eagerly.
        forward: from a batch to the hidden states that are returned, and the logits of those that
            are sampled.
        context: the last row of its tables is the padding row, and the page in it the padding page.
        few_graphs: capture few of each kind, to estimate how much memory all would take.

    Attributes:
        bytes_not_captured: estimated memory of the graphs that are left out where few are captured.
    """

    @torch.inference_mode()
    def __init__(
        self,
        capture: GraphCapture,
        keys: GraphKeys,
        forward: ForwardFunction,
        sampler: Sampler,
        context: Context,
        *,
        few_graphs: bool = False,
    ) -> None:
        self._device_capture = capture
        self._keys = keys
        self._forward = forward
        self._sampler = sampler
        self._context = context
        num_rows, self._num_row_tokens = context.token_pool_RL.shape
        self._num_row_pages = context.page_table_RP.shape[1]
        self._padding_row = num_rows - 1
        self._padding_page = int(context.page_table_RP[-1, 0])
        # Over a whole vocabulary one graph from logits to tokens serves all steps: to look for a
        # filter where there is none takes no time. Over a sharded one, logits of all ranks would be
        # joined for nothing, so there are two.
        self._captures_filters = has_filter_kernels(context.kv_pool.k_cache(0))
        self._always_filters = self._captures_filters and sampler.vocab.is_whole

        # The graphs read from here, so it must never grow: this is more than `_stage` ever needs.
        sizes = (key.num_tokens + key.num_slices for some in keys.values() for key in some)
        largest = max(sizes, default=0)
        self._staging = fixed_staging(context.page_table_RP.device, 16 * (largest + 4))
        self._captured: dict[GraphKey, CapturedStep] = {}
        self.bytes_not_captured = 0
        started = time.monotonic()
        if few_graphs:
            self._capture_some()
        else:
            self._capture_each(self._keys)
        seconds = time.monotonic() - started
        logger.debug("%d steps are captured in %.2f s", len(self._captured), seconds)

    def find_key(self, plan: BatchPlan) -> GraphKey | None:
        """Which graph takes a plan, if there is one."""
        return find_graph_key(plan, self._keys)

    def unpadded_prompt_sizes(self, num_decodes: int) -> list[int]:
        """How many tokens of prompts the graphs have room for beside so many decodes, ascending."""
        return unpadded_prompt_sizes(self._keys, num_decodes)

    def prepare(self, plan: BatchPlan, writes: TableWrites, key: GraphKey) -> PreparedReplay:
        """Do the host work of a plan.

        Args:
            writes: those that the graph does; it has room for them (`has_room_for_writes`). Those
                of the plan are not read.
        """
        inputs = graph_inputs(plan, key, self._padding_row)
        sampling = sampling_arrays(inputs.sampling_slices, inputs.end_B)
        copy = self._stage(key, inputs, writes, sampling)
        captured = self._captured[key]
        sampling_inputs = SamplingInputs(
            captured.logits_BV,
            captured.sampling,
            captured.sampled_index_B,
            is_filtered=self._always_filters or has_filters(sampling),
            is_masked=has_masks(sampling),
        )
        return PreparedReplay(key, inputs, copy, sampling_inputs)

    def replay(self, prepared: PreparedReplay) -> tuple[Tensor, SamplingInputs]:
        """Compute a captured step up to its logits.

        Returns:
            hidden_YD and what is sampled from, both with padding; valid until the next replay.
        """
        captured = self._captured[prepared.key]
        inputs = prepared.inputs
        prepared.copy.start()
        update_metadata = self._context.attn_backend.update_metadata
        update_metadata(captured.queries.attn_metadata, inputs.attn_start_X, inputs.attn_end_X)
        if captured.returned is not None:
            update_metadata(captured.returned.attn_metadata, inputs.end_B - 1, inputs.end_B)
        captured.forward_graph.replay()
        return captured.hidden_YD, prepared.sampling_inputs

    def sampling_graph(self, key: GraphKey, *, is_filtered: bool) -> SamplingGraph | None:
        """The graph that chooses the tokens of a captured step; None if there is none."""
        return self._captured[key].sampling_graphs.get(is_filtered)

    def _stage(
        self, key: GraphKey, inputs: GraphInputs, writes: TableWrites, sampling: SamplingArrays
    ) -> StagedCopy:
        """All numbers of a step, for one copy.

        Each slice of a graph writes the token that it samples. Padding writes the padding page to
        where it stands, and a token to the last position of the padding row, which is never read.
        """
        unread = (self._padding_row + 1) * self._num_row_tokens - 1
        sampled_index_B = inputs.row_B * self._num_row_tokens + inputs.end_B
        sampled_index_B[len(inputs.sampling_slices) :] = unread

        num_pages = key.num_page_writes(self._context.kv_pool.page_size)
        num_tokens = key.num_token_writes
        padding_index = self._padding_row * self._num_row_pages
        page_index_Z = _padded(writes.page_index, num_pages, padding_index)
        page_Z = _padded(writes.pages, num_pages, self._padding_page)
        token_index_Z = _padded(writes.token_index, num_tokens, unread)
        token_Z = _padded(writes.tokens, num_tokens, 0)
        numbers: GraphNumbers[Numbers] = GraphNumbers(
            page_writes=(page_index_Z, page_Z),
            token_writes=(token_index_Z, token_Z),
            sampled_index=sampled_index_B,
            sampling=sampling,
            tokens=inputs.token_arrays(),
        )
        return self._staging.stage(*numbers.in_order())

    def _capture_each(self, keys: GraphKeys) -> None:
        """Capture the largest of each kind first: they allocate the memory that all then share."""
        largest_first = [key for some in keys.values() for key in some[::-1]]
        for key in ProgressBar(largest_first, desc="Capturing graphs", unit="graph", leave=False):
            if key not in self._keys[key.kind]:
                continue
            try:
                self._captured[key] = self._capture(key)
            except CannotBeCaptured as error:
                num_tokens = key.num_tokens
                logger.debug("%s of %d tokens run eagerly: %s", key.kind.value, num_tokens, error)
                self._leave_out(key)

    def _leave_out(self, key: GraphKey) -> None:
        """Leave out a key, and all remaining ones if the smallest cannot be captured either."""
        keys = self._keys[key.kind]
        try:
            self._capture(keys[0])
        except CannotBeCaptured:
            keys[:] = [other for other in keys if other in self._captured]
        else:
            keys.remove(key)

    def _capture_some(self) -> None:
        """Estimate the memory of all graphs by the largest and a few others."""
        num_graphs = sum(map(len, self._keys.values()))
        self._keys = {kind: some_keys(keys) for kind, keys in self._keys.items()}

        self._capture_each({kind: keys[-1:] for kind, keys in self._keys.items()})
        num_largest = len(self._captured)
        free_before = torch.cuda.mem_get_info()[0]
        self._capture_each({kind: keys[:-1] for kind, keys in self._keys.items()})
        num_others = len(self._captured) - num_largest
        taken = max(0, free_before - torch.cuda.mem_get_info()[0])

        num_missing = num_graphs - len(self._captured)
        self.bytes_not_captured = num_missing * taken // max(1, num_others)

    def _capture(self, key: GraphKey) -> CapturedStep:
        """The graphs of a key, over padding alone."""
        inputs = graph_inputs(BatchPlan([]), key, self._padding_row)
        copy = self._stage(key, inputs, NO_WRITES, sampling_arrays([], inputs.end_B))
        numbers = GraphNumbers.of(copy.start())
        make_metadata = self._context.attn_backend.make_capture_metadata
        queries, returned = captured_queries(key, numbers.tokens, make_metadata)
        call = _ForwardCall(
            self._forward,
            self._context,
            numbers.page_writes,
            numbers.token_writes,
            queries,
            returned,
        )
        forward_graph, (hidden_YD, logits_BV) = self._capture_call(key, call)
        return CapturedStep(
            queries=queries,
            returned=returned,
            forward_graph=forward_graph,
            hidden_YD=hidden_YD,
            logits_BV=unowned(logits_BV),  # the next graph uses their memory, too
            sampling=numbers.sampling,
            sampled_index_B=numbers.sampled_index,
            sampling_graphs=self._capture_sampling(key, logits_BV, numbers),
        )

    def _capture_sampling(
        self, key: GraphKey, logits_BV: Tensor, numbers: GraphNumbers[Tensor]
    ) -> dict[bool, SamplingGraph]:
        """The graphs from logits to tokens of a step, by whether they look at filters."""
        graphs: dict[bool, SamplingGraph] = {}
        for is_filtered in sorted({self._always_filters, self._captures_filters}):
            inputs = SamplingInputs(
                logits_BV,
                numbers.sampling,
                numbers.sampled_index,
                is_filtered=is_filtered,
                is_masked=True,
            )
            sample = partial(self._sampler.sample, inputs)
            graphs[is_filtered] = SamplingGraph(*self._capture_call(key, sample))
        return graphs

    def _capture_call(self, key: GraphKey, call: Callable[[], ResultT]) -> tuple[Graph, ResultT]:
        """Capture a call of a step. The calls of the first step of each kind are rehearsed."""
        if all(other.kind is not key.kind for other in self._captured):
            self._device_capture.rehearse(call)
        return self._device_capture.capture(call)


def _padded(numbers: IntArray, length: int, padding: int) -> IntArray:
    padded = np.full(length, padding, dtype=np.int32)
    padded[: len(numbers)] = numbers
    return padded


@dataclass(frozen=True, slots=True)
class _ForwardCall:
    """What the first graph of a step captures: table writes, look-up of tokens and slots, model.

    Attributes:
        page_writes, token_writes: int32, flat indices into the tables, and what is written there.
        queries, returned: as in `Batch`.
    """

    forward: ForwardFunction
    context: Context
    page_writes: tuple[Tensor, Tensor]
    token_writes: tuple[Tensor, Tensor]
    queries: Queries
    returned: Queries | None

    def __call__(self) -> tuple[Tensor, Tensor]:
        context = self.context
        position_T = self.queries.position_X
        scatter(context.page_table_RP, *self.page_writes)
        if len(self.token_writes[0]):
            scatter(context.token_pool_RL, *self.token_writes)
        input_ids_T, slot_T = look_up(
            self.queries.row_X,
            position_T,
            context.token_pool_RL,
            context.page_table_RP,
            context.kv_pool.page_size,
        )
        return self.forward(Batch(input_ids_T, position_T, slot_T, self.queries, self.returned))
