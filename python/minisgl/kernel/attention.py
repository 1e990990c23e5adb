"""Attention over a paged context: decodes, prompts, and the softmax of prompts."""

# Dimensions: B requests of a step, G query heads that share a kv head, H head width, K kv heads,
# L positions of a sequence, N query heads, P pages, Q positions of a page, R rows of the tables,
# T tokens of a step, X a selection out of another dimension, Z entries of a flat list.

from __future__ import annotations

import math

import torch
from torch import Tensor

from minisgl.kernel.dispatch import cpu_kernels_for, kernels_for, triton_kernels_for

_QUERY_BLOCK = 128


def attend_decode(
    q_TNH: Tensor,
    k_PQKH: Tensor,
    v_PQKH: Tensor,
    page_table_RP: Tensor,
    query_B: Tensor,
    row_B: Tensor,
    position_B: Tensor,
    o_TNH: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Write row query_B[b] of the output: the attention of that query to its context.

    Its context is positions [0, position_B[b]] of row row_B[b] of the page table, or the last
    `window` of them. A position of -1 marks a missing query: nothing is written for it.

    Args:
        q_TNH, o_TNH: the heads of a token lie side by side; query head n reads kv head n * K // N.
        k_PQKH, v_PQKH: of equal strides; the numbers of a head lie side by side.
        query_B, row_B, position_B: int32. On a GPU the kernel launched just before writes none of
            these.
        scale, window, softcap: as in `AttentionSpec`.
    """
    kernels = kernels_for(q_TNH)
    context = (k_PQKH, v_PQKH, page_table_RP)
    queries = (query_B, row_B, position_B, o_TNH)
    if kernels is None or (softcap is not None and not q_TNH.is_cuda):
        attend_decode_reference(
            q_TNH, *context, *queries, scale=scale, window=window, softcap=softcap
        )
    elif q_TNH.is_cuda:
        kernels.attend_decode(
            q_TNH,
            *context,
            *queries,
            scale=scale,
            window=window,
            softcap=softcap,
        )
    else:
        kernels.attend_decode(q_TNH, *context, *queries, scale, window or 0)


def attend_decode_reference(
    q_TNH: Tensor,
    k_PQKH: Tensor,
    v_PQKH: Tensor,
    page_table_RP: Tensor,
    query_B: Tensor,
    row_B: Tensor,
    position_B: Tensor,
    o_TNH: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """`attend_decode` in plain torch, one request after the other."""
    page_size, num_kv_heads = k_PQKH.shape[1:3]
    group = q_TNH.shape[1] // num_kv_heads
    decodes = zip(query_B.tolist(), row_B.tolist(), position_B.tolist(), strict=True)
    for token, row, position in decodes:
        if position < 0:
            continue
        first = 0 if window is None else max(0, position + 1 - window)
        position_L = torch.arange(first, position + 1, device=q_TNH.device)
        page_L = page_table_RP[row, position_L // page_size].long()
        place_L = (page_L, position_L % page_size)
        q_KGH = q_TNH[token].unflatten(0, (-1, group)).float()
        k_KLH = k_PQKH[place_L].transpose(0, 1).float()
        v_KLH = v_PQKH[place_L].transpose(0, 1).float()
        score_KGL = q_KGH @ k_KLH.transpose(1, 2) * scale
        if softcap is not None:
            score_KGL = softcap * torch.tanh(score_KGL / softcap)
        weight_KGL = torch.softmax(score_KGL, dim=-1)
        o_TNH[token] = (weight_KGL @ v_KLH).flatten(0, 1).to(o_TNH.dtype)


def attend_prompts(
    q_TNH: Tensor,
    k_PQKH: Tensor,
    v_PQKH: Tensor,
    page_table_RP: Tensor,
    query_B: Tensor,
    row_B: Tensor,
    start_B: Tensor,
    length_B: Tensor,
    o_TNH: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Write rows [query_B[b], query_B[b] + length_B[b]) of the output: causal attention of a slice.

    Its tokens stand at positions [start_B[b], start_B[b] + length_B[b]) of row row_B[b] of the page
    table. Each sees the positions up to its own, or the last `window` of them.

    Args:
        q_TNH, o_TNH: the heads of a token lie side by side; query head n reads kv head n * K // N.
        query_B, row_B, start_B, length_B: int32, on the host.
        scale, window, softcap: as in `AttentionSpec`.
    """
    kernels = cpu_kernels_for(q_TNH)
    is_odd = q_TNH.shape[2] % 2 == 1  # a kernel multiplies pairs of bfloat16
    context = (k_PQKH, v_PQKH, page_table_RP)
    slices = (query_B, row_B, start_B, length_B, o_TNH)
    if kernels is None or softcap is not None or is_odd:
        attend_prompts_reference(
            q_TNH, *context, *slices, scale=scale, window=window, softcap=softcap
        )
    else:
        kernels.attend_prompts(q_TNH, *context, *slices, scale, window or 0)


def attend_prompts_on_device(
    q_TNH: Tensor,
    k_PQKH: Tensor,
    v_PQKH: Tensor,
    page_table_RP: Tensor,
    row_T: Tensor,
    position_T: Tensor,
    indptr: Tensor,
    o_TNH: Tensor,
    *,
    num_tokens: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """`attend_prompts` on a GPU, which finds the prompts itself: a graph can contain it.

    Args:
        row_T, position_T: int32, where each token stands. A prompt's stand side by side, and in
            one row.
        indptr: int32 [X + 1], where the prompts begin among the tokens, and the last one's end. A
            prompt may have no tokens.
        num_tokens: of all prompts together, at most.
    """
    kernels = triton_kernels_for(q_TNH)
    assert kernels is not None
    kernels.attend_prompts_on_device(
        q_TNH,
        k_PQKH,
        v_PQKH,
        page_table_RP,
        row_T,
        position_T,
        indptr,
        o_TNH,
        num_tokens=num_tokens,
        scale=scale,
        window=window,
        softcap=softcap,
    )


def attend_prompts_reference(
    q_TNH: Tensor,
    k_PQKH: Tensor,
    v_PQKH: Tensor,
    page_table_RP: Tensor,
    query_B: Tensor,
    row_B: Tensor,
    start_B: Tensor,
    length_B: Tensor,
    o_TNH: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """`attend_prompts` in plain torch.

    The pages of each slice are gathered, and each block of queries is multiplied with the keys that
    it may see. Scores of float16 are computed in float32, as those of decodes are.
    """
    # A product of float16 may exceed 65504, its largest number, before it is scaled.
    score_dtype = torch.float32 if q_TNH.dtype == torch.float16 else q_TNH.dtype
    page_size, num_kv_heads = k_PQKH.shape[1:3]
    heads = (num_kv_heads, q_TNH.shape[1] // num_kv_heads)
    k_KPQH, v_KPQH = (x_PQKH.permute(2, 0, 1, 3) for x_PQKH in (k_PQKH, v_PQKH))
    slices = (query_B, row_B, start_B, length_B)
    for token, row, start, length in zip(*(x.tolist() for x in slices), strict=True):
        first_page = _first_seen(start, window) // page_size
        num_pages = -(-(start + length) // page_size)
        page_P = page_table_RP[row, first_page:num_pages].long()
        kv_KPQH = (x.index_select(1, page_P) for x in (k_KPQH, v_KPQH))
        k_KLH, v_KLH = (x.flatten(1, 2).to(score_dtype) for x in kv_KPQH)
        tokens = slice(token, token + length)
        q_KGTH, o_KGTH = (x[tokens].unflatten(1, heads).permute(1, 2, 0, 3) for x in (q_TNH, o_TNH))
        num_hidden = first_page * page_size
        for begin in range(0, length, _QUERY_BLOCK):
            end = min(begin + _QUERY_BLOCK, length)
            first_seen = _first_seen(start + begin, window) - num_hidden
            seen = slice(first_seen, start + end - num_hidden)
            q_KXH = q_KGTH[:, :, begin:end].flatten(1, 2).to(score_dtype)
            score_KXL = torch.bmm(q_KXH, k_KLH[:, seen].transpose(1, 2))
            _weights(score_KXL, end - begin, scale, window, softcap)
            o_KXH = torch.bmm(score_KXL, v_KLH[:, seen])
            o_KGTH[:, :, begin:end] = o_KXH.unflatten(1, (-1, end - begin))


def _first_seen(position: int, window: int | None) -> int:
    """The first position that a query sees."""
    return 0 if window is None else max(0, position + 1 - window)


def _weights(
    score_KXL: Tensor, length: int, scale: float, window: int | None, softcap: float | None
) -> None:
    """Weights of a block of queries, in place; the last key is that of the last query."""
    if softcap is not None:
        score_KXL.mul_(scale / softcap).tanh_()
        scale = softcap
    causal_softmax(score_KXL, score_KXL.shape[2] - length, length, scale, window)


def causal_softmax(
    score_KZL: Tensor, start: int, length: int, scale: float, window: int | None = None
) -> None:
    """softmax(score * scale) over L, in place.

    Row z is of a query at position start + z % length. It sees the positions up to its own, or the
    last `window` of them; the weights of all others become zero.

    Args:
        score_KZL: contiguous; L = start + length.
    """
    kernels = cpu_kernels_for(score_KZL)
    if kernels is not None:
        kernels.causal_softmax(score_KZL, start, length, scale, window or 0)
        return
    score_KGTL = score_KZL.unflatten(1, (-1, length))
    everything = torch.ones(score_KGTL.shape[2:], dtype=torch.bool, device=score_KZL.device)
    is_hidden_TL = everything.triu(start + 1)
    if window is not None:
        is_hidden_TL |= everything.tril(start - window)
    score_KGTL.mul_(scale).masked_fill_(is_hidden_TL, -math.inf)
    score_KGTL.copy_(torch.softmax(score_KGTL, dim=-1))
