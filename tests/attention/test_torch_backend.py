"""Paged attention against dense attention in float64, over random page tables and mixed batches."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minisgl.attention import BaseAttnBackend, CapturedSlices, create_attention_backend
from minisgl.attention.torch_backend import TorchAttnMetadata
from minisgl.checkpoint import AttentionSpec
from minisgl.core import BaseAttnMetadata, BatchPlan, Queries, Req, ReqSlice, SamplingParams
from minisgl.errors import ConfigError
from minisgl.kernel import split_heads, store_kv
from minisgl.kvcache import MHAKVCache

HEAD_DIM = 8
LAYERS = 2
PLAIN = AttentionSpec(scale=1 / math.sqrt(HEAD_DIM))
NOWHERE = 10**6  # in every entry of the page table after the pages of its row
LITTER = 1e4  # in every slot of no request; would dominate any softmax
CPU = torch.device("cpu")


@dataclass
class World:
    """A pool full of litter, a random page table, and requests.

    Their keys and values so far are known densely.
    """

    spans: list[
        tuple[int, int]
    ]  # of each request: positions [start, end) are computed now, those before lie in pages
    num_heads: int
    num_kv_heads: int
    page_size: int
    dtype: torch.dtype = torch.float32
    seed: int = 0
    specs: tuple[AttentionSpec, ...] = (PLAIN, PLAIN)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        pages_of = [-(-end // self.page_size) for _, end in self.spans]
        num_pages = sum(pages_of) + 3
        self.pool = MHAKVCache(
            LAYERS, self.num_kv_heads, HEAD_DIM, num_pages, self.page_size, self.dtype, CPU
        )
        for layer in range(LAYERS):
            self.pool.k_cache(layer).fill_(LITTER)
            self.pool.v_cache(layer).fill_(LITTER)
        pages = iter(torch.randperm(num_pages, generator=self.random).split([*pages_of, 3]))
        self.page_table_RP = torch.full(
            (len(self.spans) + 2, max(pages_of) + 1), NOWHERE, dtype=torch.int32
        )
        rows = torch.randperm(len(self.spans) + 2, generator=self.random).tolist()
        self.slices = []
        for (start, end), row in zip(self.spans, rows, strict=False):
            req_pages = next(pages)
            self.page_table_RP[row, : len(req_pages)] = req_pages.int()
            req = Req(
                row, np.zeros(end, dtype=np.int32), SamplingParams(), max_length=end + 1, seed=0
            )
            req.row = row
            self.slices.append(ReqSlice(req, start, end, samples=True))
        self.k = [self.numbers(end, self.num_kv_heads) for _, end in self.spans]
        self.v = [self.numbers(end, self.num_kv_heads) for _, end in self.spans]
        self.q = [self.numbers(end - start, self.num_heads) for start, end in self.spans]

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(*shape, HEAD_DIM, generator=self.random).to(self.dtype)

    def slots(self, req_slice: ReqSlice, start: int, end: int) -> Tensor:
        position = torch.arange(start, end)
        return (
            self.page_table_RP[req_slice.req.row, position // self.page_size] * self.page_size
            + position % self.page_size
        )

    def attend(self, layer: int, name: str = "torch") -> Tensor:
        """What a backend makes of the last positions, after all keys and values were stored."""
        self.store(layer)
        plan = BatchPlan(self.slices)
        backend = self.backend(name)
        queries = self.queries(backend.make_metadata(plan))
        backend.prepare_on_device(queries)
        return backend.forward(*self.projection(), layer, queries)

    def attend_with_the_last(self, layer: int, name: str) -> tuple[Tensor, Tensor]:
        """The same, and then what it makes of the last token of each slice, as decodes."""
        self.store(layer)
        backend = self.backend(name)
        queries = self.queries(backend.make_metadata(BatchPlan(self.slices)))
        last = [req_slice.last_token for req_slice in self.slices]
        last_metadata = backend.make_metadata(BatchPlan(last))
        last_queries = self.queries(last_metadata, last)

        backend.prepare_on_device(queries)
        o_TNH = backend.forward(*self.projection(), layer, queries)
        backend.prepare_on_device(last_queries)
        heads = [x_TNH[self.last_index()] for x_TNH in self.projection()]
        return o_TNH, backend.forward(*heads, layer, last_queries)

    def last_index(self) -> list[int]:
        """Which of the tokens is the last one of each slice."""
        return [end - 1 for end in itertools.accumulate(map(len, self.slices))]

    def attend_captured(self, name: str, num_decodes: int) -> Tensor:
        """The same in layer 0, of a graph that takes so many decodes, and other slices."""
        self.store(0)
        lengths = [len(req_slice) for req_slice in self.slices]
        rows = [req_slice.row for req_slice in self.slices if len(req_slice)]
        ends = [req_slice.end for req_slice in self.slices[:num_decodes]]
        slices = CapturedSlices(
            row_X=torch.tensor(
                [req_slice.row if len(req_slice) else rows[0] for req_slice in self.slices],
                dtype=torch.int32,
            ),
            decode_position_B=torch.tensor(ends, dtype=torch.int32) - 1,
            most_prompt_tokens=sum(lengths),
        )
        if len(lengths) > num_decodes:
            indptr = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            slices = replace(slices, prompt_indptr=indptr[num_decodes:], beside_prompts=True)
        backend = self.backend(name)
        metadata = backend.make_capture_metadata(slices)
        backend.update_metadata(metadata, *np.array(self.spans, dtype=np.int32).T)
        queries = self.queries(metadata)
        backend.prepare_on_device(queries)
        return backend.forward(*self.projection(), 0, queries)

    def store(self, layer: int) -> None:
        for req_slice, k, v in zip(self.slices, self.k, self.v, strict=True):
            store_kv(
                k,
                v,
                self.pool.k_cache(layer),
                self.pool.v_cache(layer),
                self.slots(req_slice, 0, req_slice.end).long(),
            )

    def backend(self, name: str) -> BaseAttnBackend:
        return create_attention_backend(
            name, self.pool, self.page_table_RP, self.num_heads, self.specs
        )

    def queries(self, metadata: BaseAttnMetadata, slices: list[ReqSlice] | None = None) -> Queries:
        tokens = [
            (req_slice.row, position)
            for req_slice in slices or self.slices
            for position in range(req_slice.start, req_slice.end)
        ]
        row_T, position_T = torch.tensor(tokens, dtype=torch.int32).T.contiguous()
        return Queries(row_T, position_T, metadata)

    def projection(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the computed positions, side by side as projected."""
        new_k = torch.cat(
            [k[req_slice.start :] for req_slice, k in zip(self.slices, self.k, strict=True)]
        )
        new_v = torch.cat(
            [v[req_slice.start :] for req_slice, v in zip(self.slices, self.v, strict=True)]
        )
        return split_heads(torch.cat((torch.cat(self.q), new_k, new_v), dim=1), self.num_kv_heads)

    def dense(self, layer: int = 0) -> Tensor:
        """The definition, in float64: one request, one head, one query at a time."""
        group = self.num_heads // self.num_kv_heads
        spec = self.specs[layer]
        rows = []
        for req_slice, q, k, v in zip(self.slices, self.q, self.k, self.v, strict=True):
            for token, position in enumerate(range(req_slice.start, req_slice.end)):
                heads = []
                for head in range(self.num_heads):
                    first = 0 if spec.window is None else max(0, position + 1 - spec.window)
                    k_LH, v_LH = (x[first : position + 1, head // group].double() for x in (k, v))
                    score_L = k_LH @ q[token, head].double() * spec.scale
                    if spec.softcap is not None:
                        score_L = spec.softcap * torch.tanh(score_L / spec.softcap)
                    weight_L = torch.softmax(score_L, dim=0)
                    heads.append(weight_L @ v_LH)
                rows.append(torch.stack(heads))
        return torch.stack(rows)

    def check(self, layer: int = 0) -> None:
        atol = 2e-5 if self.dtype == torch.float32 else 5e-2
        o_TNH = self.attend(layer)
        assert o_TNH.dtype == self.dtype
        torch.testing.assert_close(o_TNH.double(), self.dense(layer), atol=atol, rtol=0)


MIXED = [(0, 1), (9, 10), (0, 7), (31, 32), (5, 17), (32, 33), (100, 101), (3, 4), (40, 42), (2, 3)]

# Decodes, some of which are missing, then prompts.
GRAPHS = [
    (3, [(9, 10), (31, 32), (0, 1)]),
    (0, [(0, 7), (0, 3)]),
    (0, [(20, 41), (0, 0), (0, 3)]),
    (2, [(9, 10), (0, 1), (5, 12), (0, 4), (0, 0), (0, 1)]),
    (3, [(9, 10), (0, 0), (0, 0), (5, 12), (0, 0), (0, 4)]),
    (2, [(0, 0), (0, 0), (5, 12), (0, 1)]),
]


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("group", range(1, 9))
def test_a_mixed_batch_equals_dense_attention_for_any_group_of_heads(
    group: int, page_size: int
) -> None:
    World(MIXED, num_heads=2 * group, num_kv_heads=2, page_size=page_size).check()


def test_only_the_head_of_a_step_is_its_decodes() -> None:
    """A chunk of one token behind a longer one is a prompt, as `BatchPlan.num_decodes` has it."""
    world = World([(9, 10), (31, 32), (0, 7), (3, 4), (5, 17)], 4, 2, page_size=4)
    metadata = world.backend("torch").make_metadata(BatchPlan(world.slices))
    assert isinstance(metadata, TorchAttnMetadata)
    assert metadata.query_B.tolist() == [0, 1]
    assert metadata.position_B.tolist() == [9, 31]
    assert metadata.prompt_query_X.tolist() == [2, 9, 10]
    assert metadata.prompt_length_X.tolist() == [7, 1, 12]
    world.check()


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(scale=1.7),
        AttentionSpec(scale=0.3, window=1),
        AttentionSpec(scale=0.3, window=10),
        AttentionSpec(scale=0.3, window=1000),
        AttentionSpec(scale=0.5, softcap=1.5),
        AttentionSpec(scale=0.5, window=10, softcap=1.5),
    ],
    ids=str,
)
def test_scores_are_what_the_layers_spec_says(spec: AttentionSpec, page_size: int) -> None:
    world = World(MIXED, 4, 2, page_size, specs=(PLAIN, spec))
    world.check(layer=0)
    world.check(layer=1)


