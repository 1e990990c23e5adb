"""Attention of single queries over a paged context, in splits that are computed in parallel.

Each split of a context is softmaxed by itself; a second launch merges the splits by their maxima
and sums ("Flash-Decoding", Dao et al. 2023). Lengths are read on the device, so the host plans
nothing.
"""

# Dimensions: B requests of a step, H head width, K kv heads, N query heads, P pages,
# Q positions of a page, R rows of the tables, T tokens of a step.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import RememberedKernel, next_power_of_2, pdl, wait_for_inputs

_PROGRAMS = 528  # about: four for each multiprocessor of a large GPU
_MAX_SPLITS = 32
_SPLITS_TO_MERGE = (4, _MAX_SPLITS)  # few, so that few kernels are compiled
_BLOCK = 32  # positions at a time


@triton.jit
def _attend(
    queries, k_pool, v_pool, pages, begin, end, scale, softcap, stride_page, stride_slot, page_size,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Softmax over positions [begin, end) of the context with these pages.

    Returns, for each row of queries: the output before it is divided by the sum, the maximum of the
    scores, and the sum.
    """
    h = tl.arange(0, WIDTH_2)
    in_block = tl.arange(0, BLOCK)
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH_2), tl.float32)
    for first in tl.range(begin, end, BLOCK, num_stages=3):
        position = first + in_block
        mask = position < end
        page = tl.load(pages + position // page_size, mask=mask, other=0).to(tl.int64)
        place = (page * stride_page + position % page_size * stride_slot)[:, None]
        inside = mask[:, None] & (h < WIDTH)[None, :]
        k = tl.load(k_pool + place + h[None, :], mask=inside, other=0.0)
        v = tl.load(v_pool + place + h[None, :], mask=inside, other=0.0)
        score = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFTCAP:  # tanh(x) = 2 sigmoid(2 x) - 1
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
        score = tl.where(mask[None, :], score, -1e30)
        new_top = tl.maximum(top, tl.max(score, axis=1))
        weight = tl.where(mask[None, :], tl.exp(score - new_top[:, None]), 0.0)
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@RememberedKernel
@triton.jit(
    do_not_specialize=["stride_row", "num_splits"],
    do_not_specialize_on_alignment=["query", "row", "position", "split_top", "split_sum"],
)
def _attend_split(
    q, k_pool, v_pool, page_table, query, row, position,
    split_o, split_top, split_sum, scale, softcap, window,
    stride_q, stride_page, stride_slot, stride_head, stride_row, page_size,
    num_splits, num_heads,
    GROUP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr,
    BLOCK: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A split of a context: a program for the queries of one kv head."""
    b = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    g = tl.arange(0, HEADS)
    h = tl.arange(0, WIDTH_2)
    # Only the kernel before this one may still run, and it writes none of these.
    start = 0
    end = tl.load(position + b).to(tl.int32) + 1
    q_row = q + tl.load(query + b).to(tl.int64) * stride_q
    pages = page_table + tl.load(row + b).to(tl.int64) * stride_row
    wait_for_inputs(PDL)
    if HAS_WINDOW:
        start = tl.maximum(end - window, 0)
    length = tl.maximum(end - start, 0)
    split_size = tl.cdiv(tl.cdiv(length, num_splits), BLOCK) * BLOCK
    begin = start + split * split_size
    head = kv_head * GROUP + g
    is_head = g < GROUP
    q_rows = q_row + head[:, None] * WIDTH + h[None, :]
    queries = tl.load(q_rows, mask=is_head[:, None] & (h < WIDTH)[None, :], other=0.0)
    acc, top, total = _attend(
        queries, k_pool + kv_head * stride_head, v_pool + kv_head * stride_head, pages,
        begin, tl.minimum(begin + split_size, end), scale, softcap,
        stride_page, stride_slot, page_size, HEADS, WIDTH, WIDTH_2, BLOCK, HAS_SOFTCAP,
    )  # fmt: skip
    place = (b * num_heads + head) * num_splits + split
    tl.store(split_top + place, top, mask=is_head)
    tl.store(split_sum + place, total, mask=is_head)
    outputs = split_o + place.to(tl.int64)[:, None] * WIDTH + h[None, :]
    tl.store(outputs, acc, mask=is_head[:, None] & (h < WIDTH)[None, :])


@RememberedKernel
@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["split_top", "split_sum", "query"],
)
def _merge_splits(
    split_o, split_top, split_sum, query, o, stride_o, num_splits, num_heads,
    SPLITS_2: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS_2)
    h = tl.arange(0, WIDTH_2)
    outputs = o + tl.load(query + b).to(tl.int64) * stride_o + head * WIDTH + h
    place = (b * num_heads + head) * num_splits + split
    inputs = split_o + place.to(tl.int64)[:, None] * WIDTH + h[None, :]
    mask = split < num_splits
    wait_for_inputs(PDL)
    # All are read before the first is used.
    top = tl.load(split_top + place, mask=mask, other=-1e30)
    sums = tl.load(split_sum + place, mask=mask, other=0.0)
    acc = tl.load(inputs, mask=mask[:, None] & (h < WIDTH)[None, :], other=0.0)
    weight = tl.exp(top - tl.max(top, axis=0))
    total = tl.sum(weight * sums, axis=0)
    width = tl.where(total > 0.0, WIDTH, 0)  # a missing query has no keys
    result = tl.sum(acc * weight[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(outputs, result.to(o.dtype.element_ty), mask=h < width)


def attend_decode(
    q_TNH: Tensor, k_PQKH: Tensor, v_PQKH: Tensor, page_table_RP: Tensor,
    query_B: Tensor, row_B: Tensor, position_B: Tensor, o_TNH: Tensor, *,
    scale: float, window: int | None = None, softcap: float | None = None,
) -> None:  # fmt: skip
    _, num_heads, width = q_TNH.shape
    page_size, num_kv_heads = k_PQKH.shape[1:3]
    batch_size = len(query_B)
    group = num_heads // num_kv_heads
    device = q_TNH.device
    sizes_of_heads = {"WIDTH": width, "WIDTH_2": max(16, next_power_of_2(width))}
    # As many splits as fill the device.
    num_splits = max(1, min(_MAX_SPLITS, _PROGRAMS // (batch_size * num_kv_heads)))

    num_outputs = batch_size * num_heads * num_splits
    split_o = torch.empty(num_outputs, width, dtype=torch.float32, device=device)
    split_top, split_sum = torch.empty(2, num_outputs, device=device).unbind()
    _attend_split[(batch_size, num_kv_heads, num_splits)](
        q_TNH, k_PQKH, v_PQKH, page_table_RP, query_B, row_B, position_B,
        split_o, split_top, split_sum, scale, softcap or 0.0, window or 0, q_TNH.stride(0),
        *k_PQKH.stride()[:3], page_table_RP.stride(0), page_size, num_splits, num_heads,
        GROUP=group, HEADS=max(16, next_power_of_2(group)), BLOCK=_BLOCK,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
        **sizes_of_heads, **pdl(q_TNH),
    )  # fmt: skip
    _merge_splits[(batch_size, num_heads)](
        split_o, split_top, split_sum, query_B, o_TNH, o_TNH.stride(0), num_splits, num_heads,
        SPLITS_2=_room_for(num_splits), **sizes_of_heads, **pdl(q_TNH),
    )  # fmt: skip


def _room_for(num_splits: int) -> int:
    """The number of splits of the smallest kernel variant that can merge so many."""
    return next(room for room in _SPLITS_TO_MERGE if room >= num_splits)
