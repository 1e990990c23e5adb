"""The bytes: where a slot's keys and values lie, and how many there are."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from minisgl.errors import ConfigError
from minisgl.kernel import store_kv
from minisgl.kvcache import MHAKVCache

# Dimensions: H head width, K kv heads, T tokens of a step.
LAYERS = 3
HEADS = 2
HEAD_DIM = 4
PAGES = 5
PAGE_SIZE = 4
SHAPE = (LAYERS, HEADS, HEAD_DIM, PAGES, PAGE_SIZE)


def make_pool() -> MHAKVCache:
    return MHAKVCache(*SHAPE, torch.float32, torch.device("cpu"))


def test_a_pool_takes_the_bytes_it_announces() -> None:
    pool = make_pool()
    num_elements = sum(pool.k_cache(i).numel() + pool.v_cache(i).numel() for i in range(LAYERS))

    assert (
        MHAKVCache.page_bytes(LAYERS, HEADS, HEAD_DIM, PAGE_SIZE, itemsize=4) * PAGES
        == num_elements * 4
    )


def test_store_writes_one_layer_at_its_slots_and_nothing_else() -> None:
    pool = make_pool()
    k_TKH, v_TKH = torch.randn(2, 3, HEADS, HEAD_DIM).unbind()
    slot_T = torch.tensor([7, 0, 19])

    store_kv(k_TKH, v_TKH, pool.k_cache(1), pool.v_cache(1), slot_T)

    place_T = (slot_T // PAGE_SIZE, slot_T % PAGE_SIZE)
    assert torch.equal(pool.k_cache(1)[place_T], k_TKH)
    assert torch.equal(pool.v_cache(1)[place_T], v_TKH)
    store_kv(
        torch.zeros_like(k_TKH), torch.zeros_like(v_TKH), pool.k_cache(1), pool.v_cache(1), slot_T
    )
    assert all(not pool.k_cache(i).any() and not pool.v_cache(i).any() for i in range(LAYERS))


def test_a_layer_is_seen_as_pages_by_positions_by_heads_by_dim() -> None:
    assert (
        make_pool().k_cache(0).shape
        == make_pool().v_cache(2).shape
        == (PAGES, PAGE_SIZE, HEADS, HEAD_DIM)
    )


def test_what_a_page_has_in_all_layers_lies_in_one_piece() -> None:
    pool = make_pool()
    page_bytes = MHAKVCache.page_bytes(LAYERS, HEADS, HEAD_DIM, PAGE_SIZE, itemsize=4)
    firsts = [
        cache[3].data_ptr()
        for layer in range(LAYERS)
        for cache in (pool.k_cache(layer), pool.v_cache(layer))
    ]
    assert max(firsts) - min(firsts) < page_bytes
    assert pool.k_cache(0)[4].data_ptr() - pool.k_cache(0)[3].data_ptr() == page_bytes


def test_the_first_write_to_a_part_of_a_large_pool_takes_little_memory() -> None:
    """A step that writes a page of new memory in all layers does not wait for much of it."""
    pool = MHAKVCache(32, 4, 64, 4096, 16, torch.bfloat16, torch.device("cpu"))
    before = resident_bytes()
    for layer in range(32):
        pool.k_cache(layer)[2500] = 1
        pool.v_cache(layer)[2500] = 1

    assert resident_bytes() - before < 32 << 20  # 2 MiB if these are huge; 128 if layers lay apart


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("num_pages", [2**45, 2**80])
def test_a_pool_that_no_machine_has_room_for_is_refused(num_pages: int) -> None:
    with pytest.raises(ConfigError, match=r"the KV cache would take .* bytes: .*--num-pages"):
        MHAKVCache(1, 1, 4, num_pages, 4, torch.float32, torch.device("cpu"))