@pytest.mark.parametrize("window", [1, 5, 64, 100, 200])
def test_a_window_ends_within_and_before_a_block_of_queries(window: int) -> None:
    spans = [(0, 257), (50, 200), (150, 151)]
    spec = AttentionSpec(scale=0.3, window=window)
    World(spans, 2, 1, page_size=16, specs=(spec, spec)).check()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_each_layer_has_keys_and_values_of_its_own(layer: int) -> None:
    World(MIXED, 4, 2, page_size=4).check(layer)


@pytest.mark.parametrize("length", [2, 63, 64, 65, 127, 128, 129, 257])
@pytest.mark.parametrize("start", [0, 1, 50])
def test_prompts_around_a_block_of_queries_equal_dense_attention(start: int, length: int) -> None:
    World([(start, start + length)], 2, 1, page_size=16).check()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "ends",
    [[1], [40], [1, 1, 1], [40, 40, 40], [33, 40, 37], [1, 2, 15, 16, 17, 200, 3, 64, 65]],
    ids=[
        "the first",
        "one",
        "first ones",
        "equally long",
        "of similar length",
        "of very different lengths",
    ],
)
def test_decodes_alone_equal_dense_attention(ends: list[int], page_size: int) -> None:
    World([(end - 1, end) for end in ends], 6, 2, page_size=page_size).check()


