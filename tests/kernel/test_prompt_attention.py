"""Attention of prompts: the compiled kernel of a CPU against its reference, over random slices."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.kernel import attend_prompts, attend_prompts_reference, native

DTYPES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
NOWHERE = 10**6  # in every entry of the page table after the pages of its row
UNTOUCHED = 7.0

# Around the blocks of the kernel: 64 keys, up to 192 queries.
starts = st.one_of(st.integers(0, 40), st.sampled_from([62, 63, 64, 127, 300, 1000]))
lengths = st.one_of(st.integers(1, 12), st.sampled_from([31, 33, 64, 97, 130, 200]))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=50, deadline=None)
@given(
    spans=st.lists(st.tuples(starts, lengths), min_size=1, max_size=4),
    group=st.integers(1, 9),
    num_kv_heads=st.integers(1, 3),
    width=st.sampled_from([1, 8, 17, 20, 64, 80, 128, 256]),
    page_size=st.sampled_from([1, 3, 16, 64]),
    window=st.one_of(st.none(), st.sampled_from([1, 2, 63, 64, 65, 200, 5000])),
    seed=st.integers(0, 2**16),
)
def test_any_slices(
    spans: list[tuple[int, int]],
    group: int,
    num_kv_heads: int,
    width: int,
    page_size: int,
    window: int | None,
    seed: int,
    dtype: torch.dtype,
) -> None:
    assert native.load_cpu_kernels() is not None
    random = torch.Generator().manual_seed(seed)
    num_pages = [-(-(start + length) // page_size) for start, length in spans]
    pages = torch.randperm(sum(num_pages), generator=random).int()
    table_RP = torch.full((len(spans), max(num_pages) + 1), NOWHERE, dtype=torch.int32)
    for row, own in enumerate(pages.split(num_pages)):
        table_RP[row, : len(own)] = own
    # Head first within a page, as the pool of a CPU has it.
    pool = torch.randn(2, len(pages), num_kv_heads, page_size, width, generator=random)
    k_PQKH, v_PQKH = pool.to(dtype).transpose(2, 3)

    # A token of no slice is before each of them. Keys and values lie beside the queries.
    start_B, length_B = torch.tensor(spans, dtype=torch.int32).T.contiguous()
    sizes = [1 + length for _, length in spans[:-1]]
    query_B = torch.tensor([*itertools.accumulate(sizes, initial=1)], dtype=torch.int32)
    num_tokens = len(spans) + int(length_B.sum())
    projected = torch.randn(num_tokens, (group + 2) * num_kv_heads, width, generator=random)
    q_TNH = projected.to(dtype)[:, : group * num_kv_heads]
    row_B = torch.arange(len(spans), dtype=torch.int32)
    scale = 1 / math.sqrt(width)

    results = []
    for attend in (attend_prompts, attend_prompts_reference):
        o_TNH = torch.full(q_TNH.shape, UNTOUCHED, dtype=dtype)
        attend(
            q_TNH,
            k_PQKH,
            v_PQKH,
            table_RP,
            query_B,
            row_B,
            start_B,
            length_B,
            o_TNH,
            scale=scale,
            window=window,
        )
        results.append(o_TNH)
    torch.testing.assert_close(*results, atol=DTYPES[dtype], rtol=DTYPES[dtype])
    others = torch.ones(num_tokens, dtype=torch.bool)
    for token, length in zip(query_B.tolist(), length_B.tolist(), strict=True):
        others[token : token + length] = False
    assert (results[0][others] == UNTOUCHED).all(), "rows of other tokens were written"


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_any_size(dtype: torch.dtype) -> None:
    """Weights are those of a softmax, whose exponentials alone would overflow or vanish."""
    random = torch.Generator().manual_seed(0)
    k_PQKH, v_PQKH = torch.randn(2, 1, 200, 1, 16, generator=random).to(dtype)
    q_TNH = torch.randn(200, 2, 16, generator=random).to(dtype) * 100
    slices = [torch.tensor([x], dtype=torch.int32) for x in (0, 0, 0, 200)]
    table_RP = torch.zeros(1, 1, dtype=torch.int32)
    o_TNH = torch.empty_like(q_TNH)
    expected_TNH = torch.empty_like(q_TNH, dtype=torch.float32)
    attend_prompts(q_TNH, k_PQKH, v_PQKH, table_RP, *slices, o_TNH, scale=1.0)
    qkv = (x.float() for x in (q_TNH, k_PQKH, v_PQKH))
    attend_prompts_reference(*qkv, table_RP, *slices, expected_TNH, scale=1.0)
    tolerance = 10 * DTYPES[dtype]
    torch.testing.assert_close(o_TNH.float(), expected_TNH, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_scores_that_float16_cannot_hold(softcap: float | None) -> None:
    """A product of queries and keys may exceed 65504, the largest number of float16."""
    random = torch.Generator().manual_seed(0)
    k_PQKH, v_PQKH = torch.randn(2, 1, 200, 1, 128, generator=random).half()
    q_TNH = torch.randn(200, 2, 128, generator=random).half() * 10_000
    assert (q_TNH @ k_PQKH[0, :, 0].T).isinf().any()
    slices = [torch.tensor([x], dtype=torch.int32) for x in (0, 0, 0, 200)]
    table_RP = torch.zeros(1, 1, dtype=torch.int32)
    o_TNH = torch.empty_like(q_TNH)
    expected_TNH = torch.empty_like(q_TNH, dtype=torch.float32)
    scores = {"scale": 1e-4, "softcap": softcap}
    attend_prompts(q_TNH, k_PQKH, v_PQKH, table_RP, *slices, o_TNH, **scores)
    qkv = (x.float() for x in (q_TNH, k_PQKH, v_PQKH))
    attend_prompts_reference(*qkv, table_RP, *slices, expected_TNH, **scores)
    torch.testing.assert_close(o_TNH.float(), expected_TNH, atol=2e-3, rtol=2e-3)
