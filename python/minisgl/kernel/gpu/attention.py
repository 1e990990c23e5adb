"""Attention of single queries over a paged context, in splits that are computed in parallel.

Each split of a context is softmaxed by itself; a second launch merges the splits by their maxima
and sums ("Flash-Decoding", Dao et al. 2023). Lengths are read on the device, so the host plans
nothing.

Where requests of a group begin with the same pages, their queries attend to those pages together,
as one matrix product ("Hydragen", Juravsky et al. 2024, arXiv:2402.05099). What follows these pages
is for `BalancedDecode`.
"""

# Dimensions: B requests of a step, H head width, K kv heads, N query heads, P pages,
# R rows of the tables, S kv slots, T tokens of a step, X a selection out of another dimension.

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import RememberedKernel, next_power_of_2, pdl, wait_for_inputs

_PROGRAMS = 528  # about: four for each multiprocessor of a large GPU
_MAX_SPLITS = 32
_SPLITS_TO_MERGE = (4, _MAX_SPLITS)  # few, so that few kernels are compiled
_BLOCK = 32  # positions at a time
# Where queries share a context, as suits an H200: so many of them and positions at a time, no more
# programs than its multiprocessors run at once, two each, and no short parts, since all have to be
# joined.
_SHARED_ROWS = 64
_SHARED_BLOCK = 64
_SHARED_PROGRAMS = 264
_MIN_PART = 256
_MAX_PARTS = 16
_USUAL_GROUPS = 32  # and fewer, so that one kernel is compiled
_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _attend(
    queries, k_pool, v_pool, pages, begin, end, scale, softcap, stride_k, stride_v, page_size,
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
        slot = (page * page_size + position % page_size)[:, None]
        inside = mask[:, None] & (h < WIDTH)[None, :]
        k = tl.load(k_pool + slot * stride_k + h[None, :], mask=inside, other=0.0)
        v = tl.load(v_pool + slot * stride_v + h[None, :], mask=inside, other=0.0)
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
    do_not_specialize=["stride_pages", "num_splits"],
    do_not_specialize_on_alignment=["query", "row", "position", "split_top", "split_sum"],
)
def _attend_split(
    q, k_pool, v_pool, page_table, query, row, position,
    split_o, split_top, split_sum, scale, softcap, window,
    stride_q, stride_ks, stride_kh, stride_vs, stride_vh, stride_pages, page_size,
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
    pages = page_table + tl.load(row + b).to(tl.int64) * stride_pages
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
        queries, k_pool + kv_head * stride_kh, v_pool + kv_head * stride_vh, pages,
        begin, tl.minimum(begin + split_size, end), scale, softcap,
        stride_ks, stride_vs, page_size, HEADS, WIDTH, WIDTH_2, BLOCK, HAS_SOFTCAP,
    )  # fmt: skip
    place = (b * num_heads + head) * num_splits + split
    tl.store(split_top + place, top, mask=is_head)
    tl.store(split_sum + place, total, mask=is_head)
    outputs = split_o + place.to(tl.int64)[:, None] * WIDTH + h[None, :]
    tl.store(outputs, acc, mask=is_head[:, None] & (h < WIDTH)[None, :])


