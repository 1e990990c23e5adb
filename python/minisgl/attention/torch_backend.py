"""Paged attention in plain torch: the reference for every kernel, and what runs on a CPU.

A slice of one token (a decode) is one row of queries against a long context: such slices are stacked, padded to
the longest of a group of similar length, and multiplied at once. A longer slice (a prompt) is computed by
itself in blocks of queries, each against just the keys that it may see. Both gather whole pages.
"""

# Dimension key: T tokens in the batch, B stacked requests, N query heads, K kv heads, G query heads a kv head,
# H head dim, L positions of a context, P pages of a context.

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.attention.base import BaseAttnBackend, BaseAttnMetadata
from minisgl.core import Batch, BatchPlan, ReqSlice
from minisgl.kvcache import BaseKVCachePool

_QUERY_BLOCK = 128
_SMALL = 1 << 17


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A slice of several tokens: rows [first, first + length) of the batch, from position `start`."""

    first: int
    length: int
    start: int
    page_P: Tensor


@dataclass(frozen=True, slots=True)
class _Stack:
    """Single-token slices of similar context length.

    Attributes:
        token_B: int64, their rows in the batch.
        page_X: int64, X = B * P; the pages of each, padded with page 0.
        length: of the longest context.
        bias_Y1L: Y = K * B; -inf behind the end of a context, else 0; None if all are equally long.
        dtype: to compute in.
    """

    token_B: Tensor
    page_X: Tensor
    length: int
    bias_Y1L: Tensor | None
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class TorchAttnMetadata(BaseAttnMetadata):
    """The slices of a plan, sorted by how they are computed."""

    prompts: list[_Prompt]
    stacks: list[_Stack]

    @property
    def is_one_stack(self) -> bool:
        """Whether a single stack holds all rows of the batch, which are then in its order."""
        return not self.prompts and len(self.stacks) == 1


class TorchAttentionBackend(BaseAttnBackend):
    """Plain torch over any pool. Slots that were never written must be finite."""

    def __init__(self, kv_pool: BaseKVCachePool, page_table_RP: Tensor) -> None:
        self._pool = kv_pool
        self._page_table_RP = page_table_RP
        self._page_size = kv_pool.page_size
        layers = [kv_pool.kv_cache(layer).transpose(1, 2) for layer in range(kv_pool.num_layers)]
        self._paged_2KPsH: list[Tensor] = [kv.unflatten(2, (-1, self._page_size)) for kv in layers]
        _, self._num_kv_heads, _, self._head_dim = layers[0].shape
        self._scale = 1.0 / math.sqrt(self._head_dim)
        hidden = torch.full((_QUERY_BLOCK, _QUERY_BLOCK), -math.inf, device=page_table_RP.device)
        self._future = hidden.triu(1).to(layers[0].dtype)  # of a block's queries against its own keys
        self._no_bias = torch.zeros(1, 1, 1, device=page_table_RP.device)

    def prepare(self, plan: BatchPlan) -> TorchAttnMetadata:
        prompts: list[_Prompt] = []
        groups: defaultdict[int, list[tuple[int, ReqSlice]]] = defaultdict(list)
        first = 0
        for part in plan.slices:
            if len(part) == 1:
                groups[self._num_pages(part).bit_length()].append((first, part))
            else:
                page_P = self._page_table_RP[part.req.row, : self._num_pages(part)].long()
                prompts.append(_Prompt(first, len(part), part.start, page_P))
            first += len(part)
        return TorchAttnMetadata(prompts, [self._stack(group) for group in groups.values()])

    def _num_pages(self, part: ReqSlice) -> int:
        return -(-part.end // self._page_size)

    def _stack(self, group: list[tuple[int, ReqSlice]]) -> _Stack:
        device = self._page_table_RP.device
        token_B = torch.tensor([token for token, _ in group], device=device)
        row_B = torch.tensor([part.req.row for _, part in group], device=device)
        end_B = torch.tensor([part.end for _, part in group], device=device)
        length = max(part.end for _, part in group)
        num_pages = max(self._num_pages(part) for _, part in group)
        is_own_BP = torch.arange(num_pages, device=device) * self._page_size < end_B[:, None]
        page_BP = self._page_table_RP[row_B, :num_pages].long() * is_own_BP
        bias_Y1L, dtype = None, self._stack_dtype(len(group) * length)
        if any(part.end < length for _, part in group):
            is_padding_BL = torch.arange(length, device=device) >= end_B[:, None]
            bias_BL = torch.zeros_like(is_padding_BL, dtype=dtype).masked_fill_(is_padding_BL, -math.inf)
            bias_Y1L = bias_BL.repeat(self._num_kv_heads, 1).unsqueeze(1)
        return _Stack(token_B, page_BP.flatten(), length, bias_Y1L, dtype)

    def _stack_dtype(self, num_positions: int) -> torch.dtype:
        """A CPU's float32 product starts so much faster than bf16's that for a small one the casts pay."""
        is_small = num_positions * self._num_kv_heads * self._head_dim < _SMALL
        return torch.float32 if is_small and not self._future.is_cuda else self._future.dtype

    def forward(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: int, batch: Batch) -> Tensor:
        metadata = batch.attn_metadata
        assert isinstance(metadata, TorchAttnMetadata)
        self._pool.store(layer, k_TKH, v_TKH, batch.slot_T)
        if metadata.is_one_stack:
            return self._attend_stack(q_TNH, layer, metadata.stacks[0])
        o_TNH = torch.empty_like(q_TNH)
        for prompt in metadata.prompts:
            rows = slice(prompt.first, prompt.first + prompt.length)
            self._attend_prompt(q_TNH[rows], layer, prompt, o_TNH[rows])
        for stack in metadata.stacks:
            o_TNH[stack.token_B] = self._attend_stack(q_TNH[stack.token_B], layer, stack)
        return o_TNH

    def _attend_prompt(self, q_TNH: Tensor, layer: int, prompt: _Prompt, o_TNH: Tensor) -> None:
        """Blocks of queries, written to o_TNH."""
        k_KLH, v_KLH = self._paged_2KPsH[layer].index_select(2, prompt.page_P).flatten(2, 3)
        q_KGTH = (q_TNH * self._scale).unflatten(1, (self._num_kv_heads, -1)).permute(1, 2, 0, 3)
        o_KGTH = o_TNH.unflatten(1, (self._num_kv_heads, -1)).permute(1, 2, 0, 3)
        for begin in range(0, prompt.length, _QUERY_BLOCK):
            end = min(begin + _QUERY_BLOCK, prompt.length)
            length, seen = end - begin, prompt.start + end
            q = q_KGTH[:, :, begin:end].reshape(self._num_kv_heads, -1, self._head_dim)
            scores = (q @ k_KLH[:, :seen].transpose(1, 2)).unflatten(1, (-1, length))
            scores[..., seen - length :] += self._future[:length, :length]
            weights = torch.softmax(scores, dim=-1).flatten(1, 2)
            o_KGTH[:, :, begin:end] = (weights @ v_KLH[:, :seen]).unflatten(1, (-1, length))

    def _attend_stack(self, q_BNH: Tensor, layer: int, stack: _Stack) -> Tensor:
        """One product for all requests and kv heads: Y = K * B of them, G queries each."""
        num_kv_heads, head_dim, batch_size = self._num_kv_heads, self._head_dim, len(q_BNH)
        gathered = self._paged_2KPsH[layer].index_select(2, stack.page_X).to(stack.dtype)
        k_YLH, v_YLH = gathered.view(2, num_kv_heads * batch_size, -1, head_dim)[:, :, : stack.length]
        q_KBGH = q_BNH.view(batch_size, num_kv_heads, -1, head_dim).transpose(0, 1)
        q_YGH = q_KBGH.reshape(num_kv_heads * batch_size, -1, head_dim).to(stack.dtype)
        bias, beta = (self._no_bias.to(stack.dtype), 0) if stack.bias_Y1L is None else (stack.bias_Y1L, 1)
        scores = torch.baddbmm(bias, q_YGH, k_YLH.transpose(1, 2), beta=beta, alpha=self._scale)
        o_YGH = torch.bmm(torch.softmax(scores, dim=-1), v_YLH)
        o_BKGH = o_YGH.view(num_kv_heads, batch_size, -1, head_dim).transpose(0, 1)
        o_BNH: Tensor = o_BKGH.reshape(batch_size, -1, head_dim)
        return o_BNH.to(q_BNH.dtype)
