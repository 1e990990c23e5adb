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
_SMALL = 1 << 17  # elements below which a CPU's float32 product starts so much faster that the casts pay


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
        page_BP: int64, padded with page 0.
        bias_B1L: 0 where a position is the request's, -inf behind its end; in the pool's dtype.
    """

    token_B: Tensor
    page_BP: Tensor
    bias_B1L: Tensor


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
    """Plain torch over any pool. Pool rows that were never written must be finite."""

    def __init__(self, kv_pool: BaseKVCachePool, page_table_RP: Tensor) -> None:
        self._pool = kv_pool
        self._page_table_RP = page_table_RP
        self._page_size = kv_pool.page_size
        hidden = torch.full((_QUERY_BLOCK, _QUERY_BLOCK), -math.inf, device=page_table_RP.device)
        self._future = hidden.triu(1).to(kv_pool.k_cache(0).dtype)  # of a block's queries against its own keys

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
        num_pages = max(self._num_pages(part) for _, part in group)
        row_B = torch.tensor([part.req.row for _, part in group], device=device)
        end_B = torch.tensor([part.end for _, part in group], device=device)
        is_own_BP = torch.arange(num_pages, device=device) * self._page_size < end_B[:, None]
        page_BP = self._page_table_RP[row_B, :num_pages].long() * is_own_BP
        is_padding_BL = torch.arange(num_pages * self._page_size, device=device) >= end_B[:, None]
        bias_BL = torch.zeros_like(is_padding_BL, dtype=self._pool.k_cache(0).dtype)
        bias_BL.masked_fill_(is_padding_BL, -math.inf)
        token_B = torch.tensor([token for token, _ in group], device=device)
        return _Stack(token_B, page_BP, bias_BL[:, None, :])

    def forward(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: int, batch: Batch) -> Tensor:
        metadata = batch.attn_metadata
        assert isinstance(metadata, TorchAttnMetadata)
        self._pool.store(layer, k_TKH, v_TKH, batch.slot_T)
        k_SKH, v_SKH = self._pool.k_cache(layer), self._pool.v_cache(layer)
        q_TNH = q_TNH * (1.0 / math.sqrt(q_TNH.shape[-1]))
        if metadata.is_one_stack:
            return self._attend_stack(q_TNH, k_SKH, v_SKH, metadata.stacks[0])
        o_TNH = torch.empty_like(q_TNH)
        for prompt in metadata.prompts:
            rows = slice(prompt.first, prompt.first + prompt.length)
            self._attend_prompt(q_TNH[rows], k_SKH, v_SKH, prompt, o_TNH[rows])
        for stack in metadata.stacks:
            o_TNH[stack.token_B] = self._attend_stack(q_TNH[stack.token_B], k_SKH, v_SKH, stack)
        return o_TNH

    def _gather(self, pool_SKH: Tensor, pages: Tensor) -> Tensor:
        """The slots of pages, head first: [K, pages * page_size, H]."""
        pool = pool_SKH.transpose(0, 1).unflatten(1, (-1, self._page_size))
        gathered: Tensor = pool.index_select(1, pages).flatten(1, 2)
        return gathered

    def _attend_prompt(self, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, prompt: _Prompt, o_TNH: Tensor) -> None:
        """Blocks of queries, written to o_TNH."""
        k_KLH, v_KLH = self._gather(k_SKH, prompt.page_P), self._gather(v_SKH, prompt.page_P)
        num_kv_heads, _, head_dim = k_KLH.shape
        q_KGTH = q_TNH.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
        o_KGTH = o_TNH.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
        for begin in range(0, prompt.length, _QUERY_BLOCK):
            end = min(begin + _QUERY_BLOCK, prompt.length)
            length, seen = end - begin, prompt.start + end
            q = q_KGTH[:, :, begin:end].reshape(num_kv_heads, -1, head_dim)
            scores = (q @ k_KLH[:, :seen].transpose(1, 2)).unflatten(1, (-1, length))
            scores[..., seen - length :] += self._future[:length, :length]
            weights = torch.softmax(scores, dim=-1).flatten(1, 2)
            o_KGTH[:, :, begin:end] = (weights @ v_KLH[:, :seen]).unflatten(1, (-1, length))

    def _attend_stack(self, q_BNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, stack: _Stack) -> Tensor:
        batch_size, num_pages = stack.page_BP.shape
        shape = (-1, batch_size, num_pages * self._page_size, q_BNH.shape[-1])
        k_KBLH = self._gather(k_SKH, stack.page_BP.flatten()).view(shape)
        v_KBLH = self._gather(v_SKH, stack.page_BP.flatten()).view(shape)
        q_KBGH = q_BNH.unflatten(1, (k_KBLH.shape[0], -1)).transpose(0, 1)
        if k_KBLH.numel() < _SMALL and k_KBLH.device.type == "cpu":
            q_KBGH, k_KBLH, v_KBLH = q_KBGH.float(), k_KBLH.float(), v_KBLH.float()
        scores = q_KBGH @ k_KBLH.transpose(2, 3)
        weights = torch.softmax(scores + stack.bias_B1L, dim=-1)
        return (weights @ v_KBLH).transpose(0, 1).flatten(1, 2).to(q_BNH.dtype)
