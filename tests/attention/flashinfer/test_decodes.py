"""Which kernel takes the decodes of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from minisgl.attention.base import CapturedSlices
from minisgl.attention.flashinfer import decodes
from minisgl.attention.flashinfer.decodes import DecodeKernel, OwnDecodeKernels, OwnDecodes
from minisgl.checkpoint import AttentionSpec
from minisgl.core import Queries
from minisgl.kernel import GroupTensors

NUM_KV_HEADS = 8
PLAIN = AttentionSpec(scale=0.4)
WINDOW = AttentionSpec(scale=0.4, window=6)
SHARED = GroupTensors(*(torch.ones(1, dtype=torch.int32) for _ in range(3)))


def own_kernels(
    monkeypatch: pytest.MonkeyPatch, spec: AttentionSpec, most_in_clusters: int | None
) -> OwnDecodeKernels:
    """Those of a pool for which `BalancedDecode` takes so many in clusters, or nothing at all."""
    balanced = None
    if most_in_clusters is not None:
        balanced = MagicMock()
        balanced.can_use_clusters = lambda num_queries: num_queries <= most_in_clusters
    monkeypatch.setattr(decodes.BalancedDecode, "create_if_supported", lambda *_: balanced)
    pool: Any = SimpleNamespace(
        page_table_RP=None, page_size=16, shape=(16, NUM_KV_HEADS, 128), dtype=torch.bfloat16
    )
    return OwnDecodeKernels(pool, spec)


@pytest.mark.parametrize(
    ("spec", "most_in_clusters", "num_decodes", "beside_prompts", "shared", "expected"),
    [
        (PLAIN, 16, 16, False, None, DecodeKernel.CLUSTERS),
        (PLAIN, 16, 17, False, None, DecodeKernel.RANGES),
        (PLAIN, 16, 16, True, None, DecodeKernel.RANGES),
        (PLAIN, 16, 16, False, SHARED, DecodeKernel.RANGES),
        (WINDOW, 16, 16, False, SHARED, DecodeKernel.SPLITS),
        (PLAIN, None, 16, False, SHARED, None),
        (WINDOW, 16, 1, False, None, DecodeKernel.SPLITS),
        (PLAIN, 0, 2, False, None, DecodeKernel.SPLITS),
        (PLAIN, 0, 3, False, None, DecodeKernel.RANGES),
        (PLAIN, None, 2, False, None, DecodeKernel.SPLITS),
        (PLAIN, None, 3, False, None, None),
        (PLAIN, None, 3, True, None, DecodeKernel.SPLITS),
    ],
    ids=str,
)
def test_captured_decodes(
    monkeypatch: pytest.MonkeyPatch,
    spec: AttentionSpec,
    most_in_clusters: int | None,
    num_decodes: int,
    beside_prompts: bool,
    shared: GroupTensors | None,
    expected: DecodeKernel | None,
) -> None:
    """Few are in clusters, but not beside prompts, nor where requests share a prefix."""
    kernels = own_kernels(monkeypatch, spec, most_in_clusters)
    rows = torch.zeros(num_decodes, dtype=torch.int32)
    slices = CapturedSlices(rows, rows, groups=shared, beside_prompts=beside_prompts)
    taken = kernels.take_captured(slices)
    assert (taken and taken.kernel) == expected
    if taken:
        assert taken.captured is slices
        assert taken.groups is slices.decodes.groups is shared


@pytest.mark.parametrize(
    ("spec", "most_in_clusters", "expected"),
    [
        (PLAIN, 16, DecodeKernel.RANGES),
        (WINDOW, 16, DecodeKernel.SPLITS),
        (PLAIN, None, DecodeKernel.SPLITS),
    ],
    ids=str,
)
def test_decodes_that_are_not_captured(
    monkeypatch: pytest.MonkeyPatch,
    spec: AttentionSpec,
    most_in_clusters: int | None,
    expected: DecodeKernel,
) -> None:
    assert own_kernels(monkeypatch, spec, most_in_clusters).take(1, None).kernel is expected


@pytest.mark.parametrize("is_captured", [False, True])
def test_what_decodes_share_is_attended_to_apart(
    monkeypatch: pytest.MonkeyPatch, is_captured: bool
) -> None:
    found = MagicMock()
    attend_shared_prefixes = MagicMock(return_value=found)
    plan_shared_prefixes = MagicMock()
    monkeypatch.setattr(decodes, "plan_shared_prefixes", plan_shared_prefixes)
    monkeypatch.setattr(decodes, "attend_shared_prefixes", attend_shared_prefixes)
    kernels = own_kernels(monkeypatch, PLAIN, 16)
    kernels._pool.pages = [(torch.zeros(0), torch.ones(0))]
    rows = torch.arange(20, dtype=torch.int32)
    # A graph's decodes say themselves where they are.
    queries: Any = None if is_captured else Queries(rows, rows + 9, MagicMock())
    taken: OwnDecodes | None = kernels.take(20, SHARED)
    if is_captured:
        taken = kernels.take_captured(CapturedSlices(rows, rows + 9, groups=SHARED))
    assert taken is not None
    kernels.plan(queries, taken)
    q_TNH = torch.zeros(20, 16, 128)
    kernels.run(q_TNH, 0, queries, taken, torch.empty_like(q_TNH), starts_early=True)
    balanced: Any = kernels._balanced
    assert balanced.plan.call_args.kwargs["groups"] is SHARED
    row_B, groups = plan_shared_prefixes.call_args.args
    assert row_B.tolist() == rows.tolist()
    assert groups is SHARED
    assert plan_shared_prefixes.call_args.kwargs == {"num_heads": 16, "num_kv_heads": 8}
    assert attend_shared_prefixes.call_args.args[-1] is plan_shared_prefixes.return_value
    assert balanced.attend.call_args.kwargs["prefix"] is found
