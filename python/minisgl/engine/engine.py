"""One rank's engine: made once, then launched with one plan after another.

Owns weights, KV pool, the device's page table and token pool, and the communicator. Tokens stay on
the device between steps: a step writes what it samples to the token pool, and the next step reads
its inputs there. So the host can plan a step before it knows the tokens of the one before. Next to
read: `batch_builder.py`, `sampler.py`, `kernel/tables.py`, then `models/base.py`.
"""

# Dimensions: B requests of a step, D model width, L positions of a sequence, P pages, R rows of the
# tables, V vocabulary, W words of 32 bits, X a selection out of another dimension, Y tokens whose
# hidden states are returned, Z entries of a flat list.

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from minisgl.attention import PromptModules, create_attention_backend
from minisgl.config import EngineConfig, backend_names
from minisgl.core import (
    NO_WRITES,
    Batch,
    BatchPlan,
    IntArray,
    PromptWaves,
    ReqSlice,
    TableWrites,
)
from minisgl.distributed import DistributedInfo, create_communicator
from minisgl.engine.batch_builder import BatchBuilder, batch_room, sampled_hidden_states
from minisgl.engine.first_kernels import KernelSizes, call_kernels
from minisgl.engine.first_steps import first_choices, first_plans
from minisgl.engine.forward_output import ForwardOutput, HostCopier
from minisgl.engine.graph_capture import CpuGraphCapture, CudaGraphCapture, GraphCapture
from minisgl.engine.graph_key import (
    GraphKeys,
    GraphKind,
    cpu_graph_keys,
    graph_keys,
    has_room_for_writes,
    most_prompt_tokens,
)
from minisgl.engine.graph_runner import GraphRunner
from minisgl.engine.kernel_builds import KernelBuilds
from minisgl.engine.limits import EngineLimits, context_length
from minisgl.engine.memory import (
    free_bytes,
    free_if_out_of_memory,
    largest_step,
    most_tokens,
    num_pages,
    out_of_memory_is_explained,
    reserve_pinned_memory,
    return_memory,
)
from minisgl.engine.model_loader import load_model
from minisgl.engine.prompt_outputs import PromptOutputs
from minisgl.engine.sampler import Sampler, SamplingGraph, SamplingInputs, sampler_room
from minisgl.engine.sampling_batch import BatchSamplingArgs
from minisgl.engine.steps import LaunchedStep, PreparedStep
from minisgl.errors import ConfigError
from minisgl.kernel import cuda_kernels_for, kernels_for, load_cpu_kernels, scatter
from minisgl.kvcache import MHAKVCache, create_kvcache_pool
from minisgl.layers import Context, VocabShard
from minisgl.models import ModelConfig, get_model_class
from minisgl.moe import create_moe_backend
from minisgl.utils.arch import keep_freed_memory, use_huge_pages
from minisgl.utils.cuda_toolkit import find_cuda_toolkit
from minisgl.utils.staging import Staging, room_for

_MAX_WRITES = 1 << 15  # of a table, that go to the device in one copy

logger = logging.getLogger(__name__)


