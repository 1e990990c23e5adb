"""However many tokens and requests a step has, the Triton kernels have few variants.

A variant that is first met while serving is compiled then, or read from a file: a fifth of a
second, or milliseconds, in which all streams stand still.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels of a GPU need Triton")
from minisgl.kernel import SEGMENT_SIZE, GroupTensors, gpu
from minisgl.moe import rule_table
from tests.kernel.launches import Launches

SIZES = [1, 2, 3, 5, 7, 8, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 77, 100, 128, 129, 255, 256]
MANY_SIZES = [*SIZES, 257, 500, 511, 512, 513, 1000, 1535, 1536, 1537, 4099]
VOCAB_SIZE = 5000
SHIFTS = [0, 1, 3]  # of small arrays from an aligned address, in numbers
bf16 = torch.bfloat16


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def ints(count: int, shift: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(count + shift, dtype=dtype)[shift:]


def floats(count: int, shift: int = 0) -> Tensor:
    return torch.zeros(count + shift)[shift:]


def check(launches: Launches, **nums_of_variants: int) -> None:
    counts = {name: len(variants) for name, variants in launches.take().items()}
    assert counts == nums_of_variants


def test_of_sampling(launches: Launches) -> None:
    """One for logits alone, one for filtered ones, also with scores; changed logits are in float32.

    Those of a part of the vocabulary are chosen by the same, whichever part it is.
    """
    for dtype in (bf16, torch.float32):
        for size in SIZES:
            logits = torch.empty(size, VOCAB_SIZE, dtype=dtype)
            for shift in SHIFTS:
                temperature = floats(size, shift)
                seed = ints(2 * size, shift).view(-1, 2)
                position = ints(size, shift)
                for lowest in (None, floats(size, shift)):
                    gpu.choose_tokens(logits, lowest, temperature, seed, position)
                    for first_token in (0, SEGMENT_SIZE, 20 * SEGMENT_SIZE):
                        gpu.choose_scored_tokens(
                            logits, lowest, temperature, seed, position, first_token
                        )
        check(launches, _best_of_split=2, _best_of_all=4)


def test_of_masks(launches: Launches) -> None:
    masks = ints(40 * 157).view(40, 157)
    for size in SIZES:
        for shift in SHIFTS:
            gpu.mask_logits(torch.empty(size, VOCAB_SIZE, dtype=bf16), ints(size, shift), masks)
    check(launches, _mask_logits=1)


def test_of_tables(launches: Launches) -> None:
    tokens = ints(7 * 131).view(7, 131)
    pages = ints(7 * 9).view(7, 9)
    for size in MANY_SIZES:
        for shift in SHIFTS:
            gpu.scatter(tokens, ints(size, shift), ints(size, shift))
            row = ints(size, shift)
            position = ints(size, shift)
            input_ids = ints(size, shift, torch.int64)
            slot = ints(size, shift + 1, torch.int64)
            gpu.look_up(row, position, tokens, pages, 16, input_ids, slot)
            gpu.list_pages(ints(size, shift), ints(size + 1, shift), pages, ints(size, shift))
    check(launches, _scatter=1, _look_up=1, _list_pages=1)


def test_of_what_happens_to_rows(launches: Launches) -> None:
    pools = torch.empty(2, 4, 16, 2, 64, dtype=bf16)
    norm = torch.empty(64, dtype=bf16)
    angles = torch.empty(2, 50, 64, dtype=bf16)
    weight = torch.empty(576, dtype=bf16)
    for size in MANY_SIZES:
        x = torch.empty(size, 576, dtype=bf16)
        gpu.rms_norm(x, weight, 1e-6, torch.empty_like(x))
        gpu.add_rms_norm(x, torch.empty_like(x), weight, 1e-6, torch.empty_like(x))
        gate, up = torch.empty(size, 3072, dtype=bf16).split(1536, dim=1)
        gpu.silu_and_mul(gate, up, torch.empty(size, 1536, dtype=bf16))
        qkv = torch.empty(size, 10, 64, dtype=bf16)
        for shift in SHIFTS:
            position = ints(size, shift)
            slot = ints(size, shift, torch.int64)
            gpu.rotate_and_store(qkv, norm, norm, 1e-6, *angles, position, slot, *pools)
    check(launches, _rms_norm=2, _silu_and_mul=1, _rotate_and_store=1)


def attend(num_kv_heads: int, **options: Any) -> None:
    """Decodes in all numbers and places, over a pool whose sizes are a model's."""
    pools = torch.empty(2, 4, 16, num_kv_heads, 64, dtype=bf16)
    pages = ints(300 * 9).view(300, 9)
    for size in SIZES:
        q = torch.empty(size, 2 * num_kv_heads, 64, dtype=bf16)
        for shift in SHIFTS:
            token = ints(size, shift)
            row = ints(size, shift + 1)
            position = ints(size, shift)
            gpu.attend_decode(q, *pools, pages, token, row, position, q, scale=0.1, **options)


