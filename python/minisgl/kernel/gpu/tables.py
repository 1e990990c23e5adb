"""The device's page table and token pool: writes the host's changes, looks up a step's inputs."""

# Dimensions: B requests of a step, L positions of a sequence, P pages, R rows of the tables,
# T tokens of a step, Z entries of a flat list.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import RememberedKernel, pdl, wait_for_inputs

_BLOCK = 256
_LIST_BLOCK = 1024


@RememberedKernel
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["table", "index", "value"])
def _scatter(table, index, value, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    wait_for_inputs(PDL)
    place = tl.load(index + i, mask=mask, other=0)
    tl.store(table + place, tl.maximum(tl.load(value + i, mask=mask, other=0), 0), mask=mask)


def scatter(table: Tensor, index_Z: Tensor, value_Z: Tensor) -> None:
    count = len(index_Z)
    if count:
        _scatter[(-(-count // _BLOCK),)](table, index_Z, value_Z, count, BLOCK=_BLOCK, **pdl(table))


@RememberedKernel
@triton.jit(
    do_not_specialize=["stride_tokens", "stride_pages", "count"],
    do_not_specialize_on_alignment=["row", "position", "input_ids", "slot"],
)
def _look_up(
    row, position, token_pool, page_table, input_ids, slot,
    stride_tokens, stride_pages, page_size, count,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    wait_for_inputs(PDL)
    r = tl.load(row + i, mask=mask, other=0).to(tl.int64)
    p = tl.load(position + i, mask=mask, other=0)
    token = tl.load(token_pool + r * stride_tokens + p, mask=mask, other=0)
    page = tl.load(page_table + r * stride_pages + p // page_size, mask=mask, other=0).to(tl.int64)
    tl.store(input_ids + i, token.to(tl.int64), mask=mask)
    tl.store(slot + i, page * page_size + p % page_size, mask=mask)


def look_up(
    row_T: Tensor, position_T: Tensor, token_pool_RL: Tensor, page_table_RP: Tensor,
    page_size: int, input_ids_T: Tensor, slot_T: Tensor,
) -> None:  # fmt: skip
    count = len(row_T)
    _look_up[(-(-count // _BLOCK),)](
        row_T, position_T, token_pool_RL, page_table_RP, input_ids_T, slot_T,
        token_pool_RL.stride(0), page_table_RP.stride(0), page_size, count,
        BLOCK=_BLOCK, **pdl(row_T),
    )  # fmt: skip


@RememberedKernel
@triton.jit(
    do_not_specialize=["stride_pages"],
    do_not_specialize_on_alignment=["row", "indptr", "pages"],
)
def _list_pages(
    row, indptr, page_table, pages, stride_pages, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    b = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    start = tl.load(indptr + b)
    mask = i < tl.load(indptr + b + 1) - start
    pages_of_row = page_table + tl.load(row + b).to(tl.int64) * stride_pages
    page = tl.load(pages_of_row + i, mask=mask, other=0)
    tl.store(pages + start + i, page, mask=mask)


def list_pages(row_B: Tensor, indptr: Tensor, page_table_RP: Tensor, pages_Z: Tensor) -> None:
    """List the leading pages of each row, one list after the other, as FlashInfer takes them.

    The pages of row row_B[b] are written to pages_Z[indptr[b] : indptr[b + 1]]; the rest of pages_Z
    keeps what it holds.

    Args:
        row_B, page_table_RP, pages_Z: int32.
        indptr: int32 [B + 1], ascending; no two entries differ by more than P.
    """
    grid = (len(row_B), -(-page_table_RP.shape[1] // _LIST_BLOCK))
    _list_pages[grid](
        row_B, indptr, page_table_RP, pages_Z, page_table_RP.stride(0),
        BLOCK=_LIST_BLOCK, **pdl(row_B),
    )  # fmt: skip
