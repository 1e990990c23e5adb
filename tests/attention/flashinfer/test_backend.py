"""The arguments of FlashInfer, and of our compilation of it: stand-ins attend by them, anywhere."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the lists of pages are made by a Triton kernel")
import tests.kernel.interpreter  # noqa: F401 - repairs it
from minisgl.attention.flashinfer import decodes, step
from minisgl.checkpoint import AttentionSpec
from minisgl.core import BatchPlan, PrefixGroup
from minisgl.kernel import gpu
from tests.attention.test_paged_backends import attend
from tests.attention.test_torch_backend import GRAPHS, HEAD_DIM, MIXED, PLAIN, World

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="its tensors lie on the CPU, where kernels run in Triton's interpreter only",
)


class FakeWrapper:
    """Attends request by request, in float64, over what `plan` and `run` were given."""

    def __init__(
        self,
        *args: Any,
        use_cuda_graph: bool = False,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        assert use_cuda_graph == (paged_kv_indptr_buf is not None)
        self.is_cuda_graph_enabled = use_cuda_graph
        self._paged_kv_indptr_buf = paged_kv_indptr_buf
        self._paged_kv_indices_buf = paged_kv_indices_buf

    def run(self, q: Tensor, *kv: Any, out: Tensor) -> None:
        out[:] = attend(q, torch.tensor(self.queries), partial(self.context, kv), **self.scores)

    def context(self, kv: Any, i: int) -> tuple[Tensor, Tensor]:
        [(k_pages, v_pages)] = kv
        pages = self._paged_kv_indices_buf[self.indptr[i] : self.indptr[i + 1]].long()
        length = (len(pages) - 1) * k_pages.shape[1] + int(self.last_page_len[i])
        return k_pages[pages].flatten(0, 1)[:length], v_pages[pages].flatten(0, 1)[:length]

    def take_lists(self, indptr: Tensor, pages: Tensor, last_page_len: Tensor) -> None:
        self.indptr = indptr
        self.last_page_len = last_page_len
        if self._paged_kv_indptr_buf is None:
            self._paged_kv_indices_buf = pages
            self._paged_kv_indptr_buf = indptr
        else:
            self._paged_kv_indptr_buf[:] = indptr

    def take_scores(
        self, sm_scale: float, window_left: int, logits_soft_cap: float | None, **dtypes: Any
    ) -> None:
        self.scores = {"scale": sm_scale, "window_left": window_left, "softcap": logits_soft_cap}


class FakeDecode(FakeWrapper):
    """Of a graph."""

    def __init__(
        self,
        workspace: Tensor,
        indptr: Tensor,
        pages: Tensor,
        last_page_len: Tensor,
        layout: str,
        *,
        use_tensor_cores: bool,
    ) -> None:
        assert len(indptr) == len(last_page_len) + 1
        super().__init__(
            use_cuda_graph=True, paged_kv_indptr_buf=indptr, paged_kv_indices_buf=pages
        )

    def plan(
        self, indptr: Tensor, pages: Tensor, last_page_len: Tensor, *shape: int, **options: Any
    ) -> None:
        self.take_lists(indptr, pages, last_page_len)
        self.take_scores(**options)
        self.queries = list(range(len(indptr)))


class FakePrefill(FakeWrapper):
    def plan(
        self,
        queries: Tensor,
        indptr: Tensor,
        pages: Tensor,
        last_page_len: Tensor,
        *shape: int,
        causal: bool,
        **options: Any,
    ) -> None:
        assert causal
        self.take_scores(**options)
        self.take_lists(indptr, pages, last_page_len)
        self.queries = queries.tolist()


class FakeRagged(FakeWrapper):
    def plan(
        self, queries: Tensor, keys: Tensor, *shape: int, causal: bool, **options: Any
    ) -> None:
        assert causal
        assert torch.equal(queries, keys)
        self.take_scores(**options)
        self.queries = queries.tolist()

    def context(self, kv: Any, i: int) -> tuple[Tensor, Tensor]:
        k, v = (x[self.queries[i] : self.queries[i + 1]] for x in kv)
        return k, v


class FakeModule:
    """As the functions of csrc/hopper/entry.cpp; a plan is what it was planned by."""

    def plan(
        self,
        numbers: Tensor,
        pinned_numbers: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_length: Tensor,
        num_tokens: int,
        *sizes: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert numbers.shape == pinned_numbers.shape
        *_, self.window_left, self.has_pages, is_captured, self.max_parts = sizes
        assert num_tokens >= qo_indptr[-1] if is_captured else num_tokens == qo_indptr[-1]
        for x in (qo_indptr, kv_indptr, kv_length):
            assert x.dtype == torch.int32
        numbers[: 4 * len(kv_indptr)].view(torch.int32).copy_(kv_indptr)
        return qo_indptr.clone(), kv_indptr.clone(), kv_length.clone()

    def paged_run(
        self,
        numbers: Tensor,
        plan: tuple[Tensor, Tensor, Tensor],
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        page_indices: Tensor,
        o: Tensor,
        window_left: int,
        softcap: float,
        scale: float,
        part_outputs: Tensor,
        part_logs: Tensor,
        num_done: Tensor,
    ) -> None:
        qo_indptr, kv_indptr, kv_length = plan
        assert self.has_pages
        assert self.window_left == window_left
        assert self.max_parts == len(num_done)
        assert len(part_outputs) == len(part_logs) * q.shape[2] == len(num_done) * 192 * q.shape[2]
        assert not num_done.any()

        def context(i: int) -> tuple[Tensor, Tensor]:
            pages = page_indices[kv_indptr[i] : kv_indptr[i + 1]].long()
            k, v = (x[pages].flatten(0, 1)[: kv_length[i]] for x in (k_pages, v_pages))
            return k, v

        o[:] = attend(q, qo_indptr, context, **self.named(window_left, softcap, scale))

    def ragged_run(
        self,
        numbers: Tensor,
        plan: tuple[Tensor, Tensor, Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        *scores: Any,
    ) -> None:
        qo_indptr, kv_indptr, kv_length = plan
        assert torch.equal(qo_indptr, kv_indptr)
        assert torch.equal(qo_indptr.diff(), kv_length)
        assert not self.has_pages
        assert self.window_left == scores[0]
        assert self.max_parts == 0

        def context(i: int) -> tuple[Tensor, Tensor]:
            tokens = slice(qo_indptr[i], qo_indptr[i + 1])
            return k[tokens], v[tokens]

        o[:] = attend(q, qo_indptr, context, **self.named(*scores))

    def named(self, window_left: int, softcap: float, scale: float) -> dict[str, Any]:
        return {"scale": scale, "window_left": window_left, "softcap": softcap}


@pytest.fixture(autouse=True, params=["FlashInfer", "ours"])
def flashinfer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "ours":
        monkeypatch.setattr(step, "load_hopper_module", lambda *args: FakeModule())
    module = SimpleNamespace(
        CUDAGraphBatchDecodeWithPagedKVCacheWrapper=FakeDecode,
        BatchPrefillWithPagedKVCacheWrapper=FakePrefill,
        BatchPrefillWithRaggedKVCacheWrapper=FakeRagged,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    hopper = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    event = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(step, "triton_kernels_for", lambda x: gpu)
    monkeypatch.setattr(gpu.attention, "_PROGRAMS", 12)  # contexts have few splits, one is empty


SPANS = {
    "decodes": [(9, 10), (31, 32), (0, 1)],
    "prompts": [(0, 7), (0, 30)],
    "chunks": [(5, 17), (0, 3), (40, 41)],
    "decodes and prompts": [(9, 10), (30, 31), (0, 7), (0, 2)],
    "decodes and chunks": [(9, 10), (30, 31), (0, 7), (20, 50), (3, 4)],
    "mixed": MIXED,
}


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_each_slice_attends_to_its_context(spans: list[tuple[int, int]], page_size: int) -> None:
    world = World(spans, num_heads=4, num_kv_heads=2, page_size=page_size)
    torch.testing.assert_close(world.attend(1, "fi").double(), world.dense(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("pair", ["fi", "fi,fi"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("num_decodes", "spans"), GRAPHS, ids=str)
def test_a_captured_step_equals_dense_attention(
    num_decodes: int, spans: list[tuple[int, int]], page_size: int, pair: str
) -> None:
    world = World(spans, num_heads=4, num_kv_heads=2, page_size=page_size)
    o_TNH = world.attend_captured(pair, num_decodes)
    torch.testing.assert_close(o_TNH.double(), world.dense(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("page_size", [1, 4])
def test_many_captured_decodes_are_planned_by_flashinfer(page_size: int) -> None:
    """Ours take them only in bfloat16, which the world is not."""
    ends = [1, 2, 9, 4, 16, 5, 33, 8, 3]
    world = World([(end - 1, end) for end in ends], 4, 2, page_size)
    o_TNH = world.attend_captured("fi", len(ends))
    torch.testing.assert_close(o_TNH.double(), world.dense(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_the_last_tokens_of_slices_attend_by_themselves(
    spans: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for no plan of decodes: the device may be a step behind."""
    waits: Counter[str] = Counter()
    event = SimpleNamespace(
        synchronize=lambda: waits.update(["waited"]), record=lambda: waits.update(["recorded"])
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    world = World(spans, num_heads=4, num_kv_heads=2, page_size=4)
    o_TNH, o_YNH = world.attend_with_the_last(0, "fi")
    expected_TNH = world.dense()
    torch.testing.assert_close(o_TNH.double(), expected_TNH, atol=2e-5, rtol=0)
    torch.testing.assert_close(o_YNH.double(), expected_TNH[world.last_index()], atol=2e-5, rtol=0)
    has_prompts = any(end - start > 1 for start, end in spans)
    assert waits["waited"] == waits["recorded"] == has_prompts


@pytest.mark.parametrize("is_memory_full", [False, True])
def test_no_step_goes_on_before_the_prompts_of_the_one_before_it(
    is_memory_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[tuple[str, str]] = []

    def stream(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, wait_stream=lambda other: waits.append((name, other.name))
        )

    def decode(*arguments: Any, **scores: Any) -> None:
        waits.append(("decodes", "run"))
        if is_memory_full:
            raise torch.OutOfMemoryError

    main = stream("main")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: stream("prompts"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(decodes, "attend_decode", decode)
    spec = AttentionSpec(scale=0.4, window=6)  # whose decodes take memory
    world = World(
        SPANS["decodes and chunks"], num_heads=4, num_kv_heads=2, page_size=4, specs=(spec, spec)
    )
    with pytest.raises(torch.OutOfMemoryError) if is_memory_full else nullcontext():
        world.attend(0, "fi")
    assert waits == [("prompts", "main"), ("decodes", "run"), ("main", "prompts")]


@pytest.mark.parametrize("pair", ["fi", "fi,fi"])
def test_decodes_of_an_eager_step_share_prefixes(
    pair: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    balanced = MagicMock()
    monkeypatch.setattr(decodes.BalancedDecode, "create_if_supported", lambda *_: balanced)
    monkeypatch.setattr(decodes, "plan_shared_prefixes", plan_prefixes := MagicMock())
    monkeypatch.setattr(decodes, "attend_shared_prefixes", MagicMock(return_value="parts"))
    world = World([(9, 10), (31, 32), (8, 9), (20, 50)], num_heads=4, num_kv_heads=2, page_size=4)
    plan = BatchPlan(world.slices, prefix_groups=[PrefixGroup(8, [0, 2])])
    backend = world.backend(pair)
    queries = world.queries(backend.make_metadata(plan))
    backend.prepare_on_device(queries)
    groups = balanced.plan.call_args.kwargs["groups"]
    assert [numbers.tolist() for numbers in groups] == [[8, 0, 8], [0, 2, 0], [0, 2]]
    row_B, groups = plan_prefixes.call_args.args
    assert groups is balanced.plan.call_args.kwargs["groups"]
    assert row_B.tolist() == queries.row_X[:3].tolist()
    q_TNH, kv_TKH = (torch.zeros(33, num_heads, HEAD_DIM) for num_heads in (4, 2))
    backend.forward(q_TNH, kv_TKH, kv_TKH, 0, queries)
    assert balanced.attend.call_args.kwargs["prefix"] == "parts"


@pytest.mark.parametrize(
    ("spans", "starts_early"), [("decodes", True), ("decodes and chunks", False)]
)
def test_decodes_that_take_all_processors_do_not_start_before_prompts(
    spans: str, starts_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    balanced = MagicMock()
    monkeypatch.setattr(decodes.BalancedDecode, "create_if_supported", lambda *_: balanced)
    World(SPANS[spans], num_heads=4, num_kv_heads=2, page_size=4).attend(0, "fi")
    assert balanced.attend.call_args.kwargs == {
        "in_clusters": False,
        "starts_early": starts_early,
        "prefix": None,
    }


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize(
    "special",
    [
        AttentionSpec(scale=0.4),
        AttentionSpec(scale=0.4, window=6),
        AttentionSpec(scale=0.4, softcap=1.5),
    ],
    ids=str,
)
def test_layers_may_differ_in_their_scores(
    special: AttentionSpec, spans: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decodes, "attend_decode", gpu_attend_decode)
    world = World(spans, num_heads=4, num_kv_heads=2, page_size=4, specs=(PLAIN, special))
    for layer in range(2):
        o_TNH = world.attend(layer, "fi").double()
        torch.testing.assert_close(o_TNH, world.dense(layer), atol=2e-5, rtol=0)


def gpu_attend_decode(*arguments: Any, **scores: Any) -> None:
    gpu.attend_decode(*arguments, **scores)
