"""store_kv writes its slots and no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minisgl.errors import KernelInputError
from minisgl.kernel import store_kv

# Dimensions: H head width, K kv heads, M all heads of a token: N + 2 K, P pages,
# Q positions of a page, T tokens of a step.

PAGES = 11
PAGE_SIZE = 3
SLOTS = PAGES * PAGE_SIZE
HEADS = 2
WIDTH = 8
EMPTY = -7.0


def pools(dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor]:
    """k_PQKH and v_PQKH, in the order of memory or, as views, the heads of a page first."""
    if layout == "tokens first":
        k_PQKH, v_PQKH = torch.full((2, PAGES, PAGE_SIZE, HEADS, WIDTH), EMPTY, dtype=dtype)
    else:
        pool = torch.full((2, PAGES, HEADS, PAGE_SIZE, WIDTH), EMPTY, dtype=dtype)
        k_PQKH, v_PQKH = pool.transpose(2, 3)
    return k_PQKH, v_PQKH


@pytest.mark.parametrize("layout", ["tokens first", "heads first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 20, SLOTS])
def test_store_kv_writes_its_slots_and_no_others(
    tokens: int, dtype: torch.dtype, layout: str
) -> None:
    random = torch.Generator().manual_seed(tokens)
    slot_T = torch.randperm(SLOTS, generator=random)[:tokens]
    k_TKH, v_TKH = torch.randn(2, tokens, HEADS, WIDTH, generator=random).to(dtype)
    k_PQKH, v_PQKH = pools(dtype, layout)

    store_kv(k_TKH, v_TKH, k_PQKH, v_PQKH, slot_T)

    place_T = (slot_T // PAGE_SIZE, slot_T % PAGE_SIZE)
    assert torch.equal(k_PQKH[place_T], k_TKH)
    assert torch.equal(v_PQKH[place_T], v_TKH)
    k_PQKH[place_T] = v_PQKH[place_T] = EMPTY
    assert (k_PQKH == EMPTY).all()
    assert (v_PQKH == EMPTY).all()


def test_store_kv_takes_views_into_a_larger_tensor() -> None:
    qkv_TMH = torch.randn(5, 3 * HEADS, WIDTH, generator=torch.Generator().manual_seed(0))
    _, k_TKH, v_TKH = qkv_TMH.split(HEADS, dim=1)
    k_PQKH, v_PQKH = pools(torch.float32, "heads first")
    slot_T = torch.tensor([4, 30, 0, 9, 17])

    store_kv(k_TKH, v_TKH, k_PQKH, v_PQKH, slot_T)

    place_T = (slot_T // PAGE_SIZE, slot_T % PAGE_SIZE)
    assert torch.equal(k_PQKH[place_T], k_TKH)
    assert torch.equal(v_PQKH[place_T], v_TKH)


@pytest.mark.parametrize("culprit", ["k", "v"])
@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(4, HEADS, WIDTH),
        torch.zeros(3, HEADS + 1, WIDTH),
        torch.zeros(3, HEADS, WIDTH, dtype=torch.float64),
    ],
    ids=["tokens", "heads", "dtype"],
)
def test_a_tensor_of_another_shape_or_dtype_is_named(wrong: Tensor, culprit: str) -> None:
    tensors = {"k": torch.zeros(3, HEADS, WIDTH), "v": torch.zeros(3, HEADS, WIDTH), culprit: wrong}
    k_PQKH, v_PQKH = pools(torch.float32, "tokens first")
    with pytest.raises(KernelInputError, match=rf"^{culprit}: expected .* got "):
        store_kv(tensors["k"], tensors["v"], k_PQKH, v_PQKH, torch.arange(3))
    assert (k_PQKH == EMPTY).all()
