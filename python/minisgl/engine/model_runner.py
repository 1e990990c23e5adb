"""Runs steps: a plan is prepared, then launched, then its tokens are sampled.

                 eager step                        captured step
    prepare      nothing                           all host work, `GraphRunner.prepare`
    launch       tables, `Batch`, model, logits    one copy and one graph, `GraphRunner.replay`
    sample       `Sampler.sample`                  a second graph, or `Sampler.sample`

Owns the KV pool, the device's page table and token pool, and the captured graphs. Tokens stay on
the device between steps: a step writes sampled tokens to the token pool, and the next step reads
its inputs there. So the host can plan a step before it knows the tokens of the one before. Next to
read, in the order of the data's way: `batch_builder.py`, `kernel/tables.py`; `models/base.py`;
`sampling_batch.py`, `sampler.py`, `sampled_step.py`.
"""

# Dimensions: B requests of a step, D model width, L positions of a sequence, P pages, R rows of the
# tables, V vocabulary, W words of 32 bits, X a selection out of another dimension, Y tokens whose
# hidden states are returned, Z entries of a flat list.

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import create_attention_backend
from minisgl.config import EngineConfig
from minisgl.core import NO_WRITES, Batch, BatchPlan, IntArray, RowCopy, TableWrites
from minisgl.engine.batch_builder import (
    BatchBuilder,
    EagerPadding,
    batch_capacity,
    eager_multiple,
    index_of_sampling,
)
from minisgl.engine.graphs.capture import CpuGraphCapture, CudaGraphCapture
from minisgl.engine.graphs.key import GraphKeys, GraphKind, has_room_for_writes
from minisgl.engine.graphs.runner import GraphRunner
from minisgl.engine.graphs.sizes import (
    cpu_graph_keys,
    gpu_graph_keys,
    most_decodes,
    most_tokens_with_prompts,
)
from minisgl.engine.limits import EngineLimits, most_tokens
from minisgl.engine.memory import free_if_out_of_memory
from minisgl.engine.model_loader import LoadedModel
from minisgl.engine.prompt_outputs import PromptOutputs
from minisgl.engine.sampled_step import HostCopier, SampledStep
from minisgl.engine.sampler import Sampler, SamplingGraph, SamplingInputs, sampler_capacity
from minisgl.engine.steps import LaunchedStep, PreparedStep
from minisgl.errors import ConfigError
from minisgl.kernel import (
    load_cpu_kernels,
    most_of_cpu_kernel,
    scatter,
    sizes_without_padding,
)
from minisgl.kvcache import MHAKVCache
from minisgl.layers import Context
from minisgl.moe import create_moe_backend, expert_shape
from minisgl.utils.staging import Staging, capacity_for

# On a CPU an eager step pays if it has this many times the prompt tokens of the largest captured
# one.
_EAGER_PAYS = 1.4
_MAX_WRITES = 1 << 15  # of a table, that go to the device in one copy


