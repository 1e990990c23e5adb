"""Head norms, rotation and KV store in one launch: a program for some heads of a token."""

# Dimensions: H head width, K kv heads, L positions of a sequence, M all heads of a token: N + 2 K,
# P pages, Q positions of a page, T tokens of a step.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import RememberedKernel, next_power_of_2, pdl, wait_for_inputs

_HEADS = 16  # in a program


@RememberedKernel
@triton.jit(do_not_specialize_on_alignment=["position", "slot"])
def _rotate_and_store(
    qkv, q_weight, k_weight, eps, cos, sin, position, slot, k_pool, v_pool,
    stride_qkv, stride_page, stride_slot, stride_head, num_heads, num_kv_heads,
    PAGE_SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    m = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    is_q = m < num_heads
    is_v = m >= num_heads + num_kv_heads
    is_k = (m >= num_heads) & (m < num_heads + num_kv_heads)
    inside = i < HALF
    mask = (m < num_heads + 2 * num_kv_heads) & inside
    # Only the kernel before this one may still run, and it writes none of these.
    if HAS_NORM:
        q_a = tl.load(q_weight + i, mask=inside)
        k_a = tl.load(k_weight + i, mask=inside)
        q_b = tl.load(q_weight + HALF + i, mask=inside)
        k_b = tl.load(k_weight + HALF + i, mask=inside)
    to = tl.load(slot + t)
    place = to // PAGE_SIZE * stride_page + to % PAGE_SIZE * stride_slot
    # The second half of a row of the tables holds cos and +sin.
    angle = tl.load(position + t).to(tl.int64) * (2 * HALF) + HALF + i
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    x = qkv + t * stride_qkv + m * (2 * HALF) + i
    a = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        dtype = qkv.dtype.element_ty
        sum_of_squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        scale = tl.rsqrt(sum_of_squares / (2 * HALF) + eps)[:, None]
        weight_a = tl.where(is_q, q_a, k_a).to(tl.float32)
        weight_b = tl.where(is_q, q_b, k_b).to(tl.float32)
        a = tl.where(is_v, a, (a * scale * weight_a).to(dtype).to(tl.float32))
        b = tl.where(is_v, b, (b * scale * weight_b).to(dtype).to(tl.float32))
    first = (a * c - b * s).to(qkv.dtype.element_ty)
    second = (b * c + a * s).to(qkv.dtype.element_ty)
    tl.store(x, first, mask=mask & ~is_v)
    tl.store(x + HALF, second, mask=mask & ~is_v)
    to_k = k_pool + place + (m - num_heads) * stride_head + i
    to_v = v_pool + place + (m - num_heads - num_kv_heads) * stride_head + i
    tl.store(to_k, first, mask=mask & is_k)
    tl.store(to_k + HALF, second, mask=mask & is_k)
    tl.store(to_v, a.to(qkv.dtype.element_ty), mask=mask & is_v)
    tl.store(to_v + HALF, b.to(qkv.dtype.element_ty), mask=mask & is_v)


def rotate_and_store(
    qkv_TMH: Tensor, q_weight_H: Tensor, k_weight_H: Tensor, eps: float,
    cos_LH: Tensor, sin_LH: Tensor, position_T: Tensor,
    slot_T: Tensor, k_PQKH: Tensor, v_PQKH: Tensor,
) -> None:  # fmt: skip
    tokens, num_all_heads, width = qkv_TMH.shape
    if tokens == 0:
        return
    half = width // 2
    page_size, num_kv_heads = k_PQKH.shape[1:3]
    grid = (tokens, -(-num_all_heads // _HEADS))
    _rotate_and_store[grid](
        qkv_TMH, q_weight_H, k_weight_H, eps, cos_LH, sin_LH, position_T, slot_T, k_PQKH, v_PQKH,
        qkv_TMH.stride(0), *k_PQKH.stride()[:3], num_all_heads - 2 * num_kv_heads, num_kv_heads,
        PAGE_SIZE=page_size, HALF=half, BLOCK=next_power_of_2(half), HEADS=_HEADS,
        HAS_NORM=q_weight_H.numel() > 0, **pdl(qkv_TMH),
    )  # fmt: skip
