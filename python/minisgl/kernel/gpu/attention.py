"""Attention of single queries over a paged context, in parts that many programs compute side by side.

The parts of a context are softmaxed by themselves and then joined by their maxima and sums ("Flash-Decoding", Dao et
al. 2023). Where all requests begin with the same pages, the queries of all of them attend to those together, as one
matrix product ("Hydragen", Juravsky et al. 2024, arXiv:2402.05099), and only the rest is each request's own. Lengths
are read on the device, so nothing has to be planned on the host.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import pdl, wait_for_inputs

_PROGRAMS = 528  # about: four for each processor of a large GPU
_MAX_PARTS = 32
_BLOCK = 32  # positions at a time
_ROWS, _SHARED_BLOCK = 64, 64  # queries and positions at a time, where they share a context


@triton.jit
def _attend(
    queries, k_pool, v_pool, pages, begin, end, scale, stride_k, stride_v, page_size,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Softmax over positions [begin, end): the unnormalised output of each row, its maximum and its sum."""
    h, n = tl.arange(0, WIDTH_2), tl.arange(0, BLOCK)
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH_2), tl.float32)
    for first in tl.range(begin, end, BLOCK, num_stages=3):
        place = first + n
        mask = place < end
        page = tl.load(pages + place // page_size, mask=mask, other=0).to(tl.int64)
        slot = (page * page_size + place % page_size)[:, None]
        inside = mask[:, None] & (h < WIDTH)[None, :]
        k = tl.load(k_pool + slot * stride_k + h[None, :], mask=inside, other=0.0)
        v = tl.load(v_pool + slot * stride_v + h[None, :], mask=inside, other=0.0)
        score = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(mask[None, :], score, -1e30)
        new_top = tl.maximum(top, tl.max(score, axis=1))
        weight = tl.where(mask[None, :], tl.exp(score - new_top[:, None]), 0.0)
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def _attend_own(
    q, k_pool, v_pool, page_table, token, row, position, shared, o_part, top_part, sum_part, scale,
    stride_q, stride_ks, stride_kh, stride_vs, stride_vh, stride_pages, page_size, num_parts, first_part, num_heads,
    GROUP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A part of what a request does not share: a program for the queries of one kv head."""
    b, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g, h = tl.arange(0, HEADS), tl.arange(0, WIDTH_2)
    wait_for_inputs(PDL)
    start = 0
    if HAS_SHARED:
        start = tl.load(shared)
    end = tl.load(position + b).to(tl.int32) + 1
    part_size = tl.cdiv(tl.cdiv(tl.maximum(end - start, 0), num_parts - first_part), BLOCK) * BLOCK
    begin = start + part * part_size
    head = kv_head * GROUP + g
    is_head = g < GROUP
    q_rows = q + tl.load(token + b).to(tl.int64) * stride_q + head[:, None] * WIDTH + h[None, :]
    queries = tl.load(q_rows, mask=is_head[:, None] & (h < WIDTH)[None, :], other=0.0)
    acc, top, total = _attend(
        queries, k_pool + kv_head * stride_kh, v_pool + kv_head * stride_vh,
        page_table + tl.load(row + b).to(tl.int64) * stride_pages, begin, tl.minimum(begin + part_size, end), scale,
        stride_ks, stride_vs, page_size, HEADS, WIDTH, WIDTH_2, BLOCK,
    )  # fmt: skip
    place = (b * num_heads + head) * num_parts + first_part + part
    tl.store(top_part + place, top, mask=is_head)
    tl.store(sum_part + place, total, mask=is_head)
    outputs = o_part + place.to(tl.int64)[:, None] * WIDTH + h[None, :]
    tl.store(outputs, acc, mask=is_head[:, None] & (h < WIDTH)[None, :])


@triton.jit
def _attend_shared(
    q, k_pool, v_pool, page_table, row, shared, o_part, top_part, sum_part, scale,
    stride_q, stride_ks, stride_kh, stride_vs, stride_vh, stride_pages, page_size, num_parts, num_shared_parts,
    num_heads, batch_size,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A part of what all requests share: a program for some of the queries of one kv head."""
    x = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kv_head, part = tl.program_id(1), tl.program_id(2)
    b, head, h = x // GROUP, kv_head * GROUP + x % GROUP, tl.arange(0, WIDTH_2)
    is_query = b < batch_size
    wait_for_inputs(PDL)
    end = tl.load(shared)
    part_size = tl.cdiv(tl.cdiv(end, num_shared_parts), BLOCK) * BLOCK
    begin = part * part_size
    q_rows = q + b.to(tl.int64)[:, None] * stride_q + head[:, None] * WIDTH + h[None, :]
    queries = tl.load(q_rows, mask=is_query[:, None] & (h < WIDTH)[None, :], other=0.0)
    acc, top, total = _attend(
        queries, k_pool + kv_head * stride_kh, v_pool + kv_head * stride_vh,
        page_table + tl.load(row).to(tl.int64) * stride_pages, begin, tl.minimum(begin + part_size, end), scale,
        stride_ks, stride_vs, page_size, ROWS, WIDTH, WIDTH_2, BLOCK,
    )  # fmt: skip
    place = (b * num_heads + head) * num_parts + part
    tl.store(top_part + place, top, mask=is_query)
    tl.store(sum_part + place, total, mask=is_query)
    outputs = o_part + place.to(tl.int64)[:, None] * WIDTH + h[None, :]
    tl.store(outputs, acc, mask=is_query[:, None] & (h < WIDTH)[None, :])


@triton.jit
def _join_parts(
    o_part, top_part, sum_part, token, o, stride_o, num_parts, num_heads,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b, head = tl.program_id(0), tl.program_id(1)
    p, h = tl.arange(0, PARTS), tl.arange(0, WIDTH_2)
    wait_for_inputs(PDL)
    place = (b * num_heads + head) * num_parts + p
    mask = p < num_parts
    top = tl.load(top_part + place, mask=mask, other=-1e30)
    weight = tl.exp(top - tl.max(top, axis=0))
    total = tl.sum(weight * tl.load(sum_part + place, mask=mask, other=0.0), axis=0)
    parts = o_part + place.to(tl.int64)[:, None] * WIDTH + h[None, :]
    acc = tl.load(parts, mask=mask[:, None] & (h < WIDTH)[None, :], other=0.0)
    result = tl.sum(acc * weight[:, None], axis=0) / total
    outputs = o + tl.load(token + b).to(tl.int64) * stride_o + head * WIDTH + h
    tl.store(outputs, result.to(o.dtype.element_ty), mask=h < WIDTH)


def attend_decode(
    q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, page_table_RP: Tensor, page_size: int,
    token_B: Tensor, row_B: Tensor, position_B: Tensor, o_TNH: Tensor, shared_1: Tensor | None = None,
) -> None:  # fmt: skip
    _, num_heads, width = q_TNH.shape
    batch_size, num_kv_heads = len(token_B), k_SKH.shape[1]
    group, device = num_heads // num_kv_heads, q_TNH.device
    width_2 = max(16, triton.next_power_of_2(width))
    num_own = _num_parts(batch_size * num_kv_heads)
    num_tiles = triton.cdiv(batch_size * group, _ROWS)
    num_shared_tokens = 0 if shared_1 is None else _num_parts(num_tiles * num_kv_heads)
    num_parts = num_shared_tokens + num_own
    o_part = torch.empty(
        batch_size * num_heads * num_parts, width, dtype=torch.float32, device=device
    )
    top_part, sum_part = torch.empty(2, batch_size * num_heads * num_parts, device=device).unbind()
    outputs = (o_part, top_part, sum_part, 1.0 / math.sqrt(width))
    pool_strides = (k_SKH.stride(0), k_SKH.stride(1), v_SKH.stride(0), v_SKH.stride(1))
    strides = (q_TNH.stride(0), *pool_strides, page_table_RP.stride(0), page_size, num_parts)
    sizes = {"GROUP": group, "WIDTH": width, "WIDTH_2": width_2, **pdl(q_TNH)}
    if shared_1 is not None:
        _attend_shared[(num_tiles, num_kv_heads, num_shared_tokens)](
            q_TNH, k_SKH, v_SKH, page_table_RP, row_B, shared_1, *outputs, *strides, num_shared_tokens, num_heads, batch_size,
            ROWS=_ROWS, BLOCK=_SHARED_BLOCK, **sizes,
        )  # fmt: skip
    _attend_own[(batch_size, num_kv_heads, num_own)](
        q_TNH, k_SKH, v_SKH, page_table_RP, token_B, row_B, position_B, row_B if shared_1 is None else shared_1,
        *outputs, *strides, num_shared_tokens, num_heads,
        HEADS=max(16, triton.next_power_of_2(group)), BLOCK=_BLOCK, HAS_SHARED=shared_1 is not None, **sizes,
    )  # fmt: skip
    _join_parts[(batch_size, num_heads)](
        o_part, top_part, sum_part, token_B, o_TNH, o_TNH.stride(0), num_parts, num_heads,
        PARTS=triton.next_power_of_2(num_parts), WIDTH=width, WIDTH_2=width_2, **pdl(q_TNH),
    )  # fmt: skip


def _num_parts(num_programs: int) -> int:
    """Parts of a context that fill the device."""
    return max(1, min(_MAX_PARTS, _PROGRAMS // num_programs))
