"""Attention of prompts over a paged context, in tiles of queries ("FlashAttention-2", Dao 2023).

A program has a tile: the queries of some tokens, in all heads that share a kv head. It finds its
tokens on the device, so the host plans nothing. Heads may have any width.
"""

# Dimensions: H head width, K kv heads, N query heads, P pages, Q positions of a page, R rows of the
# tables, T tokens of a step.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import RememberedKernel, next_power_of_2, pdl, wait_for_inputs

_LOG2_E = 1.4426950408889634
# By the bytes of a head: rows of a tile, and positions at a time. Two stages fit 99 KB.
_TILES = {256: (128, 64), 512: (64, 32), 1024: (32, 16), 2048: (16, 16)}
_ROOMS = (32, 512)  # prompts that a variant takes: few, so that few variants are compiled


@triton.jit
def _attend_block(
    queries, q_position, first, end, top, total, acc, k_head, v_head, pages, scale, softcap, window,
    stride_page, stride_slot, page_size,
    WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, BLOCK: tl.constexpr, IN_ONE_PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ALL_SEE: tl.constexpr,
):  # fmt: skip
    """Add the keys of positions [first, first + BLOCK) to the running softmax of each row.

    Args:
        scale: times log2(e), if there is no soft cap.
        ALL_SEE: whether each row sees all these positions.

    Returns:
        The new top, total and acc.
    """
    h = tl.arange(0, WIDTH_2)
    in_block = tl.arange(0, BLOCK)
    position = first + in_block
    if IN_ONE_PAGE:
        page = tl.load(pages + first // page_size).to(tl.int64)
        place = page * stride_page + (first % page_size + in_block) * stride_slot
    else:
        page = tl.load(pages + position // page_size, mask=position < end, other=0).to(tl.int64)
        place = page * stride_page + position % page_size * stride_slot
    inside = (h < WIDTH)[None, :]
    if not ALL_SEE:
        inside = inside & (position < end)[:, None]
    k = tl.load(k_head + place[:, None] + h[None, :], mask=inside, other=0.0)
    v = tl.load(v_head + place[:, None] + h[None, :], mask=inside, other=0.0)
    score = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
    if HAS_SOFTCAP:  # tanh(x) = 2 sigmoid(2 x) - 1
        score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0) * 1.4426950408889634
    if not ALL_SEE:
        is_seen = position[None, :] <= q_position[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (position[None, :] > q_position[:, None] - window)
        score = tl.where(is_seen, score, -1e30)
    new_top = tl.maximum(top, tl.max(score, axis=1))
    weight = tl.exp2(score - new_top[:, None])
    if not ALL_SEE:  # a row may see none of these, and none before
        weight = tl.where(is_seen, weight, 0.0)
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_top, total, acc


@RememberedKernel
@triton.jit(
    do_not_specialize=["stride_row", "num_prompts"],
    do_not_specialize_on_alignment=["row", "position", "indptr"],
)
def _attend_tile(
    q, k_pool, v_pool, page_table, row, position, indptr, o, scale, softcap, window,
    stride_q, stride_o, stride_page, stride_slot, stride_head, stride_row, page_size, num_prompts,
    GROUP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, PROMPTS_2: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, BLOCK: tl.constexpr, IN_ONE_PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of the queries of one prompt, in the heads of one kv head."""
    # Only the kernel before this one may still run, and it writes no indptr, row or position.
    x = tl.arange(0, PROMPTS_2)
    first_x = tl.load(indptr + x, mask=x < num_prompts, other=0)
    last_x = tl.load(indptr + x + 1, mask=x < num_prompts, other=0)
    tiles_x = tl.cdiv(last_x - first_x, TOKENS)
    end_x = tl.cumsum(tiles_x, axis=0)
    # The last tiles of a prompt have the most keys: they begin first.
    tile = tl.sum(tiles_x, axis=0) - 1 - tl.program_id(0)
    prompt = tl.sum((end_x <= tile).to(tl.int32), axis=0)
    is_own = x == prompt
    first_token = tl.sum(tl.where(is_own, first_x, 0), axis=0)
    end_token = tl.sum(tl.where(is_own, last_x, 0), axis=0)
    tile_of_prompt = tile - tl.sum(tl.where(is_own, end_x - tiles_x, 0), axis=0)
    begin_token = first_token + tile_of_prompt * TOKENS
    start = tl.load(position + first_token, mask=tile >= 0, other=0)
    own_row = tl.load(row + first_token, mask=tile >= 0, other=0)
    pages = page_table + own_row.to(tl.int64) * stride_row

    kv_head = tl.program_id(1)
    r = tl.arange(0, TOKENS * HEADS)
    h = tl.arange(0, WIDTH_2)
    token = begin_token + r // HEADS
    head = kv_head * GROUP + r % HEADS
    is_row = (token < end_token) & (r % HEADS < GROUP)
    mask = is_row[:, None] & (h < WIDTH)[None, :]
    q_position = start + token - first_token
    first_position = start + begin_token - first_token
    end = start + tl.minimum(begin_token + TOKENS, end_token) - first_token
    begin = 0
    all_see_until = first_position + 1
    if HAS_WINDOW:
        begin = tl.maximum(first_position + 1 - window, 0) // BLOCK * BLOCK
        all_see_until = begin
    masked_from = begin + (all_see_until - begin) // BLOCK * BLOCK

    wait_for_inputs(PDL)
    if tile < 0:  # there are fewer tiles than programs
        return
    in_q = token.to(tl.int64)[:, None] * stride_q + head[:, None] * WIDTH + h[None, :]
    queries = tl.load(q + in_q, mask=mask, other=0.0)
    k_head = k_pool + kv_head * stride_head
    v_head = v_pool + kv_head * stride_head
    top = tl.full((TOKENS * HEADS,), -1e30, tl.float32)
    total = tl.zeros((TOKENS * HEADS,), tl.float32)
    acc = tl.zeros((TOKENS * HEADS, WIDTH_2), tl.float32)
    for first in tl.range(begin, masked_from, BLOCK, num_stages=2):
        top, total, acc = _attend_block(
            queries, q_position, first, end, top, total, acc, k_head, v_head, pages,
            scale, softcap, window, stride_page, stride_slot, page_size,
            WIDTH, WIDTH_2, BLOCK, IN_ONE_PAGE, HAS_WINDOW, HAS_SOFTCAP, True,
        )  # fmt: skip
    for first in tl.range(masked_from, end, BLOCK, num_stages=2):
        top, total, acc = _attend_block(
            queries, q_position, first, end, top, total, acc, k_head, v_head, pages,
            scale, softcap, window, stride_page, stride_slot, page_size,
            WIDTH, WIDTH_2, BLOCK, IN_ONE_PAGE, HAS_WINDOW, HAS_SOFTCAP, False,
        )  # fmt: skip
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    in_o = token.to(tl.int64)[:, None] * stride_o + head[:, None] * WIDTH + h[None, :]
    tl.store(o + in_o, result.to(o.dtype.element_ty), mask=mask)


def attend_prompts_on_device(
    q_TNH: Tensor, k_PQKH: Tensor, v_PQKH: Tensor, page_table_RP: Tensor,
    row_T: Tensor, position_T: Tensor, indptr: Tensor, o_TNH: Tensor, *,
    num_tokens: int, scale: float, window: int | None = None, softcap: float | None = None,
) -> None:  # fmt: skip
    _, num_heads, width = q_TNH.shape
    page_size, num_kv_heads = k_PQKH.shape[1:3]
    num_prompts = len(indptr) - 1
    group = num_heads // num_kv_heads
    heads = next_power_of_2(group)
    width_2 = max(16, next_power_of_2(width))
    num_rows, block = _TILES[max(256, width_2 * q_TNH.element_size())]
    tokens = max(1, num_rows // heads)
    num_tiles = -(-num_tokens // tokens) + num_prompts  # at most: each prompt's last may have less
    _attend_tile[(num_tiles, num_kv_heads)](
        q_TNH, k_PQKH, v_PQKH, page_table_RP, row_T, position_T, indptr, o_TNH,
        scale if softcap else scale * _LOG2_E, softcap or 0.0, window or 0,
        q_TNH.stride(0), o_TNH.stride(0),
        *k_PQKH.stride()[:3], page_table_RP.stride(0), page_size, num_prompts,
        GROUP=group, HEADS=heads, TOKENS=tokens, PROMPTS_2=_room_for(num_prompts),
        WIDTH=width, WIDTH_2=width_2, BLOCK=block, IN_ONE_PAGE=page_size % block == 0,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
        num_warps=8 if tokens * heads >= 128 else 4, **pdl(q_TNH),
    )  # fmt: skip


def _room_for(num_prompts: int) -> int:
    """The number of prompts of the smallest kernel variant that can take so many."""
    return next((room for room in _ROOMS if room >= num_prompts), next_power_of_2(num_prompts))