@pytest.fixture
def large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts are split as on a GPU, and not as other tests want it."""
    monkeypatch.setattr(gpu.attention, "_PROGRAMS", 528)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 5, 8])
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.usefixtures("large_gpu")
def test_of_attention(launches: Launches, num_kv_heads: int, window: int | None) -> None:
    """One for each kind of layer; results are merged for few splits, and for many."""
    attend(num_kv_heads, window=window)
    check(launches, _attend_split=1, _merge_splits=2)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 5, 8])
def test_of_attention_of_prompts(launches: Launches, num_kv_heads: int) -> None:
    """One for few prompts, and one for many."""
    pools = torch.empty(2, 4, 16, num_kv_heads, 64, dtype=bf16)
    pages = ints(300 * 9).view(300, 9)
    for size in MANY_SIZES:
        q = torch.empty(size, 2 * num_kv_heads, 64, dtype=bf16)
        for shift in SHIFTS:
            row = ints(size, shift)
            position = ints(size, shift + 1)
            for num_prompts in (1, 2, 16, 31, 32, 33, 48, 511, 512):
                indptr = ints(num_prompts + 1, shift)
                gpu.attend_prompts_on_device(
                    q, *pools, pages, row, position, indptr, q, num_tokens=size, scale=0.1
                )
    check(launches, _attend_tile=2)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 5, 8])
def test_of_attention_to_a_shared_prefix(launches: Launches, num_kv_heads: int) -> None:
    pools = torch.empty(2, 4, 16, num_kv_heads, 64, dtype=bf16)
    pages = ints(300 * 9).view(300, 9)
    for size, shift, num_groups in itertools.product(SIZES, SHIFTS, (1, 2, 3, 4, 32)):
        q = torch.empty(size, 2 * num_kv_heads, 64, dtype=bf16)
        number_B = ints(size, shift)
        groups = GroupTensors(number_B, number_B, indptr=ints(num_groups + 1, shift))
        program_ZX, _ = gpu.plan_shared_prefixes(number_B, *groups, 2 * num_kv_heads, num_kv_heads)
        gpu.attend_shared_prefixes(q, *pools, pages, number_B, program_ZX, scale=0.1)
    check(launches, _plan=1, _attend_part=1)


def test_of_experts(launches: Launches) -> None:
    """One for each tile, for each of the two products; few pairs are sorted at once."""
    num_experts = 16
    each = 4
    width = 256
    mlp_width = 192
    gate_up = torch.empty(num_experts, 2 * mlp_width, width, dtype=bf16)
    down = torch.empty(num_experts, width, mlp_width, dtype=bf16)
    table = rule_table(num_experts, each)
    for size in MANY_SIZES:
        x = torch.empty(size, width, dtype=bf16)
        logits = torch.empty(size, num_experts, dtype=bf16)
        weight = torch.empty(size, each, dtype=bf16)
        expert = ints(size * each).view(size, each)
        for first in (0, 1, 5, 16):
            gpu.route(logits, weight, expert, True, first)
        gpu.moe_by_token(x, gate_up, down, weight, expert, x)
        gpu.moe_by_expert(x, gate_up, down, weight, expert, x, table.find(max(size, 5)))
    check(
        launches,
        _route=1,
        _gate_up_rows=1,
        _down_rows=1,
        _sort_few_pairs=1,
        _count_pairs=1,
        _place_experts=1,
        _place_pairs=1,
        _multiply=2 * len(table.steps),
        _sum_of_pairs=1,
    )


def test_of_one_token(launches: Launches) -> None:
    weight = torch.empty(70, 576, dtype=bf16)
    x = torch.empty(9, 576, dtype=bf16)
    for row in range(9):
        gpu.one_token_linear(x[row : row + 1], weight, None)
        gpu.one_token_silu(x[row : row + 1], weight)
    check(launches, _one_token_linear=1, _one_token_gated=1)
