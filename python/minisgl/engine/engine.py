"""One rank's engine: made once, then launched with one plan after another.

Owns weights, KV pool, the device's page table and token pool, and the communicator. Tokens stay on the device
between steps: a step reads its inputs from the token pool, where the step before it wrote what it sampled, so the
host can plan ahead of it. Next to read: `models/qwen3.py`, `layers/attention.py`, `attention/base.py`.
"""

# Dimension key: T tokens in the batch, B requests that sample, W tokens whose hidden states are wanted, R table rows,
# L positions, P pages.

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import create_attention_backend
from minisgl.config import EngineConfig
from minisgl.core import (
    Batch,
    BatchPlan,
    Context,
    Req,
    ReqSlice,
    SamplingParams,
    TableWrites,
    TokenMasks,
)
from minisgl.distributed import DistributedInfo, create_communicator
from minisgl.engine.graph import GraphRunner
from minisgl.engine.logits import LogprobsOutput, change_logits, wants_change
from minisgl.engine.memory import free_bytes, may_pack, num_pages, out_of_memory_is_explained, return_memory
from minisgl.engine.output import ForwardOutput
from minisgl.engine.prompts import PromptsOutput
from minisgl.engine.sample import BatchSamplingArgs, sample
from minisgl.errors import ConfigError
from minisgl.kernel import cuda_kernels_for, kernels_for, look_up, mask_logits, scatter
from minisgl.kvcache import MHAKVCache, create_kvcache_pool
from minisgl.layers import set_rope_device
from minisgl.layers.linear import LinearBase
from minisgl.models import BaseLLMModel, ModelConfig, get_model_class, load_weight
from minisgl.moe import create_moe_backend
from minisgl.utils.arch import keep_freed_memory
from minisgl.utils.staging import Staging

logger = logging.getLogger(__name__)

