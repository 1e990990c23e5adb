"""One rank's engine: made once, then launched with one plan after another.

Owns weights, KV pool, the device's page table and token pool, and the communicator. Tokens stay on the device
between steps: a step reads its inputs from the token pool, where the step before it wrote what it sampled, so the
host can plan ahead of it. Next to read: `models/qwen3.py`, `layers/attention.py`, `attention/base.py`.
"""

# Dimension key: T tokens in the batch, B requests that sample, X masks, V vocab, W tokens whose hidden states are
# wanted, R table rows, L positions, P pages.

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import create_attention_backend
from minisgl.config import EngineConfig
from minisgl.core import (
    NO_WRITES,
    Batch,
    BatchPlan,
    IntArray,
    Req,
    ReqSlice,
    SamplingParams,
    TableWrites,
)
from minisgl.distributed import DistributedInfo, create_communicator
from minisgl.engine.choose import LogitsStep, TokenChooser
from minisgl.engine.graph import GraphRunner, Prepared, has_room
from minisgl.engine.memory import (
    free_bytes,
    may_pack,
    num_pages,
    out_of_memory_is_explained,
    return_memory,
)
from minisgl.engine.output import ForwardOutput, WayBack
from minisgl.engine.prompts import PromptsOutput
from minisgl.engine.sample import BatchSamplingArgs, has_filters, sampling_arrays
from minisgl.errors import ConfigError
from minisgl.kernel import cuda_kernels_for, kernels_for, look_up, scatter
from minisgl.kvcache import MHAKVCache, create_kvcache_pool
from minisgl.layers import Context, set_rope_device
from minisgl.layers.linear import LinearBase
from minisgl.models import BaseLLMModel, ModelConfig, get_model_class, load_weight
from minisgl.moe import create_moe_backend
from minisgl.utils.arch import keep_freed_memory
from minisgl.utils.staging import Staging

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine can hold; the scheduler plans within it.

    Attributes:
        max_seq_len: tokens of a prompt and its answer together: the model's context, or less where the pool is
            smaller than that.
        num_rows: requests that can hold pages at a time.
    """

    num_pages: int
    page_size: int
    max_seq_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    num_rows: int = 1

    @property
    def num_row_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_seq_len // self.page_size)


class Engine:
    """Computes plans for one rank.

    Args:
        config: resolved; `model` is a local folder.
        meeting: where the ranks of the group find each other; see `create_communicator`.

    Attributes:
        grammar_masks: int32 [X, ceil(V / 32)], as `mask_logits` takes them: where those of a step are put before its
            tokens are chosen.

    Raises:
        ConfigError, CheckpointError: the options do not fit the model, or its files are unusable.
    """

    def __init__(
        self, config: EngineConfig, info: DistributedInfo, meeting: Path | None = None
    ) -> None:
        assert config.model and config.device and config.dtype and config.attn and config.page_size
        started = time.monotonic()
        self._model_config = ModelConfig.from_folder(Path(config.model))
        model_class = get_model_class(self._model_config.architecture)
        self._device = torch.device(f"cuda:{info.rank}" if config.device == "cuda" else "cpu")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        else:
            keep_freed_memory()
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // info.size))
        self._dtype = getattr(torch, config.dtype)
        for kernels in (kernels_for, cuda_kernels_for):  # built now, not in the first step
            kernels(torch.empty(0, dtype=self._dtype, device=self._device))
        self._comm = create_communicator(info, self._device, meeting)
        max_seq_len = _context_length(config, self._model_config)
        with out_of_memory_is_explained("loading the weights"):
            self._model = self._load_model(model_class, config, max_seq_len)
        self._staging = Staging(self._device)  # for what a step sends in front of the model
        self._extras = Staging(self._device)  # for what few steps send, at any time
        self._way_back = WayBack(self._device, config.max_running_requests)
        with out_of_memory_is_explained("trying the largest step"):
            step_bytes = (
                self._try_largest_step(config, max_seq_len) if self._device.type == "cuda" else 0
            )
        with out_of_memory_is_explained("making the KV cache"):
            page_bytes = self._page_bytes(config)
            pages = num_pages(config, page_bytes, max_seq_len, self._device, self._comm, step_bytes)
            self._make_context(config, min(max_seq_len, pages * config.page_size), pages)
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

    @torch.inference_mode()
    def _load_model(
        self, model_class: type[BaseLLMModel], config: EngineConfig, max_seq_len: int
    ) -> BaseLLMModel:
        assert config.model
        model = model_class(self._model_config, self._comm, max_seq_len, self._dtype)
        load_weight(
            model,
            Path(config.model),
            self._dtype,
            self._device,
            self._model_config.quantization,
            dummy=config.dummy_weight,
        )
        set_rope_device(model, self._device)
        linears = [op for op in model.walk() if isinstance(op, LinearBase)]
        num_bytes = sum(
            linear.num_bytes for linear in linears
        )  # ranks may differ, but not in what they record
        self._weight_bytes = -int(
            self._comm.all_reduce_min(torch.tensor([-num_bytes], device=self._device))
        )
        pack = may_pack(config, self._weight_bytes, self._device)
        for linear in linears:
            linear.prepare(pack=pack)
        return model

    @property
    def _kv_shape(self) -> tuple[int, int, int]:
        """Layers, this rank's kv heads, head width."""
        model = self._model_config
        return (
            model.num_layers,
            len(self._comm.info.shard_kv_heads(model.num_kv_heads)),
            model.head_dim,
        )

    def _page_bytes(self, config: EngineConfig) -> int:
        assert config.page_size
        return MHAKVCache.page_bytes(*self._kv_shape, config.page_size, self._dtype.itemsize)

    def _try_largest_step(self, config: EngineConfig, max_seq_len: int) -> int:
        """Bytes that steps take beside weights and KV, for activations, workspaces, graphs; over a pool of one page."""
        if config.num_pages is not None:
            return 0
        return_memory()  # that an engine before this one in the process may have left
        free = free_bytes(self._device, config.tp)
        self._make_context(config, max_seq_len, 1, is_trial=True)
        plan = _largest_step(config, max_seq_len)
        self.sample(plan, self.prepare(plan)()).wait()
        torch.cuda.synchronize()
        used = (
            free
            - free_bytes(self._device, config.tp)
            + (self._graphs.missing_bytes if self._graphs else 0)
        )
        del self.context, self._chooser, self._graphs, self.grammar_masks
        return_memory()
        return used

    def _make_context(
        self, config: EngineConfig, max_seq_len: int, pages: int, *, is_trial: bool = False
    ) -> None:
        """What steps need besides weights: the tables, the pool, and what knows where they are."""
        model = self._model_config
        assert config.page_size and config.attn
        limits = EngineLimits(
            pages,
            config.page_size,
            max_seq_len,
            model.vocab_size,
            model.eos_ids,
            config.max_running_requests,
        )
        # One row and one page more than the scheduler knows of, for what pads a batch.
        pool = create_kvcache_pool(
            *self._kv_shape, pages + 1, config.page_size, self._dtype, self._device
        )
        page_table_RP = self._zeros(limits.num_rows + 1, limits.num_row_pages).fill_(pages)
        num_heads = len(self._comm.info.shard(model.num_heads, "attention heads"))
        self.limits = limits
        self.context = Context(
            page_table_RP=page_table_RP,
            token_pool_RL=self._zeros(limits.num_rows + 1, limits.max_seq_len),
            kv_pool=pool,
            attn_backend=create_attention_backend(config.attn, pool, page_table_RP, num_heads),
            moe_backend=create_moe_backend("fused" if self._device.type == "cuda" else "torch"),
        )
        self._chooser = TokenChooser(self._comm, self.context.token_pool_RL, model, self._extras)
        self.grammar_masks: IntArray = self._chooser.bits_XW.numpy()
        self._launched: tuple[LogitsStep, PromptsOutput | None] | None = None  # until it is sampled
        self._graphs: GraphRunner | None = None
        max_decodes = min(config.cuda_graph_max_bs, limits.num_rows)
        if (
            self._device.type == "cuda"
            and max_decodes
            and self.context.attn_backend.captures_graphs
        ):
            parts = (self._forward_to_logits, self._chooser, self.context)
            self._graphs = GraphRunner(*parts, max_decodes, self._weight_bytes, is_trial=is_trial)

    def _zeros(self, *shape: int) -> Tensor:
        if math.prod(shape) >= 2**31:
            raise ConfigError(
                f"{shape[0] - 1} requests of up to {shape[1]} tokens are more than the tables can hold"
            )
        return torch.zeros(shape, dtype=torch.int32, device=self._device)

    def prepare(self, plan: BatchPlan) -> Callable[[], Tensor | None]:
        """Do what can be done before the plan before is sampled. The result, called after that, starts computing.

        It gives the logits of the slices that sample; None if none does, or rank 0 has them. Early is what the host
        does for a recorded step; others take the device longer than the host, and are put together when they start.
        """
        fit, writes = self._graphs.fit(plan) if self._graphs else None, NO_WRITES
        if not fit or not has_room(plan.writes, fit):
            writes, plan = plan.writes, replace(plan, writes=NO_WRITES)
        prepared = self._graphs.prepare(plan, fit) if self._graphs and fit else None
        return partial(self._compute, plan, writes, prepared)

    @torch.inference_mode()
    def _compute(
        self, plan: BatchPlan, writes: TableWrites, prepared: Prepared | None
    ) -> Tensor | None:
        self._write_tables(writes)
        x_WD, step = self._graphs.replay(prepared) if self._graphs and prepared else self._run(plan)
        prompts = PromptsOutput.of(plan, x_WD, self._model.logits, self.context.token_pool_RL)
        self._launched = step, prompts
        num_sampling = len(plan.sampling_slices)
        return (
            step.logits_BV[:num_sampling] if step.logits_BV is not None and num_sampling else None
        )

    @torch.inference_mode()
    def sample(self, plan: BatchPlan, logits_BV: Tensor | None) -> ForwardOutput:
        """Start choosing the tokens of a plan, the last one computed. They are in the token pool for those after it.

        Args:
            logits_BV: changed here.
        """
        assert self._launched is not None
        (step, prompts), self._launched = self._launched, None
        parts = plan.sampling_slices
        if not parts:
            empty = torch.empty(0, dtype=torch.int32, device=self._device)
            return self._way_back.send(empty, None, prompts)
        return self._way_back.send(*self._chooser.finish(step, parts, logits_BV), prompts)

    def _write_tables(self, writes: TableWrites) -> None:
        if len(writes.pages) + len(writes.tokens):
            page_index, pages, token_index, tokens = self._extras.send(
                writes.page_index, writes.pages, writes.token_index, writes.tokens
            )
            scatter(self.context.page_table_RP, page_index, pages)
            scatter(self.context.token_pool_RL, token_index, tokens)

    def _forward(self, batch: Batch) -> Tensor:
        self.context.attn_backend.begin(batch)
        return self._model.forward(batch, self.context)

    def _forward_to_logits(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        x_BD = self._forward(batch)
        return x_BD, self._model.logits(x_BD)

    def _run(self, plan: BatchPlan) -> tuple[Tensor, LogitsStep]:
        """Without a graph: the hidden states that are wanted, and the logits of the slices that sample."""
        batch, args, place_B = self._make_batch(plan)
        x_WD = self._forward(batch)
        num_sampling = len(place_B)
        if num_sampling == 0:
            return x_WD, LogitsStep(None, args, place_B)
        x_BD = x_WD if len(x_WD) == num_sampling else x_WD[self._chooser.index(_sampled(plan))]
        return x_WD, LogitsStep(self._model.logits(x_BD), args, place_B)

    def _make_batch(self, plan: BatchPlan) -> tuple[Batch, BatchSamplingArgs, Tensor]:
        """All numbers of a step go over in one copy."""
        numbers = [(part.row, part.start, part.end, part.samples) for part in plan.slices]
        rows, starts, stops, samples = np.array(numbers, dtype=np.int32).T
        lengths, is_sampled = stops - starts, samples > 0
        ends = np.cumsum(lengths, dtype=np.int32)
        offsets = np.repeat(starts - (ends - lengths), lengths)
        wanted = (
            range(end - part.num_hidden_states, end)
            for end, part in zip(ends.tolist(), plan.slices, strict=True)
        )
        lasts = np.fromiter(chain.from_iterable(wanted), dtype=np.int32)
        end_B = stops[is_sampled]
        places = rows[is_sampled] * self.limits.max_seq_len + end_B
        sampling = sampling_arrays(plan.sampling_slices, end_B)
        metadata = self.context.attn_backend.prepare(plan)
        positions = np.arange(ends[-1], dtype=np.int32) + offsets
        arrays = (np.repeat(rows, lengths), positions, lasts, places, *sampling)
        row_T, position_T, last_B, place_B, *sent = self._staging.send(*arrays)
        tables = (self.context.token_pool_RL, self.context.page_table_RP)
        input_ids_T, slot_T = look_up(row_T, position_T, *tables, self.limits.page_size)
        batch = Batch(row_T, position_T.long(), input_ids_T, slot_T, last_B.long(), metadata)
        is_masked = any(part.req.params.grammar for part in plan.sampling_slices)
        return batch, BatchSamplingArgs(has_filters(sampling), is_masked, *sent), place_B

    def close(self) -> None:
        """Leave the tensor-parallel group, which NCCL holds on to as long as a graph talks to it."""
        self._graphs = self._launched = None
        self._comm.close()


def _sampled(plan: BatchPlan) -> list[int]:
    """Among the tokens whose hidden states are wanted, those after which a slice samples."""
    ends = accumulate(part.num_hidden_states for part in plan.slices)
    return [end - 1 for end, part in zip(ends, plan.slices, strict=True) if part.samples]


def _largest_step(config: EngineConfig, max_seq_len: int) -> BatchPlan:
    """As many prompt tokens as a step may have, all other requests decoding, and each with all that costs memory."""
    params = SamplingParams(top_p=0.9, presence_penalty=1.0, logprobs=1)
    slices: list[ReqSlice] = []
    left = config.max_prefill_length
    for row in range(config.max_running_requests):
        length = max(1, min(max_seq_len - 1, left))
        left -= length
        req = Req(row, np.zeros(length, dtype=np.int32), params, max_seq_len, seed=0)
        req.row = row
        slices.insert(0, ReqSlice(req, 0, length, samples=True))
    return BatchPlan(slices)


def _context_length(config: EngineConfig, model: ModelConfig) -> int:
    """Positions that the model can tell apart and see.

    Behind a sliding window the model would attend to less than everything; no layer here does that, so the context
    ends with the window.
    """
    limit, reason = model.max_position, "the model's context"
    if model.sliding_window is not None and model.sliding_window < limit:
        limit, reason = (
            model.sliding_window,
            "the model's sliding window, beyond which it is not supported",
        )
    if config.max_seq_len is not None and config.max_seq_len > limit:
        raise ConfigError(f"--max-seq-len must be <= {limit} ({reason}), got {config.max_seq_len}")
    if limit < model.max_position:
        logger.warning("the context is limited to %d tokens: %s", limit, reason)
    return config.max_seq_len or limit
