"""Attention of groups of queries to the pages that their contexts begin with.

The queries of a group are multiplied with those pages together ("Hydragen", Juravsky et al. 2024,
arXiv:2402.05099). `BalancedDecode` attends to the rest of the contexts.

A plan, made once per step, gives each program a part of a prefix and up to `_ROWS` queries. All
parts of a step have the same length: the shortest at which all programs run at once.
"""

# Dimensions: B requests of a step, H head width, K kv heads, N query heads, P pages,
# Q positions of a page, R rows of the tables, X a selection out of another dimension, Z entries of
# a flat list.

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import RememberedKernel, next_power_of_2, pdl, wait_for_inputs

# As suits an H200: queries and positions at a time, and how many programs its multiprocessors run
# at once, two each.
_ROWS = 64
_BLOCK = 64
_PROGRAMS = 264
# No short parts and not many, since all have to be joined.
_MIN_PART = 256
_MAX_PARTS = 16
_USUAL_GROUPS = 64  # and fewer, so that one kernel is compiled
_CHUNK = 64  # what a program of the plan writes: of so many programs, and of so many queries
_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _size_of_parts(
    tokens_of, tiles_of, num_at_once,
    BLOCK: tl.constexpr, MIN_PART: tl.constexpr, MAX_PARTS: tl.constexpr,
):  # fmt: skip
    """The shortest length of parts, in whole blocks, at which all of them run at once.

    If not even whole prefixes all run at once, it is the length of the longest prefix.
    """
    most = tl.maximum(tl.max(tokens_of, axis=0), 1)
    low = tl.maximum(MIN_PART // BLOCK, tl.cdiv(most, MAX_PARTS * BLOCK))
    high = tl.maximum(low, tl.cdiv(most, BLOCK))
    while low < high:
        middle = (low + high) // 2
        num_needed = tl.sum(tiles_of * tl.cdiv(tokens_of, middle * BLOCK), axis=0)
        fits = num_needed <= num_at_once
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    return low * BLOCK


@triton.jit
def _of_group(is_mine, number_of):
    """Of each row of `is_mine`, the number of the group that it marks; 0 if it marks none."""
    return tl.sum(tl.where(is_mine, number_of[None, :], 0), axis=1)


@RememberedKernel
@triton.jit(
    do_not_specialize=["num_groups", "num_programs", "num_at_once"],
    do_not_specialize_on_alignment=["row", "num_shared", "member", "group_begin"],
)
def _plan(
    row, num_shared, member, group_begin, program, place, num_groups, num_programs, num_at_once,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    MIN_PART: tl.constexpr, MAX_PARTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write some programs and the places of some queries: those of a chunk.

    The programs of a group lie one after the other, part by part. So the results of a query in two
    successive parts are as many places apart as the tiles of the group have rows.

    HEADS: query heads that share a kv head.
    """
    wait_for_inputs(PDL)
    g = tl.arange(0, GROUPS)
    begins = tl.load(group_begin + g, mask=g < num_groups, other=0)
    ends = tl.load(group_begin + g + 1, mask=g < num_groups, other=0)
    is_used = begins < ends
    some_member = tl.load(member + begins, mask=is_used, other=0)
    tokens_of = tl.load(num_shared + some_member, mask=is_used, other=0)
    row_of = tl.load(row + some_member, mask=is_used, other=0)
    tiles_of = tl.cdiv((ends - begins) * HEADS, ROWS)

    size = _size_of_parts(tokens_of, tiles_of, num_at_once, BLOCK, MIN_PART, MAX_PARTS)
    parts_of = tl.cdiv(tokens_of, size)
    end_of = tl.cumsum(tiles_of * parts_of, axis=0)
    first_of = end_of - tiles_of * parts_of

    index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    is_mine = (index[:, None] >= first_of[None, :]) & (index[:, None] < end_of[None, :])
    first = _of_group(is_mine, first_of)
    tiles = _of_group(is_mine, tiles_of)
    tiles = tl.where(tiles > 0, tiles, num_programs)  # programs without work begin at 0, too,
    begin = (index - first) // tiles * size
    end = tl.minimum(begin + size, _of_group(is_mine, tokens_of))  # and have no tokens
    first_row = (index - first) % tiles * ROWS
    num_queries = _of_group(is_mine, ends - begins)
    numbers = program + 8 * index
    is_program = index < num_programs
    tl.store(numbers, begin, mask=is_program)
    tl.store(numbers + 1, end, mask=is_program)
    tl.store(numbers + 2, _of_group(is_mine, row_of), mask=is_program)
    tl.store(numbers + 3, _of_group(is_mine, begins), mask=is_program)
    tl.store(numbers + 4, first_row, mask=is_program)
    tl.store(numbers + 5, num_queries * HEADS - first_row, mask=is_program)

    is_mine = (index[:, None] >= begins[None, :]) & (index[:, None] < ends[None, :])
    is_member = tl.sum(is_mine.to(tl.int32), axis=1) > 0
    numbers = place + 4 * tl.load(member + index, mask=is_member, other=0)
    first_place = _of_group(is_mine, first_of * ROWS - begins * HEADS) + index * HEADS
    tl.store(numbers, first_place, mask=is_member)
    tl.store(numbers + 1, _of_group(is_mine, tiles_of) * ROWS, mask=is_member)
    tl.store(numbers + 2, _of_group(is_mine, parts_of), mask=is_member)


@triton.jit
def _attend_block(
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
    do_not_specialize=["stride_pages", "num_places"],
    do_not_specialize_on_alignment=["member", "part_top", "part_sum"],
)
def _attend_part(
    q, k_pool, v_pool, page_table, member, program, part_o, part_top, part_sum, scale,
    stride_q, stride_ks, stride_kh, stride_vs, stride_vh, stride_pages, num_places,
    HEADS: tl.constexpr, ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A part of a shared prefix: a program for ROWS of a group's queries of one kv head."""
    kv_head = tl.program_id(0)
    index = tl.program_id(1)
    h = tl.arange(0, WIDTH_2)
    # Only the kernel before this one may still run, and it writes none of these.
    begin = tl.load(program + 8 * index)
    end = tl.load(program + 8 * index + 1)
    page_row = tl.load(program + 8 * index + 2)
    first_member = tl.load(program + 8 * index + 3)
    first_row = tl.load(program + 8 * index + 4)
    num_rows = tl.load(program + 8 * index + 5)  # from the first one on
    # The first program waits in any case: so the kernel after this one waits for the one before it.
    if index > 0 and begin == end:
        return
    pages = page_table + page_row.to(tl.int64) * stride_pages
    x = first_row + tl.arange(0, ROWS)
    head = kv_head * HEADS + x % HEADS
    is_query = tl.arange(0, ROWS) < num_rows
    b = tl.load(member + first_member + x // HEADS, mask=is_query, other=0)
    wait_for_inputs(PDL)
    end_of_whole = begin + (end - begin) // BLOCK * BLOCK
    q_rows = q + b.to(tl.int64)[:, None] * stride_q + head[:, None] * WIDTH + h[None, :]
    queries = tl.load(q_rows, mask=is_query[:, None] & (h < WIDTH)[None, :], other=0.0)
    k_pool += kv_head * stride_kh
    v_pool += kv_head * stride_vh
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH_2), tl.float32)
    for first in tl.range(begin, end_of_whole, BLOCK, num_stages=3):
        top, total, acc = _attend_block(
            queries, top, total, acc, k_pool, v_pool, pages, first, end, scale * _LOG2_E,
            stride_ks, stride_vs, PAGE_SIZE, WIDTH, WIDTH_2, BLOCK, True,
        )  # fmt: skip
    if end_of_whole < end:
        top, total, acc = _attend_block(
            queries, top, total, acc, k_pool, v_pool, pages, end_of_whole, end, scale * _LOG2_E,
            stride_ks, stride_vs, PAGE_SIZE, WIDTH, WIDTH_2, BLOCK, False,
        )  # fmt: skip
    place = kv_head * num_places + index * ROWS + tl.arange(0, ROWS)
    is_query = tl.arange(0, ROWS) < num_rows
    tl.store(part_top + place, top / _LOG2_E, mask=is_query)
    tl.store(part_sum + place, total, mask=is_query)
    outputs = part_o + place.to(tl.int64)[:, None] * WIDTH + h[None, :]
    tl.store(outputs, acc, mask=is_query[:, None] & (h < WIDTH)[None, :])


def plan_shared_prefixes(
    row_B: Tensor, num_shared_B: Tensor, member_B: Tensor, indptr: Tensor,
    num_heads: int, num_kv_heads: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    heads = num_heads // num_kv_heads
    batch_size = len(row_B)
    num_groups = len(indptr) - 1
    # The last tile of each group may have few rows.
    most_tiles = -(-batch_size * heads // _ROWS) + num_groups - 1
    num_at_once = _PROGRAMS // num_kv_heads
    num_programs = max(num_at_once, most_tiles)
    program_ZX = row_B.new_empty(num_programs, 8)
    place_BX = row_B.new_empty(batch_size, 4)
    _plan[(-(-max(num_programs, batch_size) // _CHUNK),)](
        row_B, num_shared_B, member_B, indptr, program_ZX, place_BX,
        num_groups, num_programs, num_at_once,
        GROUPS=max(_USUAL_GROUPS, next_power_of_2(num_groups)), HEADS=heads, ROWS=_ROWS,
        BLOCK=_BLOCK, MIN_PART=_MIN_PART, MAX_PARTS=_MAX_PARTS, CHUNK=_CHUNK,
        **pdl(row_B),
    )  # fmt: skip
    return program_ZX, place_BX


def attend_shared_prefixes(
    q_BNH: Tensor, k_PQKH: Tensor, v_PQKH: Tensor, page_table_RP: Tensor,
    member_B: Tensor, program_ZX: Tensor, *, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _, num_heads, width = q_BNH.shape
    page_size, num_kv_heads = k_PQKH.shape[1:3]
    num_programs = len(program_ZX)
    num_places = num_programs * _ROWS
    output_KZH = q_BNH.new_empty(num_kv_heads, num_places, width, dtype=torch.float32)
    top_KZ, sum_KZ = q_BNH.new_empty(2, num_kv_heads, num_places, dtype=torch.float32).unbind()
    _attend_part[(num_kv_heads, num_programs)](
        q_BNH, k_PQKH, v_PQKH, page_table_RP, member_B, program_ZX,
        output_KZH, top_KZ, sum_KZ, scale,
        q_BNH.stride(0), k_PQKH.stride(1), k_PQKH.stride(2), v_PQKH.stride(1), v_PQKH.stride(2),
        page_table_RP.stride(0), num_places,
        HEADS=num_heads // num_kv_heads, ROWS=_ROWS, PAGE_SIZE=page_size,
        WIDTH=width, WIDTH_2=max(16, next_power_of_2(width)), BLOCK=_BLOCK, **pdl(q_BNH),
    )  # fmt: skip
    return output_KZH, top_KZ, sum_KZ
