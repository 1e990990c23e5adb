"""Attention of single queries over a paged context, for few requests: each context is divided among many programs.

The parts of a context are softmaxed by themselves and then joined by their maxima and sums (Dao et al. 2023,
"Flash-Decoding"). Lengths are read on the device, so nothing has to be planned on the host.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import pdl, wait_for_inputs

_PROGRAMS = 264  # about: two for each processor of a large GPU
_MAX_PARTS = 32
_BLOCK = 32  # positions at a time


@triton.jit
def _attend_part(
    q, k_pool, v_pool, page_table, token, row, position, o_part, top_part, sum_part, scale,
    stride_q, stride_ks, stride_kh, stride_vs, stride_vh, stride_pages, page_size, num_parts, num_heads,
    GROUP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    b, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g, h, n = tl.arange(0, HEADS), tl.arange(0, WIDTH_2), tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    length = tl.load(position + b).to(tl.int32) + 1
    pages = page_table + tl.load(row + b).to(tl.int64) * stride_pages
    part_size = tl.cdiv(tl.cdiv(length, num_parts), BLOCK) * BLOCK
    head = kv_head * GROUP + g
    q_rows = q + tl.load(token + b).to(tl.int64) * stride_q + head[:, None] * WIDTH + h[None, :]
    queries = tl.load(q_rows, mask=(g < GROUP)[:, None] & (h < WIDTH)[None, :], other=0.0)
    top = tl.full((HEADS,), -1e30, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, WIDTH_2), tl.float32)
    begin, end = part * part_size, tl.minimum((part + 1) * part_size, length)
    while begin < end:
        place = begin + n
        mask = place < end
        page = tl.load(pages + place // page_size, mask=mask, other=0).to(tl.int64)
        slot = (page * page_size + place % page_size)[:, None]
        inside = mask[:, None] & (h < WIDTH)[None, :]
        k = tl.load(k_pool + slot * stride_ks + kv_head * stride_kh + h[None, :], mask=inside, other=0.0)
        v = tl.load(v_pool + slot * stride_vs + kv_head * stride_vh + h[None, :], mask=inside, other=0.0)
        score = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(mask[None, :], score, -1e30)
        new_top = tl.maximum(top, tl.max(score, axis=1))
        weight = tl.where(mask[None, :], tl.exp(score - new_top[:, None]), 0.0)
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top
        begin += BLOCK
    place = (b * num_heads + head) * num_parts + part
    tl.store(top_part + place, top, mask=g < GROUP)
    tl.store(sum_part + place, total, mask=g < GROUP)
    outputs = o_part + place.to(tl.int64)[:, None] * WIDTH + h[None, :]
    tl.store(outputs, acc, mask=(g < GROUP)[:, None] & (h < WIDTH)[None, :])


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
    token_B: Tensor, row_B: Tensor, position_B: Tensor, o_TNH: Tensor,
) -> None:  # fmt: skip
    _, num_heads, width = q_TNH.shape
    batch_size, num_kv_heads = len(token_B), k_SKH.shape[1]
    group, device = num_heads // num_kv_heads, q_TNH.device
    num_parts = max(1, min(_MAX_PARTS, _PROGRAMS // (batch_size * num_kv_heads)))
    o_part = torch.empty(batch_size * num_heads * num_parts, width, dtype=torch.float32, device=device)
    top_part, sum_part = torch.empty(2, batch_size * num_heads * num_parts, device=device).unbind()
    width_2 = triton.next_power_of_2(width)
    _attend_part[(batch_size, num_kv_heads, num_parts)](
        q_TNH, k_SKH, v_SKH, page_table_RP, token_B, row_B, position_B, o_part, top_part, sum_part,
        1.0 / math.sqrt(width), q_TNH.stride(0), k_SKH.stride(0), k_SKH.stride(1), v_SKH.stride(0), v_SKH.stride(1),
        page_table_RP.stride(0), page_size, num_parts, num_heads,
        GROUP=group, HEADS=max(16, triton.next_power_of_2(group)), WIDTH=width, WIDTH_2=max(16, width_2), BLOCK=_BLOCK,
        num_warps=4, **pdl(q_TNH),
    )  # fmt: skip
    _join_parts[(batch_size, num_heads)](
        o_part, top_part, sum_part, token_B, o_TNH, o_TNH.stride(0), num_parts, num_heads,
        PARTS=_MAX_PARTS, WIDTH=width, WIDTH_2=width_2, num_warps=4, **pdl(q_TNH),
    )  # fmt: skip