@pytest.mark.parametrize(
    "spans", [MIXED, [(1999, 2000), (1800, 1801), (1999, 2000)] * 2], ids=["mixed", "long"]
)
def test_bfloat16_is_close_to_dense_attention(spans: list[tuple[int, int]]) -> None:
    World(spans, 4, 2, page_size=4, dtype=torch.bfloat16).check()


spans = st.tuples(st.integers(0, 40), st.integers(1, 12)).map(
    lambda span: (span[0], span[0] + span[1])
)


@settings(max_examples=40, deadline=None)
@given(
    spans=st.lists(spans, min_size=1, max_size=6),
    group=st.integers(1, 4),
    num_kv_heads=st.integers(1, 3),
    page_size=st.integers(1, 9),
    seed=st.integers(0, 2**16),
)
def test_any_batch_equals_dense_attention(
    spans: list[tuple[int, int]], group: int, num_kv_heads: int, page_size: int, seed: int
) -> None:
    World(spans, group * num_kv_heads, num_kv_heads, page_size, seed=seed).check()


def test_the_step_is_stored_and_nothing_else_is_written() -> None:
    world = World(MIXED, 4, 2, page_size=4)
    world.attend(layer=1)
    k_PQKH = world.pool.k_cache(1).clone()
    v_PQKH = world.pool.v_cache(1).clone()
    for req_slice, k, v in zip(world.slices, world.k, world.v, strict=True):
        slot_L = world.slots(req_slice, 0, req_slice.end).long()
        place_L = (slot_L // 4, slot_L % 4)
        assert torch.equal(k_PQKH[place_L], k)
        assert torch.equal(v_PQKH[place_L], v)
        k_PQKH[place_L] = v_PQKH[place_L] = LITTER
    assert (k_PQKH == LITTER).all()
    assert (v_PQKH == LITTER).all()
    assert all((cache == LITTER).all() for cache in (world.pool.k_cache(0), world.pool.v_cache(0)))


@pytest.mark.parametrize("pair", ["torch", "torch,torch"])
@pytest.mark.parametrize(("num_decodes", "spans"), GRAPHS, ids=str)
def test_a_captured_step_equals_dense_attention(
    num_decodes: int, spans: list[tuple[int, int]], pair: str
) -> None:
    """Where there are prompts, the last one is padding."""
    padding = [(0, 0)] if len(spans) > num_decodes else []
    world = World([*spans, *padding], num_heads=4, num_kv_heads=2, page_size=16)
    o_TNH = world.attend_captured(pair, num_decodes)
    torch.testing.assert_close(o_TNH.double(), world.dense(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["torch", "torch,torch"])
@pytest.mark.parametrize("spans", [MIXED, [(0, 7), (20, 41)], [(0, 1), (0, 9)]], ids=str)
def test_the_last_tokens_of_slices_attend_by_themselves(
    spans: list[tuple[int, int]], name: str
) -> None:
    """Their metadata is made before those of all tokens are used, and leaves those as they are."""
    world = World(spans, num_heads=4, num_kv_heads=2, page_size=4)
    o_TNH, o_YNH = world.attend_with_the_last(0, name)
    expected_TNH = world.dense()
    torch.testing.assert_close(o_TNH.double(), expected_TNH, atol=2e-5, rtol=0)
    torch.testing.assert_close(o_YNH.double(), expected_TNH[world.last_index()], atol=2e-5, rtol=0)


def test_queries_are_left_alone() -> None:
    world = World(MIXED, 4, 2, page_size=4)
    before = [q.clone() for q in world.q]
    world.attend(layer=0)
    assert all(itertools.starmap(torch.equal, zip(world.q, before, strict=True)))


def test_an_unknown_backend_is_refused_with_the_names_of_those_there_are() -> None:
    world = World([(0, 1)], 1, 1, page_size=1)
    with pytest.raises(ConfigError, match=r"--attn must be of .*torch.*, got 'flash'"):
        world.backend("flash")