@triton.jit
def _attend_shared_block(
    queries, top, total, acc, k_pool, v_pool, pages, first, end, scale,
    stride_k, stride_v,
    PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, BLOCK: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """The softmax so far, and positions [first, first + BLOCK), of which those from end on are not.

    Scores are exponents of two here. Whole blocks have no masks. With masks, and exponentials of e,
    the kernel took a third longer (256 queries of 16 heads, 2,048 tokens, an H200).
    """
    h = tl.arange(0, WIDTH_2)
    position = first + tl.arange(0, BLOCK)
    mask = position < end
    inside = (h < WIDTH)[None, :]
    if IS_WHOLE:
        page = tl.load(pages + position // PAGE_SIZE).to(tl.int64)
    else:
        page = tl.load(pages + position // PAGE_SIZE, mask=mask, other=0).to(tl.int64)
        inside = inside & mask[:, None]
    slot = (page * PAGE_SIZE + position % PAGE_SIZE)[:, None]
    k = tl.load(k_pool + slot * stride_k + h[None, :], mask=inside, other=0.0)
    v = tl.load(v_pool + slot * stride_v + h[None, :], mask=inside, other=0.0)
    score = tl.dot(queries, tl.trans(k), input_precision="ieee")
    if not IS_WHOLE:
        score = tl.where(mask[None, :], score, -1e30)
    new_top = tl.maximum(top, tl.max(score, axis=1) * scale)
    weight = tl.exp2(score * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_top, total, acc


@RememberedKernel
@triton.jit(
    do_not_specialize=["stride_pages", "num_parts", "num_groups"],
    do_not_specialize_on_alignment=[
        "row",
        "num_shared",
        "member",
        "group_begin",
        "part_top",
        "part_sum",
        "num_used",
    ],
)
def _attend_shared_prefix(
    q, k_pool, v_pool, page_table, row, num_shared, member, group_begin,
    part_o, part_top, part_sum, num_used, scale,
    stride_q, stride_ks, stride_kh, stride_vs, stride_vh, stride_pages,
    num_parts, num_heads, num_groups,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, BLOCK: tl.constexpr, MIN_PART: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A part of a shared prefix: a program for ROWS of a group's queries of one kv head.

    HEADS: query heads that share a kv head.
    """
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    tile = tl.program_id(2)  # those of no group come last
    h = tl.arange(0, WIDTH_2)
    # Only the kernel before this one may still run, and it writes none of these.
    g = tl.arange(0, GROUPS)
    begins = tl.load(group_begin + g, mask=g < num_groups, other=0)
    ends = tl.load(group_begin + g + 1, mask=g < num_groups, other=0)
    tiles = tl.cdiv((ends - begins) * HEADS, ROWS)
    end_tiles = tl.cumsum(tiles, axis=0)
    is_mine = (tile < end_tiles) & (tile >= end_tiles - tiles)
    first_tile = tl.sum(tl.where(is_mine, end_tiles - tiles, 0), axis=0)
    first_member = tl.sum(tl.where(is_mine, begins, 0), axis=0)
    end_member = tl.sum(tl.where(is_mine, ends, 0), axis=0)
    x = (tile - first_tile) * ROWS + tl.arange(0, ROWS)
    head = kv_head * HEADS + x % HEADS
    is_query = first_member + x // HEADS < end_member
    b = tl.load(member + first_member + x // HEADS, mask=is_query, other=0)
    has_queries = first_member < end_member  # else no group has this tile
    some_member = tl.load(member + first_member, mask=has_queries, other=0)
    num_tokens = tl.load(num_shared + some_member, mask=has_queries, other=0)
    pages = page_table + tl.load(row + some_member).to(tl.int64) * stride_pages
    # The first program waits in any case: so the kernel after this one waits for the one before it.
    if tile > 0 and not has_queries:
        return
    wait_for_inputs(PDL)
    size = tl.cdiv(tl.maximum(tl.cdiv(num_tokens, num_parts), MIN_PART), BLOCK) * BLOCK
    if kv_head + part == 0:
        is_first_head = is_query & (x % HEADS == 0)
        tl.store(num_used + b, tl.cdiv(num_tokens, size), mask=is_first_head)
    begin = part * size
    if begin >= num_tokens:
        return
    end = tl.minimum(begin + size, num_tokens)
    end_of_whole = begin + (end - begin) // BLOCK * BLOCK
    q_rows = q + b.to(tl.int64)[:, None] * stride_q + head[:, None] * WIDTH + h[None, :]
    queries = tl.load(q_rows, mask=is_query[:, None] & (h < WIDTH)[None, :], other=0.0)
    k_pool += kv_head * stride_kh
    v_pool += kv_head * stride_vh
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH_2), tl.float32)
    for first in tl.range(begin, end_of_whole, BLOCK, num_stages=3):
        top, total, acc = _attend_shared_block(
            queries, top, total, acc, k_pool, v_pool, pages, first, end, scale * _LOG2_E,
            stride_ks, stride_vs, PAGE_SIZE, WIDTH, WIDTH_2, BLOCK, True,
        )  # fmt: skip
    if end_of_whole < end:
        top, total, acc = _attend_shared_block(
            queries, top, total, acc, k_pool, v_pool, pages, end_of_whole, end, scale * _LOG2_E,
            stride_ks, stride_vs, PAGE_SIZE, WIDTH, WIDTH_2, BLOCK, False,
        )  # fmt: skip
    # Read again: registers that keep it through the loop would be missing there.
    b = tl.load(member + first_member + x // HEADS, mask=is_query, other=0)
    place = (b * num_heads + head) * num_parts + part
    tl.store(part_top + place, top / _LOG2_E, mask=is_query)
    tl.store(part_sum + place, total, mask=is_query)
    outputs = part_o + place.to(tl.int64)[:, None] * WIDTH + h[None, :]
    tl.store(outputs, acc, mask=is_query[:, None] & (h < WIDTH)[None, :])


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


def attend_shared_prefixes(
    q_BNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, page_table_RP: Tensor, page_size: int,
    row_B: Tensor, num_shared_B: Tensor, member_B: Tensor, indptr: Tensor, *, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch_size, num_heads, width = q_BNH.shape
    num_kv_heads = k_SKH.shape[1]
    heads = num_heads // num_kv_heads
    num_groups = len(indptr) - 1
    num_tiles = -(-batch_size * heads // _SHARED_ROWS)
    num_parts = max(1, min(_MAX_PARTS, _SHARED_PROGRAMS // (num_tiles * num_kv_heads)))
    most_tiles = num_tiles + num_groups - 1  # the last one of each group may have few rows
    sizes = (batch_size, num_heads, num_parts)
    output_BNXH = q_BNH.new_empty(*sizes, width, dtype=torch.float32)
    top_BNX, sum_BNX = q_BNH.new_empty(2, *sizes, dtype=torch.float32).unbind()
    num_used_B = torch.empty_like(member_B)
    _attend_shared_prefix[(num_kv_heads, num_parts, most_tiles)](
        q_BNH, k_SKH, v_SKH, page_table_RP, row_B, num_shared_B, member_B, indptr,
        output_BNXH, top_BNX, sum_BNX, num_used_B, scale,
        q_BNH.stride(0), k_SKH.stride(0), k_SKH.stride(1), v_SKH.stride(0), v_SKH.stride(1),
        page_table_RP.stride(0), num_parts, num_heads, num_groups,
        GROUPS=max(_USUAL_GROUPS, next_power_of_2(num_groups)), HEADS=heads, ROWS=_SHARED_ROWS,
        PAGE_SIZE=page_size, WIDTH=width, WIDTH_2=max(16, next_power_of_2(width)),
        BLOCK=_SHARED_BLOCK, MIN_PART=_MIN_PART, **pdl(q_BNH),
    )  # fmt: skip
    return output_BNXH, top_BNX, sum_BNX, num_used_B


def attend_decode(
    q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, page_table_RP: Tensor, page_size: int,
    query_B: Tensor, row_B: Tensor, position_B: Tensor, o_TNH: Tensor, *,
    scale: float, window: int | None = None, softcap: float | None = None,
) -> None:  # fmt: skip
    _, num_heads, width = q_TNH.shape
    num_kv_heads = k_SKH.shape[1]
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
        q_TNH, k_SKH, v_SKH, page_table_RP, query_B, row_B, position_B,
        split_o, split_top, split_sum, scale, softcap or 0.0, window or 0, q_TNH.stride(0),
        k_SKH.stride(0), k_SKH.stride(1), v_SKH.stride(0), v_SKH.stride(1),
        page_table_RP.stride(0), page_size, num_splits, num_heads,
        GROUP=group, HEADS=max(16, next_power_of_2(group)), BLOCK=_BLOCK,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
        **sizes_of_heads, **pdl(q_TNH),
    )  # fmt: skip
    _merge_splits[(batch_size, num_heads)](
        split_o, split_top, split_sum, query_B, o_TNH, o_TNH.stride(0), num_splits, num_heads,
        SPLITS_2=_room_for(num_splits), **sizes_of_heads, **pdl(q_TNH),
    )  # fmt: skip


def _room_for(num_splits: int) -> int:
    """How many splits the variant of the kernel has room for that merges so many."""
    return next(room for room in _SPLITS_TO_MERGE if room >= num_splits)