class Engine:
    """Computes plans for one rank.

    Args:
        config: resolved; `model` is a local folder.
        rendezvous: where the ranks of the group find each other; see `create_communicator`.

    Attributes:
        grammar_masks: int32 [X, W], as `mask_logits` takes them: where those of a step are put
            before its tokens are chosen.

    Raises:
        ConfigError, CheckpointError: the options do not fit the model, or its files are unusable.
    """

    def __init__(
        self, config: EngineConfig, info: DistributedInfo, rendezvous: Path | None = None
    ) -> None:
        assert config.model
        assert config.dtype
        assert config.page_size
        started = time.monotonic()
        self._model_config = ModelConfig.from_folder(Path(config.model))
        model_class = get_model_class(self._model_config.architecture)
        self._device = _set_up_device(config, info)
        self._dtype = getattr(torch, config.dtype)
        self._attn = config.attn or self._fastest_attention()
        kernel_builds = KernelBuilds(self._kernel_builds())
        self._comm = create_communicator(info, self._device, rendezvous, config.comm)
        self._vocab = VocabShard(self._model_config.vocab_size, self._comm)

        max_seq_len = context_length(config, self._model_config)
        kernel_builds.start(self._triton_builds(config, max_seq_len))
        with out_of_memory_is_explained("loading the weights"):
            loaded = load_model(
                model_class,
                config,
                self._model_config,
                self._comm,
                max_seq_len,
                self._dtype,
                self._device,
            )
        if self._device.type == "cpu":
            use_huge_pages()
        self._model = loaded.model
        self._weight_bytes = loaded.weight_bytes
        kernel_builds.wait()

        num_rows = config.max_running_requests
        # For what a step sends in front of the model, ...
        self._staging = Staging(self._device, batch_room(most_tokens(config), num_rows))
        # ... and for what few steps send, at any time.
        room = sampler_room(num_rows, len(self._model_config.eos_ids))
        self._extra_staging = Staging(self._device, max(room, 2 * room_for(_MAX_WRITES)))
        self._host_copier = HostCopier(self._device, num_rows)
        step_bytes = 0
        if self._device.type == "cuda":
            with out_of_memory_is_explained("trying the largest step"):
                step_bytes = self._try_largest_step(config, max_seq_len)
        with out_of_memory_is_explained("making the KV cache"):
            page_bytes = self._page_bytes(config)
            pages = num_pages(config, page_bytes, self._device, self._comm, step_bytes)
            self._make_context(config, min(max_seq_len, pages * config.page_size), pages)
        if self._device.type == "cuda":
            with out_of_memory_is_explained("running the first steps"):
                self.run_first_steps(config)
        logger.info(
            "%s on %s in %s: %d pages of %d tokens, context %d, ready after %.1f s",
            self._model_config.architecture,
            self._device,
            config.dtype,
            self.limits.num_pages,
            self.limits.page_size,
            self.limits.max_seq_len,
            time.monotonic() - started,
        )

    def _fastest_attention(self) -> str:
        """The attention backend of a GPU, if none is asked for."""
        if find_cuda_toolkit() is None and self._prompt_modules().missing:
            logger.warning(
                "there is no CUDA compiler (nvcc), so attention and some kernels are slower; "
                "pip install 'minisgl[cuda]' brings one"
            )
            return "torch"
        return "fi"

    def _kernel_builds(self) -> dict[str, Callable[[], object]]:
        """All that can be compiled before the first step, by name."""
        nothing = torch.empty(0, dtype=self._dtype, device=self._device)
        builds: dict[str, Callable[[], object]] = {
            "kernels": partial(kernels_for, nothing),
            "CUDA kernels": partial(cuda_kernels_for, nothing),
        }
        if backend_names(self._attn)[0] == "fi":
            builds["FlashInfer"] = lambda: self._prompt_modules().build()
        return builds

    def _triton_builds(
        self, config: EngineConfig, max_seq_len: int
    ) -> dict[str, Callable[[], object]]:
        """Those that run on the GPU, so not before the ranks have measured their sums there."""
        if self._device.type != "cuda":
            return {}
        keys = graph_keys(min(config.cuda_graph_max_bs, config.max_running_requests), 0)
        sizes = KernelSizes(
            model=self._model_config,
            info=self._comm.info,
            vocab=self._vocab,
            limits=self._limits_of(config, max_seq_len, 0),
            attn=self._attn,
            shares_prefixes=bool(keys[GraphKind.SHARED_PREFIX]),
            dtype=self._dtype,
            device=self._device,
        )
        return {"Triton kernels": partial(call_kernels, sizes)}

    def _prompt_modules(self) -> PromptModules:
        model = self._model_config
        return PromptModules(self._device, self._dtype, model.head_dim, model.attention)

    @property
    def _kv_shape(self) -> tuple[int, int, int]:
        """Layers, this rank's kv heads, head width."""
        model = self._model_config
        num_kv_heads = len(self._comm.info.shard_kv_heads(model.num_kv_heads))
        return model.num_layers, num_kv_heads, model.head_dim

    def _page_bytes(self, config: EngineConfig) -> int:
        assert config.page_size
        return MHAKVCache.page_bytes(*self._kv_shape, config.page_size, self._dtype.itemsize)

    def _try_largest_step(self, config: EngineConfig, max_seq_len: int) -> int:
        """Bytes that steps take beside weights and KV: activations, workspaces, graphs.

        They are measured over a pool of one page, before the KV cache is sized. What this process
        takes once and keeps, as modules of kernels, is no longer free then, so it does not count.
        Where the option says the size, the first steps show whether it leaves enough.
        """
        if config.num_pages is not None:
            return 0
        return_memory()  # an earlier engine in this process may have left some
        self._make_context(config, max_seq_len, 1, is_trial=True)
        plan = largest_step(config, max_seq_len)
        self.sample(self.launch(self.prepare(plan))).wait()
        torch.cuda.synchronize()
        free_during = free_bytes(self._device, config.tp)
        not_captured = self._graphs.bytes_not_captured if self._graphs else 0
        self._drop_context()
        return_memory()
        return free_bytes(self._device, config.tp) - free_during + not_captured

    def _make_context(
        self, config: EngineConfig, max_seq_len: int, pages: int, *, is_trial: bool = False
    ) -> None:
        """Make what steps need besides weights: tables, pool, and what holds on to them."""
        self.limits = self._limits_of(config, max_seq_len, pages)
        self.context = self._tables_and_backends()
        self._batch_builder = BatchBuilder(self.context, self._staging)
        self._sampler = Sampler(
            self._vocab,
            self.context.token_pool_RL,
            self._model_config.eos_ids,
            self._extra_staging,
        )
        self.grammar_masks: IntArray = self._sampler.masks_XW.numpy()
        self._graphs = self._make_graph_runner(config, is_trial=is_trial)

    def _limits_of(self, config: EngineConfig, max_seq_len: int, pages: int) -> EngineLimits:
        assert config.page_size
        return EngineLimits(
            num_pages=pages,
            page_size=config.page_size,
            max_seq_len=max_seq_len,
            vocab_size=self._model_config.vocab_size,
            eos_ids=self._model_config.eos_ids,
            num_rows=config.max_running_requests,
        )

    def _drop_context(self) -> None:
        del self.context, self._batch_builder, self._sampler, self._graphs, self.grammar_masks

    def _tables_and_backends(self) -> Context:
        """Tables and pool have a padding row and a padding page after those of the scheduler."""
        limits = self.limits
        pool = create_kvcache_pool(
            *self._kv_shape, limits.num_pages + 1, limits.page_size, self._dtype, self._device
        )
        page_table_RP = self._zeros(limits.num_rows + 1, limits.num_row_pages)
        page_table_RP.fill_(limits.num_pages)
        num_heads = len(self._comm.info.shard(self._model_config.num_heads, "attention heads"))
        return Context(
            page_table_RP=page_table_RP,
            token_pool_RL=self._zeros(limits.num_rows + 1, limits.num_row_tokens),
            kv_pool=pool,
            attn_backend=create_attention_backend(
                self._attn, pool, page_table_RP, num_heads, self._model_config.attention
            ),
            moe_backend=create_moe_backend(self._device, self._dtype),
        )

    def _make_graph_runner(self, config: EngineConfig, *, is_trial: bool) -> GraphRunner | None:
        """The runner, which captures when it is made; None where steps cannot be captured."""
        max_decodes = min(config.cuda_graph_max_bs, self.limits.num_rows)
        if max_decodes == 0 or not self.context.attn_backend.captures_graphs:
            return None
        capture: GraphCapture
        keys: GraphKeys
        if self._device.type == "cuda":
            capture = CudaGraphCapture()
            longest = most_prompt_tokens(self.limits.num_row_tokens - 1, self._weight_bytes)
            keys = graph_keys(max_decodes, longest)
        else:
            kernels = load_cpu_kernels()
            if kernels is None:
                return None
            capture = CpuGraphCapture(kernels)
            keys = cpu_graph_keys(max_decodes, self.limits.num_row_tokens - 1)
        return GraphRunner(
            capture,
            keys,
            self._forward_to_logits,
            self._sampler,
            self.context,
            is_trial=is_trial,
        )

    def run_first_steps(self, config: EngineConfig) -> None:
        """Do what no later step shall do for the first time; see `first_steps.py`.

        What it writes lies in the padding page, and in the token pool where requests will write.
        """
        started = time.monotonic()
        if self._device.type == "cuda":
            reserve_pinned_memory()
        model = self._model_config
        nums_of_tokens: list[int] = []
        if model.num_experts:
            nums_of_tokens = self.context.moe_backend.nums_of_tokens(
                model.num_experts, model.experts_per_token
            )
        num_steps = 0
        for plan in first_plans(config, self.limits, nums_of_tokens):
            if self._graphs is None or self._graphs.find_key(plan) is None:
                _read(self.sample(self.launch(PreparedStep(plan, plan.writes))))
                num_steps += 1
        for slices in first_choices(self.limits):
            _read(self.sample(self._launch_choice(slices)))
        logger.debug("%d first steps in %.2f s", num_steps, time.monotonic() - started)

    @torch.inference_mode()
    def _launch_choice(self, slices: list[ReqSlice]) -> LaunchedStep:
        """A step of slices that sample, without a model: their hidden states are zero."""
        places = [self._token_place(req_slice) for req_slice in slices]
        hidden_BD = torch.zeros(
            len(slices), self._model_config.width, dtype=self._dtype, device=self._device
        )
        inputs = SamplingInputs(
            self._model.logits(hidden_BD),
            BatchSamplingArgs.of(slices, self._staging),
            torch.tensor(places, dtype=torch.int32, device=self._device),
        )
        return LaunchedStep(slices, inputs)

    def _token_place(self, req_slice: ReqSlice) -> int:
        """Where in the token pool the token after a slice stands."""
        return req_slice.row * self.limits.num_row_tokens + req_slice.end

    def _zeros(self, *shape: int) -> Tensor:
        if math.prod(shape) >= 2**31:
            raise ConfigError(
                f"{shape[0] - 1} requests of up to {shape[1]} tokens are more than the tables "
                "can hold"
            )
        return torch.zeros(shape, dtype=torch.int32, device=self._device)

    @property
    def prompt_waves(self) -> PromptWaves:
        """In which portions the device attends for the tokens of prompts."""
        return self.context.attn_backend.prompt_waves

    def prompt_room(self, num_decodes: int) -> list[int]:
        """How many tokens of prompts captured steps have room for beside so many decodes.

        They ascend. There are none if no such step is captured.
        """
        return self._graphs.prompt_room(num_decodes) if self._graphs else []

    def prepare(self, plan: BatchPlan) -> PreparedStep:
        """Do the host work that is possible before the previous step is sampled.

        That is all host work of a captured step, and none of an eager one.

        Raises:
            StepOutOfMemory: the device's memory is full; the step can be planned again.
        """
        return free_if_out_of_memory(self._prepare, plan)

    def _prepare(self, plan: BatchPlan) -> PreparedStep:
        key = self._graphs.find_key(plan) if self._graphs else None
        if self._graphs is None or key is None:
            return PreparedStep(plan, plan.writes)
        if has_room_for_writes(key, plan.writes):
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
            assert self._graphs is not None
            hidden_YD, sampling_inputs = self._graphs.replay(replay)

        prompt_outputs = PromptOutputs.of(
            plan, hidden_YD, self._collect_logits, self.context.token_pool_RL
        )
        graph_key = replay.key if replay else None
        return LaunchedStep(plan.sampling_slices, sampling_inputs, graph_key, prompt_outputs)

    @torch.inference_mode()
    def sample(self, launched: LaunchedStep) -> ForwardOutput:
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
        if self._graphs is None or key is None:
            return None
        is_filtered = launched.sampling_inputs.args.is_filtered
        return self._graphs.sampling_graph(key, is_filtered=is_filtered)

    def _write_tables(self, writes: TableWrites) -> None:
        page_table_RP = self.context.page_table_RP
        token_pool_RL = self.context.token_pool_RL
        self._scatter(page_table_RP, writes.page_index, writes.pages)
        self._scatter(token_pool_RL, writes.token_index, writes.tokens)
        for copy in writes.copies:
            num_pages = copy.num_tokens // self.limits.page_size
            page_table_RP[copy.target, :num_pages] = page_table_RP[copy.source, :num_pages]
            tokens = slice(0, copy.num_tokens)
            token_pool_RL[copy.target, tokens] = token_pool_RL[copy.source, tokens]

    def _scatter(self, table: Tensor, index: IntArray, values: IntArray) -> None:
        """Write to a table, in pieces: the buffers on the way need not hold a whole context."""
        for begin in range(0, len(index), _MAX_WRITES):
            piece = slice(begin, begin + _MAX_WRITES)
            index_Z, value_Z = self._extra_staging.send(index[piece], values[piece])
            scatter(table, index_Z, value_Z)

    def _run_eagerly(self, plan: BatchPlan) -> tuple[Tensor, SamplingInputs]:
        """The hidden states that are returned, and the logits of the slices that sample."""
        built = self._batch_builder.build(plan)
        hidden_YD = self._forward(built.batch)
        logits_BV = None
        num_sampling = len(built.token_index_B)
        if num_sampling:
            hidden_BD = hidden_YD
            if len(hidden_YD) > num_sampling:
                hidden_BD = hidden_YD[self._sampler.to_device_index(sampled_hidden_states(plan))]
            logits_BV = self._model.logits(hidden_BD)
        return hidden_YD, SamplingInputs(logits_BV, built.sampling_args, built.token_index_B)

    def _forward(self, batch: Batch) -> Tensor:
        self.context.attn_backend.prepare_on_device(batch)
        return self._model.forward(batch, self.context)

    def _collect_logits(self, hidden_XD: Tensor) -> Tensor | None:
        """Logits of the whole vocabulary on rank 0, None on the others."""
        return self._vocab.collect(self._model.logits(hidden_XD))

    def _forward_to_logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What a graph captures: there, every returned hidden state also becomes logits."""
        hidden_YD = self._forward(batch)
        return hidden_YD, self._model.logits(hidden_YD)

    def close(self) -> None:
        """Free the device's memory, and leave the tensor-parallel group. To be called once.

        Its scheduler, and whoever has that, may keep this object: nothing of it can be used then
        but `limits`. NCCL cannot leave as long as a graph that uses it is alive.
        """
        self._drop_context()
        del self._model, self._staging, self._extra_staging, self._host_copier
        self._comm.close()


def _read(output: ForwardOutput) -> None:
    """Wait for all that a step gives."""
    output.wait()
    output.logprobs()
    output.prompt_logprobs()
    output.embeddings()


def _set_up_device(config: EngineConfig, info: DistributedInfo) -> torch.device:
    assert config.device
    if config.device == "cuda":
        device = torch.device(f"cuda:{info.rank}")
        torch.cuda.set_device(device)
        return device
    keep_freed_memory()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // info.size))
    return torch.device("cpu")
