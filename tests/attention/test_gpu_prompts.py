"""FlashInfer's kernels of prompts, as this project compiles them, against attention in float32."""

# Dimensions: H head width, K kv heads, L positions of a context, M all heads of a token: N + 2 K,
# N query heads, P pages, Q positions of a page, R rows of the tables, T tokens of a step.

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention import PromptModules, create_attention_backend
from minisgl.checkpoint import AttentionSpec
from minisgl.core import BatchPlan, Queries, Req, ReqSlice, SamplingParams
from minisgl.kernel import split_heads
from minisgl.kvcache import MHAKVCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = torch.device("cuda:0")
NUM_HEADS = 8
NUM_KV_HEADS = 2
NOWHERE = 10**6  # in every entry of the page table after the pages of its row
LITTER = math.nan  # in every slot of no request
# Around tiles of 128 and 192 queries, and of 32 to 128 keys; slices of one token come last.
SPANS = {
    "ragged": [(0, length) for length in (2, 31, 96, 127, 128, 129, 191, 193, 700, 1500, 1)],
    "paged": [(0, 2), (1, 3), (31, 65), (95, 300), (128, 129), (1000, 1700), (64, 1), (5000, 5001)],
    "one prompt": [(0, 4099)],
    "a long context": [(9000, 9400)],
    "contexts of which tiles are cut": [(7000, 7130), (4000, 4500), (9000, 9129), (12, 40)],
}


def world_of(
    spans: list[tuple[int, int]], head_dim: int, page_size: int, dtype: torch.dtype
) -> tuple[list[ReqSlice], list[Tensor], Tensor, Tensor]:
    """Slices, the queries, keys and values of each request, all of them in a batch, and a table.

    Returns:
        the slices; [L, N + 2 K, H] of each; those of the computed tokens [T, N + 2 K, H]; the table
    """
    random = torch.Generator().manual_seed(0)
    spans = [(min(start, end - 1), end) for start, end in spans]
    num_pages = [-(-end // page_size) for _, end in spans]
    pages = torch.randperm(sum(num_pages), generator=random).int()
    page_table_RP = torch.full((len(spans), max(num_pages) + 1), NOWHERE, dtype=torch.int32)
    slices = []
    contexts = []
    for row, ((start, end), own) in enumerate(zip(spans, pages.split(num_pages), strict=True)):
        page_table_RP[row, : len(own)] = own
        req = Req(row, np.zeros(end, dtype=np.int32), SamplingParams(), max_length=end + 1, seed=0)
        req.row = row
        slices.append(ReqSlice(req, start, end, samples=True))
        numbers = torch.randn(end, NUM_HEADS + 2 * NUM_KV_HEADS, head_dim, generator=random)
        contexts.append(numbers.to(DEVICE, dtype))
    computed = [x[req_slice.start :] for req_slice, x in zip(slices, contexts, strict=True)]
    return slices, contexts, torch.cat(computed), page_table_RP.to(DEVICE)


def reference(qkv_LMH: Tensor, start: int, spec: AttentionSpec) -> Tensor:
    """Attention of the last positions of a context: float32 [T, N, H]."""
    group = NUM_HEADS // NUM_KV_HEADS
    q_TNH, k_LKH, v_LKH = split_heads(qkv_LMH.float(), NUM_KV_HEADS)
    q_TNH = q_TNH[start:]
    position_L = torch.arange(len(qkv_LMH), device=DEVICE)
    distance_TL = position_L[start:, None] - position_L
    hidden_TL = distance_TL < 0
    if spec.window is not None:
        hidden_TL |= distance_TL >= spec.window
    outputs = []
    for head in range(NUM_HEADS):
        score_TL = q_TNH[:, head] @ k_LKH[:, head // group].T * spec.scale
        if spec.softcap is not None:
            score_TL = spec.softcap * torch.tanh(score_TL / spec.softcap)
        weight_TL = torch.softmax(score_TL.masked_fill(hidden_TL, -math.inf), dim=-1)
        outputs.append(weight_TL @ v_LKH[:, head // group])
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "window", "softcap"),
    [
        (128, torch.bfloat16, None, None),
        (64, torch.bfloat16, 100, None),
        (64, torch.float16, None, None),
        (128, torch.float16, 1000, None),
        (128, torch.bfloat16, None, 20.0),
        (256, torch.bfloat16, None, None),
        (256, torch.bfloat16, 129, 5.0),
    ],
)
def test_each_slice_attends_to_its_context(
    head_dim: int, dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    spec = AttentionSpec(scale=1 / math.sqrt(head_dim), window=window, softcap=softcap)
    PromptModules(DEVICE, dtype, head_dim, [spec]).build()
    for spans, page_size in itertools.product(SPANS.values(), (1, 48, 64)):
        slices, contexts, qkv_TMH, page_table_RP = world_of(spans, head_dim, page_size, dtype)
        num_pages = int(page_table_RP[page_table_RP != NOWHERE].max()) + 2
        pool = MHAKVCache(1, NUM_KV_HEADS, head_dim, num_pages, page_size, dtype, DEVICE)
        k_PQKH = pool.k_cache(0)
        v_PQKH = pool.v_cache(0)
        k_PQKH.fill_(LITTER)
        v_PQKH.fill_(LITTER)
        for req_slice, qkv_LMH in zip(slices, contexts, strict=True):
            position_L = torch.arange(req_slice.end, device=DEVICE)
            page_L = page_table_RP[req_slice.row, position_L // page_size].long()
            place_L = (page_L, position_L % page_size)
            _, k_PQKH[place_L], v_PQKH[place_L] = split_heads(qkv_LMH, NUM_KV_HEADS)

        backend = create_attention_backend("fi", pool, page_table_RP, NUM_HEADS, [spec])
        tokens = [(part.row, at) for part in slices for at in range(part.start, part.end)]
        row_T, position_T = torch.tensor(tokens, dtype=torch.int32, device=DEVICE).T.contiguous()
        queries = Queries(row_T, position_T, backend.make_metadata(BatchPlan(slices)))
        last = [req_slice.last_token for req_slice in slices]
        last_metadata = backend.make_metadata(BatchPlan(last))
        backend.prepare_on_device(queries)
        inputs = (*split_heads(qkv_TMH, NUM_KV_HEADS), 0, queries)
        o_TNH = backend.forward(*inputs)
        # Parts of tiles are counted anew each time, and none is read before it is written.
        for _ in range(20):
            torch.full_like(o_TNH, LITTER)  # where the next output will lie
            assert torch.equal(backend.forward(*inputs), o_TNH)

        expected = [
            reference(qkv_LMH, req_slice.start, spec)
            for req_slice, qkv_LMH in zip(slices, contexts, strict=True)
        ]
        torch.testing.assert_close(o_TNH.float(), torch.cat(expected), atol=2e-2, rtol=2e-2)

        # The last tokens of all slices, as decodes.
        index_Y = torch.tensor([*itertools.accumulate(map(len, slices))], device=DEVICE) - 1
        last_queries = Queries(row_T[index_Y], position_T[index_Y], last_metadata)
        backend.prepare_on_device(last_queries)
        o_YNH = backend.forward(*split_heads(qkv_TMH[index_Y], NUM_KV_HEADS), 0, last_queries)
        expected_YNH = torch.cat(expected)[index_Y]
        torch.testing.assert_close(o_YNH.float(), expected_YNH, atol=2e-2, rtol=2e-2)