class ModelRunner:
    """Runs steps of one rank over a pool of a given size.

    It captures its graphs when it is made.

    Args:
        limits: of the pool and the tables.
        few_graphs: capture few graphs, to estimate how much memory all would take.

    Attributes:
        context: the tables, the pool and the backends.
        grammar_masks: int32 [X, W], as `mask_logits` takes them: where those of a step are put
            before its tokens are chosen.

    Raises:
        ConfigError: the limits are too large for the tables.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        limits: EngineLimits,
        *,
        few_graphs: bool = False,
    ) -> None:
        self.limits = limits
        self._loaded = loaded
        self._model = loaded.model
        self._vocab = loaded.vocab
        self._device = loaded.device
        self.context = self._make_context()

        assert config.max_prefill_length
        self._most_prompt_tokens = config.max_prefill_length
        multiple = eager_multiple(self._device)
        padding = EagerPadding(limits.num_rows, multiple, longest=limits.num_row_tokens - 1)
        num_tokens = padding.padded(most_tokens(config, limits.num_rows))
        # Sends what every step needs before its model runs.
        self._staging = Staging(self._device, batch_capacity(num_tokens, limits.num_rows))
        # Sends what few steps need, at any time.
        capacity = sampler_capacity(limits.num_rows, len(limits.eos_ids))
        self._extra_staging = Staging(self._device, max(capacity, 2 * capacity_for(_MAX_WRITES)))
        self._host_copier = HostCopier(self._device, limits.num_rows)

        self._batch_builder = BatchBuilder(self.context, self._staging, padding)
        self._sampler = Sampler(
            self._vocab, self.context.token_pool_RL, limits.eos_ids, self._extra_staging
        )
        self.grammar_masks: IntArray = self._sampler.masks_XW.numpy()
        self._graphs = self._make_graph_runner(config, few_graphs=few_graphs)

    def _make_context(self) -> Context:
        """Tables and pool have a padding row and a padding page after those of the scheduler."""
        limits = self.limits
        loaded = self._loaded
        pool = MHAKVCache(
            *loaded.kv_shape, limits.num_pages + 1, limits.page_size, loaded.dtype, self._device
        )
        page_table_RP = self._zeros(limits.num_rows + 1, limits.num_row_pages)
        page_table_RP.fill_(limits.num_pages)
        num_heads = len(loaded.comm.info.shard_heads(loaded.config.num_heads))
        return Context(
            page_table_RP=page_table_RP,
            token_pool_RL=self._zeros(limits.num_rows + 1, limits.num_row_tokens),
            kv_pool=pool,
            attn_backend=create_attention_backend(
                loaded.attn, pool, page_table_RP, num_heads, loaded.config.attention
            ),
            moe_backend=create_moe_backend(
                self._device,
                loaded.dtype,
                expert_shape(loaded.config, loaded.comm.info, loaded.dtype),
            ),
        )

    def _zeros(self, *shape: int) -> Tensor:
        if math.prod(shape) >= 2**31:
            limits = self.limits
            most = (2**31 - 1) // limits.num_row_tokens - 1  # and a padding row
            raise ConfigError(
                f"--max-running-requests must be <= {most} with a context of "
                f"{limits.max_seq_len} tokens, got {limits.num_rows}"
            )
        return torch.zeros(shape, dtype=torch.int32, device=self._device)

    def _make_graph_runner(self, config: EngineConfig, *, few_graphs: bool) -> GraphRunner:
        """The runner, which captures when it is made."""
        on_gpu = self._device.type == "cuda"
        return GraphRunner(
            CudaGraphCapture() if on_gpu else CpuGraphCapture(load_cpu_kernels()),
            self._graph_keys(config),
            self._forward_to_logits,
            self._sampler,
            self.context,
            few_graphs=few_graphs,
        )

    def _graph_keys(self, config: EngineConfig) -> GraphKeys:
        """The graphs to capture: none if the option or the attention backend forbids it."""
        max_decodes = most_decodes(config.cuda_graph_max_bs, self.limits.num_rows)
        if max_decodes == 0 or not self.context.attn_backend.can_be_captured:
            return {kind: [] for kind in GraphKind}
        max_tokens = self.limits.num_row_tokens - 1
        if self._device.type == "cpu":
            return cpu_graph_keys(max_decodes, max_tokens, most_of_cpu_kernel())
        weight_bytes = self._loaded.multiplied_bytes
        return gpu_graph_keys(max_decodes, most_tokens_with_prompts(max_tokens, weight_bytes))

    def unpadded_prompt_sizes(self, num_decodes: int) -> list[int]:
        """Numbers of prompt tokens that need no padding beside `num_decodes` decodes, ascending.

        First are those that captured steps have room for, then, on a CPU, those of eager steps.
        There may be none.
        """
        captured = self._graphs.unpadded_prompt_sizes(num_decodes)
        if self._device.type != "cpu" or self._loaded.dtype != torch.bfloat16:
            return captured
        fewest = _EAGER_PAYS * captured[-1] if captured else 0
        sizes = sizes_without_padding(num_decodes, self._most_prompt_tokens)
        return captured + [size for size in sizes if size > fewest]

    @property
    def bytes_not_captured(self) -> int:
        """Estimated memory of the graphs that are left out where few are captured."""
        return self._graphs.bytes_not_captured

    def captures(self, plan: BatchPlan) -> bool:
        """Whether a captured step takes a plan."""
        return self._graphs.find_key(plan) is not None

    def prepare(self, plan: BatchPlan) -> PreparedStep:
        """Do the host work that is possible before the previous step is sampled.

        That is all host work of a captured step, and none of an eager one.

        Raises:
            StepOutOfMemory: the device's memory is full; the step can be planned again.
        """
        return free_if_out_of_memory(self._prepare, plan)

    def _prepare(self, plan: BatchPlan) -> PreparedStep:
        key = self._graphs.find_key(plan)
        if key is None:
            return PreparedStep(plan, plan.writes)
        if has_room_for_writes(key, plan.writes, self.limits.page_size):
            return PreparedStep(plan, NO_WRITES, self._graphs.prepare(plan, plan.writes, key))
        return PreparedStep(plan, plan.writes, self._graphs.prepare(plan, NO_WRITES, key))

    def launch(self, prepared: PreparedStep) -> LaunchedStep:
        """Start computing logits. The previous step must have been sampled.

        Raises:
            StepOutOfMemory: the device's memory is full. The table writes of the plan may be done
                in part. The step can be planned again with the same writes.
        """
        return free_if_out_of_memory(self._launch, prepared)

    @torch.inference_mode()
    def _launch(self, prepared: PreparedStep) -> LaunchedStep:
        plan = prepared.plan
        self._write_tables(prepared.writes)

        replay = prepared.replay
        if replay is None:
            hidden_YD, sampling_inputs = self._run_eagerly(plan)
        else:
            hidden_YD, sampling_inputs = self._graphs.replay(replay)

        prompt_outputs = PromptOutputs.of(
            plan, hidden_YD, self._collect_logits, self.context.token_pool_RL
        )
        graph_key = replay.key if replay else None
        return LaunchedStep(plan.sampling_slices, sampling_inputs, graph_key, prompt_outputs)

    def _write_tables(self, writes: TableWrites) -> None:
        page_table_RP = self.context.page_table_RP
        token_pool_RL = self.context.token_pool_RL
        self._scatter(page_table_RP, writes.page_index, writes.pages)
        self._scatter(token_pool_RL, writes.token_index, writes.tokens)
        if writes.copies:
            self._copy_rows(writes.copies)

    def _copy_rows(self, copies: Sequence[RowCopy]) -> None:
        """Copy rows in this order; those that follow each other and begin like one row, at once."""
        targets = np.array([copy.target for copy in copies], dtype=np.int32)
        [target_Z] = self._extra_staging.send(targets)
        page_table_RP = self.context.page_table_RP
        token_pool_RL = self.context.token_pool_RL
        end = 0
        for (source, num_tokens), alike in groupby(copies, key=attrgetter("source", "num_tokens")):
            begin = end
            end += len(list(alike))
            target_X = target_Z[begin:end]
            num_pages = num_tokens // self.limits.page_size
            for table, length in ((page_table_RP, num_pages), (token_pool_RL, num_tokens)):
                table[:, :length][target_X] = table[source, :length].clone()

    def _scatter(self, table: Tensor, index: IntArray, values: IntArray) -> None:
        """Write to a table, in pieces: the buffers on the way need not hold a whole context."""
        for begin in range(0, len(index), _MAX_WRITES):
            piece = slice(begin, begin + _MAX_WRITES)
            index_Z, value_Z = self._extra_staging.send(index[piece], values[piece])
            scatter(table, index_Z, value_Z)

    def _run_eagerly(self, plan: BatchPlan) -> tuple[Tensor, SamplingInputs]:
        """The hidden states that are returned, and the logits of the slices that sample."""
        batch, sampling_inputs = self._batch_builder.build(plan)
        hidden_YD = self._model.forward(batch, self.context)
        if plan.sampling_slices:
            hidden_BD = hidden_YD
            if plan.returns_all:  # else one for each slice that samples
                hidden_BD = hidden_YD[self._sampler.to_device_index(index_of_sampling(plan))]
            sampling_inputs.logits_BV = self._model.logits(hidden_BD)
        return hidden_YD, sampling_inputs

    def _collect_logits(self, hidden_XD: Tensor) -> Tensor | None:
        """Logits of the whole vocabulary on rank 0, None on the others."""
        return self._vocab.collect(self._model.logits(hidden_XD))

    def _forward_to_logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The call that a graph captures: every returned hidden state also becomes logits."""
        hidden_YD = self._model.forward(batch, self.context)
        return hidden_YD, self._model.logits(hidden_YD)

    @torch.inference_mode()
    def sample(self, launched: LaunchedStep) -> SampledStep:
        """Start choosing the tokens of the step that was launched last.

        The steps after it find them in the token pool.
        """
        prompt_outputs = launched.prompt_outputs
        if not launched.sampling_slices:
            empty = torch.empty(0, dtype=torch.int32, device=self._device)
            return self._host_copier.start(empty, None, prompt_outputs)

        # No local variable holds the graph: if an exception is raised, its traceback would keep the
        # graph alive, and NCCL could not leave its group.
        sampled = self._sampler.sample_slices(
            launched.sampling_slices, launched.sampling_inputs, self._sampling_graph(launched)
        )
        return self._host_copier.start(sampled.token_B, sampled.logprobs, prompt_outputs)

    def _sampling_graph(self, launched: LaunchedStep) -> SamplingGraph | None:
        key = launched.graph_key
        if key is None:
            return None
        is_filtered = launched.sampling_inputs.is_filtered
        return self._graphs.sampling_graph(key, is_filtered=is_filtered)

    def close(self) -> None:
        """Free the device's memory that the pool, the tables and the graphs take.

        To be called once. Afterwards only `limits` can be used. NCCL cannot leave its group as long
        as a graph that uses it is alive.
        """
        del self.context, self._batch_builder, self._sampler, self._graphs, self.grammar_masks
        del self._staging, self._extra_staging, self._host_copier
        del self._model, self._vocab, self._loaded
