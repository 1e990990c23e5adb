"""What FlashInfer is told: a stand-in for its wrappers attends by the lists that it is given, on any machine."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the lists of pages are made by a Triton kernel")
from minisgl.attention import flashinfer_backend
from minisgl.kernel import gpu
from tests.attention.test_torch_backend import MIXED, World


class FakeWrapper:
    """Attends request by request, in float64, over what `plan` and `run` were given."""

    is_cuda_graph_enabled = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def run(self, q: Tensor, *kv: Any, out: Tensor) -> None:
        for i, (start, end) in enumerate(zip(self.queries[:-1], self.queries[1:], strict=True)):
            k, v = self.context(i, *kv)
            position = torch.arange(len(k) - (end - start), len(k))
            hidden = torch.arange(len(k)) > position[:, None]
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
            scores = torch.einsum("tnh,lnh->ntl", q[start:end].double(), k) / math.sqrt(q.shape[2])
            weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
            out[start:end] = torch.einsum("ntl,lnh->tnh", weights, v).to(out.dtype)

    def context(self, i: int, *kv: Any) -> tuple[Tensor, Tensor]:
        [(k_pages, v_pages)] = kv
        pages = self._paged_kv_indices_buf[self.indptr[i] : self.indptr[i + 1]].long()
        length = (len(pages) - 1) * k_pages.shape[1] + int(self.last_page_len[i])
        return k_pages[pages].flatten(0, 1)[:length], v_pages[pages].flatten(0, 1)[:length]

    def take_lists(self, indptr: Tensor, pages: Tensor, last_page_len: Tensor) -> None:
        self.indptr, self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr, indptr, pages
        self.last_page_len = last_page_len


class FakeDecode(FakeWrapper):
    def plan(
        self, indptr: Tensor, pages: Tensor, last_page_len: Tensor, *shape: int, **dtypes: Any
    ) -> None:
        self.take_lists(indptr, pages, last_page_len)
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
        **_: Any,
    ) -> None:
        assert causal
        self.take_lists(indptr, pages, last_page_len)
        self.queries = queries.tolist()


class FakeRagged(FakeWrapper):
    def plan(self, queries: Tensor, keys: Tensor, *shape: int, causal: bool, **dtypes: Any) -> None:
        assert causal and torch.equal(queries, keys)
        self.queries = queries.tolist()

    def context(self, i: int, *kv: Any) -> tuple[Tensor, Tensor]:
        k, v = (x[self.queries[i] : self.queries[i + 1]] for x in kv)
        return k, v


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=FakeDecode,
        BatchPrefillWithPagedKVCacheWrapper=FakePrefill,
        BatchPrefillWithRaggedKVCacheWrapper=FakeRagged,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    event = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(flashinfer_backend, "kernels_for", lambda x: gpu)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    "spans",
    [
        [(9, 10), (31, 32), (0, 1)],
        [(0, 7), (0, 30)],
        [(5, 17), (0, 3), (40, 41)],
        [(9, 10), (30, 31), (0, 7), (0, 2)],
        [(9, 10), (30, 31), (0, 7), (20, 50), (3, 4)],
        MIXED,
    ],
    ids=["decodes", "prompts", "chunks", "decodes and prompts", "decodes and chunks", "mixed"],
)
def test_each_slice_attends_to_its_context(spans: list[tuple[int, int]], page_size: int) -> None:
    world = World(spans, num_heads=4, num_kv_heads=2, page_size=page_size)
    torch.testing.assert_close(world.attend(1, "fi").double(), world.dense(), atol=2e-5, rtol=0)
