"""How much scratch memory FlashInfer's plans take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl.attention.flashinfer.decodes import flashinfer_decode_bytes
from minisgl.attention.flashinfer.plans import LayerShape
from minisgl.attention.flashinfer.pool import FlashInferPool
from minisgl.attention.flashinfer.prompts import GraphRoom, flashinfer_prompt_bytes
from minisgl.checkpoint import AttentionSpec

NO_PAGES = torch.empty(0, dtype=torch.int32)
SPEC = AttentionSpec(scale=1.0)
MEBI = 1 << 20


def shape_of(num_heads: int, num_kv_heads: int, width: int) -> LayerShape:
    """On a device with 132 multiprocessors."""
    device = torch.device("cpu")
    return LayerShape(num_heads, num_kv_heads, width, 16, torch.bfloat16, device, 132, SPEC)


@pytest.mark.parametrize(
    ("heads", "num_prompts", "num_tokens", "num_tiles"),
    [
        ((40, 8, 128), 65, 1536, 60 + 65),
        ((16, 8, 128), 17, 2030, 32 + 17),
        ((8, 8, 64), 33, 1, 1 + 33),
        ((16, 1, 128), 2, 1, 264),
    ],
)
def test_a_graph_has_a_place_for_each_tile_and_one_more_of_each_prompt(
    heads: tuple[int, int, int], num_prompts: int, num_tokens: int, num_tiles: int
) -> None:
    """Or as many as run at once, 264 by the number of kv heads, if these are more.

    Of float32 outputs and a logarithm, for each of 128 queries and each head.
    """
    room = GraphRoom(num_prompts, num_tokens, NO_PAGES)
    num_heads, _, width = heads
    num_bytes = num_tiles * 128 * num_heads * (width + 1) * 4
    assert flashinfer_prompt_bytes(shape_of(*heads), room) == num_bytes


def test_the_keys_of_few_prompts_are_cut_into_parts_that_fill_the_device() -> None:
    assert flashinfer_prompt_bytes(shape_of(16, 1, 128)) == 264 * 128 * 16 * 129 * 4
    assert flashinfer_prompt_bytes(shape_of(64, 4, 128)) == 66 * 128 * 64 * 129 * 4


@pytest.mark.parametrize(
    ("heads", "num_decodes", "num_rows"),
    [
        ((64, 4, 128), 256, 511 * 16),
        ((32, 2, 256), 1, 132 * 16),
        ((40, 8, 128), 64, 83 * 16),
        ((24, 1, 64), 256, (96 + 255) * 64),
    ],
)
def test_a_graph_of_decodes_has_a_place_for_each_tile_of_a_kv_heads_queries(
    heads: tuple[int, int, int], num_decodes: int, num_rows: int
) -> None:
    """As `PrefillPlan` of FlashInfer 0.6.12 allocates them (attention/scheduler.cuh)."""
    num_heads, _, width = heads
    num_bytes = num_rows * num_heads * (width + 1) * 4
    assert flashinfer_decode_bytes(shape_of(*heads), num_decodes) == num_bytes


def test_plans_share_scratch_memory_until_one_needs_more() -> None:
    pool: Any = SimpleNamespace(_workspace=None, device="cpu")
    first = FlashInferPool.workspace_of(pool, 1)
    assert len(first) == 256 * MEBI
    assert FlashInferPool.workspace_of(pool, 256 * MEBI) is first
    larger = FlashInferPool.workspace_of(pool, 256 * MEBI + 1)
    assert len(larger) == 256 * MEBI + 1
    assert FlashInferPool.workspace_of(pool, 1) is larger