_ROWS = 32  # of logits that are changed at a time, which takes many copies of them


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

    Raises:
        ConfigError, CheckpointError: the options do not fit the model, or its files are unusable.
    """

    def __init__(self, config: EngineConfig, info: DistributedInfo, meeting: Path | None = None) -> None:
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
        self._staging = Staging(self._device)
        with out_of_memory_is_explained("trying the largest step"):
            step_bytes = self._try_largest_step(config, max_seq_len) if self._device.type == "cuda" else 0
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
    def _load_model(self, model_class: type[BaseLLMModel], config: EngineConfig, max_seq_len: int) -> BaseLLMModel:
        assert config.model
        model = model_class(self._model_config, self._comm, max_seq_len, self._dtype)
        load_weight(model, Path(config.model), self._dtype, self._device, dummy=config.dummy_weight)
        set_rope_device(model, self._device)
        linears = [op for op in model.walk() if isinstance(op, LinearBase)]
        self._weight_bytes = sum(linear.num_bytes for linear in linears)
        pack = may_pack(config, self._weight_bytes, self._device)
        for linear in linears:
            linear.prepare(pack=pack)
        return model

    @property
    def _kv_shape(self) -> tuple[int, int, int]:
        """Layers, this rank's kv heads, head width."""
        model = self._model_config
        return model.num_layers, len(self._comm.info.share_kv_heads(model.num_kv_heads)), model.head_dim

    def _page_bytes(self, config: EngineConfig) -> int:
        assert config.page_size
        return MHAKVCache.page_bytes(*self._kv_shape, config.page_size, self._dtype.itemsize)

    def _try_largest_step(self, config: EngineConfig, max_seq_len: int) -> int:
        """Bytes that steps take beside weights and KV, for activations, workspaces, graphs; over a pool of one page."""
        if config.num_pages is not None:
            return 0
        return_memory()  # that an engine before this one in the process may have left
        free = free_bytes(self._device, config.tp)
        self._make_context(config, max_seq_len, 1)
        plan = _largest_step(config, max_seq_len)
        self.sample(plan, self.forward(plan)).wait()
        torch.cuda.synchronize()
        used = free - free_bytes(self._device, config.tp)
        del self.context, self._graphs
        return_memory()
        return used

    def _make_context(self, config: EngineConfig, max_seq_len: int, pages: int) -> None:
        """What steps need besides weights: the tables, the pool, and what knows where they are."""
        model = self._model_config
        assert config.page_size and config.attn
        limits = EngineLimits(
            pages, config.page_size, max_seq_len, model.vocab_size, model.eos_ids, config.max_running_requests
        )
        # One row and one page more than the scheduler knows of, for what pads a batch.
        pool = create_kvcache_pool(*self._kv_shape, pages + 1, config.page_size, self._dtype, self._device)
        page_table_RP = self._zeros(limits.num_rows + 1, limits.num_row_pages).fill_(pages)
        num_heads = len(self._comm.info.share(model.num_heads, "attention heads"))
        self.limits = limits
        self.context = Context(
            page_table_RP=page_table_RP,
            token_pool_RL=self._zeros(limits.num_rows + 1, limits.max_seq_len),
            kv_pool=pool,
            attn_backend=create_attention_backend(config.attn, pool, page_table_RP, num_heads),
            moe_backend=create_moe_backend("fused" if self._device.type == "cuda" else "torch"),
        )
        self._prompts: PromptsOutput | None = None  # from `forward` to `sample`
        self._graphs: GraphRunner | None = None
        max_batch_size = min(config.cuda_graph_max_bs, config.max_running_requests)
        if self._device.type == "cuda" and max_batch_size and self.context.attn_backend.records_graphs:
            self._graphs = GraphRunner(self._forward, self.context, max_batch_size, limits.num_rows, self._weight_bytes)

    def _zeros(self, *shape: int) -> Tensor:
        if math.prod(shape) >= 2**31:
            raise ConfigError(f"{shape[0] - 1} requests of up to {shape[1]} tokens are more than the tables can hold")
        return torch.zeros(shape, dtype=torch.int32, device=self._device)

    @torch.inference_mode()
    def forward(self, plan: BatchPlan) -> Tensor | None:
        """Start computing a plan, up to the logits of its slices that sample; None if none does, or rank 0 has them."""
        self._write_tables(plan.writes)
        fit = self._graphs.fit(plan) if self._graphs else None
        x_WD = self._graphs.run(plan, fit) if self._graphs and fit else self._forward(self._prepare(plan))
        self._prompts = PromptsOutput.of(plan, x_WD, self._model.logits, self.context.token_pool_RL)
        x_BD = x_WD if len(x_WD) == len(plan.sampling) or not plan.sampling else x_WD[self._index(_sampled(plan))]
        return self._model.logits(x_BD) if plan.sampling else None

    @torch.inference_mode()
    def sample(self, plan: BatchPlan, logits_BV: Tensor | None, masks: TokenMasks | None = None) -> ForwardOutput:
        """Start choosing the tokens of a plan, the last to be forwarded. They are in the token pool for those after it.

        Args:
            logits_BV: from `forward`, and changed here.
        """
        prompts, self._prompts = self._prompts, None
        if not plan.sampling:
            empty = torch.empty(0, dtype=torch.int32, device=self._device if prompts else None)
            return ForwardOutput(empty, None, prompts)
        token_B, logprobs = self._choose(plan.sampling, logits_BV, masks)
        places = [part.row * self.limits.max_seq_len + part.end for part in plan.sampling]
        [index_B] = self._staging.send(np.array(places, dtype=np.int32))
        scatter(self.context.token_pool_RL, index_B, token_B)
        return ForwardOutput(token_B, logprobs, prompts)

    def _write_tables(self, writes: TableWrites) -> None:
        if len(writes.pages) + len(writes.tokens):
            page_index, pages, token_index, tokens = self._staging.send(
                writes.page_index, writes.pages, writes.token_index, writes.tokens
            )
            scatter(self.context.page_table_RP, page_index, pages)
            scatter(self.context.token_pool_RL, token_index, tokens)

    def _forward(self, batch: Batch) -> Tensor:
        self.context.attn_backend.begin(batch)
        return self._model.forward(batch, self.context)

    def _choose(
        self, parts: list[ReqSlice], logits_BV: Tensor | None, masks: TokenMasks | None
    ) -> tuple[Tensor, LogprobsOutput | None]:
        """Rank 0 samples; the others are told, so that all ranks go on with the same tokens."""
        if logits_BV is None:
            return self._comm.broadcast(torch.zeros(len(parts), dtype=torch.int32, device=self._device)), None
        num_top = {i: n for i, part in enumerate(parts) if (n := part.req.params.logprobs) is not None}
        asked_XV = logits_BV[self._index(list(num_top))] if num_top else None  # as they are before a mask
        if masks:
            row_X, bits = self._staging.send(np.array(masks.index, dtype=np.int32), masks.bits_XW.reshape(-1))
            mask_logits(logits_BV, row_X, bits.view(len(row_X), -1))
        vocab_size = logits_BV.shape[1]
        token_B = sample(logits_BV, BatchSamplingArgs.of(parts, vocab_size, self._staging))
        changing = [i for i, part in enumerate(parts) if wants_change(part)]
        for begin in range(0, len(changing), _ROWS):
            rows = changing[begin : begin + _ROWS]
            own, index_X = [parts[i] for i in rows], self._index(rows)
            logits_XV = logits_BV[index_X].float()
            change_logits(logits_XV, own, self.context.token_pool_RL, self.limits.eos_ids, self._staging)
            token_B[index_X] = sample(logits_XV, BatchSamplingArgs.of(own, vocab_size, self._staging))
        if asked_XV is None:
            return self._comm.broadcast(token_B), None
        token_X = token_B[self._index(list(num_top))]
        logprobs = LogprobsOutput(list(num_top), asked_XV, token_X, list(num_top.values()))
        return self._comm.broadcast(token_B), logprobs

    def _index(self, rows: list[int]) -> Tensor:
        [index_X] = self._staging.send(np.array(rows, dtype=np.int32))
        return index_X.long()

    def _prepare(self, plan: BatchPlan) -> Batch:
        lengths = np.array([len(part) for part in plan.slices], dtype=np.int32)
        starts = np.array([part.start for part in plan.slices], dtype=np.int32)
        rows = np.array([part.row for part in plan.slices], dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int32)
        offsets = np.repeat(starts - (ends - lengths), lengths)
        wanted = (range(end - part.num_wanted, end) for end, part in zip(ends.tolist(), plan.slices, strict=True))
        lasts = np.fromiter(chain.from_iterable(wanted), dtype=np.int32)
        metadata = self.context.attn_backend.prepare(plan)
        row_T, position_T, last_B = self._staging.send(
            np.repeat(rows, lengths), np.arange(ends[-1], dtype=np.int32) + offsets, lasts
        )
        tables = (self.context.token_pool_RL, self.context.page_table_RP)
        input_ids_T, slot_T = look_up(row_T, position_T, *tables, self.limits.page_size)
        return Batch(row_T, position_T.long(), input_ids_T, slot_T, last_B.long(), metadata)

    def close(self) -> None:
        """Leave the tensor-parallel group, which NCCL holds on to as long as a graph talks to it."""
        self._graphs = None
        self._comm.close()


def _sampled(plan: BatchPlan) -> list[int]:
    """Among the tokens whose hidden states are wanted, those after which a slice samples."""
    ends = accumulate(part.num_wanted for part in plan.slices)
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
        limit, reason = model.sliding_window, "the model's sliding window, beyond which it is not supported"
    if config.max_seq_len is not None and config.max_seq_len > limit:
        raise ConfigError(f"--max-seq-len must be <= {limit} ({reason}), got {config.max_seq_len}")
    if limit < model.max_position:
        logger.warning("the context is limited to %d tokens: %s", limit, reason)
    return config.max_seq_len or limit
