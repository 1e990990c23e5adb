"""How much scratch memory FlashInfer's plans of prompts take in graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl.attention.flashinfer.plans import LayerShape
from minisgl.attention.flashinfer.pool import FlashInferPool
from minisgl.attention.flashinfer.prompts import GraphRoom, flashinfer_graph_bytes
from minisgl.checkpoint import AttentionSpec

NO_PAGES = torch.empty(0, dtype=torch.int32)
SPEC = AttentionSpec(scale=1.0)


@pytest.mark.parametrize(
    ("heads", "num_prompts", "num_tokens", "num_tiles"),
    [((40, 8, 128), 65, 1536, 60 + 65), ((16, 8, 128), 17, 130, 3 + 17), ((8, 8, 64), 2, 1, 1 + 2)],
)
def test_a_graph_has_a_place_for_each_tile_and_one_more_of_each_prompt(
    heads: tuple[int, int, int], num_prompts: int, num_tokens: int, num_tiles: int
) -> None:
    """Of float32 outputs and a logarithm, for each of 128 queries and each head."""
    shape = LayerShape(*heads, 16, torch.bfloat16, torch.device("cpu"), SPEC)
    room = GraphRoom(num_prompts, num_tokens, NO_PAGES)
    num_heads, _, width = heads
    assert flashinfer_graph_bytes(shape, room) == num_tiles * 128 * num_heads * (width + 1) * 4


def test_plans_share_scratch_memory_where_it_suffices() -> None:
    shared = torch.empty(0, dtype=torch.uint8)
    pool: Any = SimpleNamespace(workspace=shared, device="cpu")
    assert FlashInferPool.workspace_of(pool, 256 << 20) is shared
    assert len(FlashInferPool.workspace_of(pool, (256 << 20) + 1)) == (256 << 20) + 1
