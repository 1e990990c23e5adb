"""The Triton kernels against the references: on a GPU, or else in Triton's interpreter."""

# Dimensions: B requests of a step, T tokens of a step, V vocabulary, W words of 32 bits,
# X a selection out of another dimension.

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.core import SamplingParams
from minisgl.kernel import (
    HeadNorms,
    Rotation,
    attend_decode_reference,
    attend_prompts_reference,
    mask_logits_reference,
    rms_norm_reference,
    rotate_and_store,
)
from minisgl.sampling_params import SAMPLING_DTYPE, pack_sampling
from minisgl.utils.cuda_toolkit import find_cuda_toolkit

pytest.importorskip("triton", reason="the kernels of a GPU need Triton")
from minisgl.kernel import dispatch, gpu
from tests.kernel.harness import DEVICE, DOT_DTYPES, DTYPES, numbers, same

pytestmark = pytest.mark.gpu
SHARED_MEMORY = 227 * 1024  # of a program on Hopper


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(0, 64), (1, 64), (3, 576), (5, 5120)])
def test_norms(random: torch.Generator, tokens: int, width: int, dtype: torch.dtype) -> None:
    x, residual = (numbers(random, tokens, width, dtype=dtype) for _ in range(2))
    weight = numbers(random, width, dtype=dtype)
    y = torch.empty_like(x)
    gpu.rms_norm(x, weight, 1e-5, y)
    same(y, rms_norm_reference(x, weight, 1e-5))
    total = x + residual
    gpu.add_rms_norm(x, residual, weight, 1e-5, y)
    same(residual, total)  # the interpreter rounds bfloat16 towards zero
    same(y, rms_norm_reference(residual, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(0, 8), (1, 8), (3, 1500)])
def test_silu(random: torch.Generator, tokens: int, width: int, dtype: torch.dtype) -> None:
    gate, up = (numbers(random, tokens, 2 * width, dtype=dtype) * 5).chunk(2, dim=1)
    y = torch.empty(tokens, width, dtype=dtype, device=DEVICE)
    gpu.silu_and_mul(gate, up, y)
    same(y, (torch.nn.functional.silu(gate.float()) * up.float()).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "width"),
    [(2, 2, 16), (6, 2, 64), (16, 2, 128), (40, 8, 32), (5, 1, 20)],
)
@pytest.mark.parametrize("has_norms", [False, True])
def test_heads_are_normed_rotated_and_stored(
    monkeypatch: pytest.MonkeyPatch,
    random: torch.Generator,
    has_norms: bool,
    num_heads: int,
    num_kv_heads: int,
    width: int,
    dtype: torch.dtype,
) -> None:
    tokens = 5
    qkv = numbers(random, tokens, num_heads + 2 * num_kv_heads, width, dtype=dtype)
    cos, sin = torch.rand(2, 50, width // 2, device=DEVICE, generator=random).to(dtype)
    position_T = torch.randint(50, (tokens,), generator=random, device=DEVICE).int()
    rotation = Rotation(torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1), position_T)
    q_weight, k_weight = numbers(random, 2, width, dtype=dtype)
    norms = HeadNorms(q_weight, k_weight, 1e-5) if has_norms else None
    slot_T = torch.randperm(64, generator=random, device=DEVICE)[:tokens]

    def call(kernels: object) -> tuple[Tensor, Tensor]:
        monkeypatch.setattr(dispatch, "load_cpu_kernels", lambda: kernels)
        monkeypatch.setattr(dispatch, "_gpu_kernels", lambda: kernels)
        pools = torch.zeros(2, 16, 4, num_kv_heads, width, dtype=dtype, device=DEVICE)
        rotated = qkv.clone()
        rotate_and_store(rotated, norms, rotation, slot_T, pools[0], pools[1])
        return rotated, pools

    for actual, expected in zip(call(gpu), call(None), strict=True):
        torch.testing.assert_close(actual, expected, atol=3 * DTYPES[dtype], rtol=3 * DTYPES[dtype])


def test_tables_are_changed_and_looked_up(random: torch.Generator) -> None:
    pages = torch.randint(100, (7, 30), generator=random, device=DEVICE, dtype=torch.int32)
    tokens = torch.randint(1000, (7, 30 * 4), generator=random, device=DEVICE, dtype=torch.int32)
    expected = pages.clone()
    index = torch.randperm(pages.numel(), generator=random, device=DEVICE)[:40].int()
    value = torch.arange(-9, 31, dtype=torch.int32, device=DEVICE)
    expected.view(-1)[index.long()] = value.clamp(min=0)
    gpu.scatter(pages, index, value)
    assert torch.equal(pages, expected)

    row_T = torch.randint(7, (300,), generator=random, device=DEVICE, dtype=torch.int32)
    position_T = torch.randint(120, (300,), generator=random, device=DEVICE, dtype=torch.int32)
    ids_T, slot_T = torch.empty(2, 300, dtype=torch.int64, device=DEVICE)
    gpu.look_up(row_T, position_T, tokens, pages, 4, ids_T, slot_T)
    assert torch.equal(ids_T, tokens[row_T.long(), position_T.long()].long())
    assert torch.equal(
        slot_T, pages[row_T.long(), position_T.long() // 4].long() * 4 + position_T % 4
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_words", [256, 16])
@pytest.mark.parametrize("vocab_size", [32, 130, 9001])
def test_banned_tokens_and_no_others_lose_their_logits(
    random: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    vocab_size: int,
    num_words: int,
    dtype: torch.dtype,
) -> None:
    """Masks lie in host memory, which a GPU reads too."""
    monkeypatch.setattr("minisgl.kernel.gpu.mask._WORDS", num_words)
    logits_BV = numbers(random, 5, vocab_size, dtype=dtype)
    mask_B = torch.tensor([-1, 1, -1, -1, 0], dtype=torch.int32, device=DEVICE)
    may_XV = torch.rand(2, -(-vocab_size // 32) * 32, generator=random, device=DEVICE) < 0.5
    weights = 2 ** torch.arange(32, dtype=torch.int64, device=DEVICE)
    bits_XW = (may_XV.view(2, -1, 32) * weights).sum(dim=2).to(torch.uint32).view(torch.int32).cpu()
    bits_XW = bits_XW.pin_memory() if torch.cuda.is_available() else bits_XW
    for mask_logits, device in ((gpu.mask_logits, DEVICE), (mask_logits_reference, "cpu")):
        masked_BV = logits_BV.to(device, copy=True)
        mask_logits(masked_BV, mask_B.to(device), bits_XW)
        masked_BV = masked_BV.to(DEVICE)
        assert torch.equal(masked_BV[[0, 2, 3]], logits_BV[[0, 2, 3]])
        expected_XV = logits_BV[[4, 1]].masked_fill(~may_XV[:, :vocab_size], -torch.inf)
        assert torch.equal(masked_BV[[4, 1]], expected_XV)


@pytest.mark.parametrize("num_kept", [1, 40, 9001])
@pytest.mark.parametrize("width", [0.0, 0.6, 6.0])
@pytest.mark.parametrize("num_programs", [6, 12])
def test_no_choice_depends_on_how_a_row_is_split(
    random: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    num_programs: int,
    width: float,
    num_kept: int,
) -> None:
    """A program of a row may walk over all tiles, over some, or have one."""
    logits_BV = numbers(random, 6, 9001) * width
    temperature_B = torch.tensor([0.0, 1e-30, 0.1, 1.0, 1.0, 100.0], device=DEVICE)
    seed_B = torch.arange(6, device=DEVICE) - 3
    position_B = torch.arange(6, device=DEVICE).int() % 5
    lowest_B = logits_BV.sort(descending=True).values[:, num_kept - 1].contiguous()
    sampling = (lowest_B, temperature_B, seed_B.view(torch.int32).view(-1, 2), position_B)
    expected_B = gpu.choose_tokens(logits_BV, *sampling)
    monkeypatch.setattr(gpu.sample, "_PROGRAMS", num_programs)
    assert torch.equal(gpu.choose_tokens(logits_BV, *sampling), expected_B)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.0), SamplingParams(temperature=2.0, top_k=1)],
    ids=["temperature 0", "top_k 1"],
)
def test_equal_logits_give_the_first_token(params: SamplingParams) -> None:
    logits_BV = torch.zeros(1, 5000, device=DEVICE)
    logits_BV[0, [70, 3000, 4999]] = 1.0
    numbers_B = np.frombuffer(pack_sampling(params, seed=3), SAMPLING_DTYPE)
    temperature_B = torch.tensor(numbers_B["temperature"].copy(), device=DEVICE)
    seed_B = torch.tensor(numbers_B["seed"].copy(), device=DEVICE)
    seed_B2 = seed_B.view(torch.int32).view(1, 2)
    position_B = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    lowest_B = torch.ones(1, device=DEVICE)  # what a filter keeps of them
    token_B = gpu.choose_tokens(logits_BV, lowest_B, temperature_B, seed_B2, position_B)
    assert token_B.tolist() == [70]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(20, 1), (64, 7), (1024, 6), (1500, 5), (3072, 4)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_of_one_token(
    random: torch.Generator, has_bias: bool, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    x = numbers(random, 1, inputs, dtype=dtype)
    weight = numbers(random, outputs, inputs, dtype=dtype) / inputs**0.5
    bias = numbers(random, outputs, dtype=dtype) if has_bias else None
    expected = torch.nn.functional.linear(
        x.float(), weight.float(), None if bias is None else bias.float()
    )
    same(gpu.one_token_linear(x, weight, bias), expected.to(dtype))


@pytest.mark.parametrize(
    ("outputs", "inputs", "tile"),
    [
        (6144, 1024, (4, 512, 2)),
        (1024, 3072, (4, 2048, 8)),
        (2560, 5120, (2, 1024, 4)),
        (3584, 5120, (4, 1024, 4)),
        (5120, 6400, (2, 1024, 4)),
        (37984, 5120, (2, 1024, 4)),
    ],
)
def test_the_tile_of_one_token_is_what_was_fastest(
    outputs: int, inputs: int, tile: tuple[int, ...]
) -> None:
    """On an H200: docs/decisions/0013-what-was-tried-for-speed.md."""
    assert gpu.linear._tile(outputs, inputs, 132) == tile


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(20, 1), (64, 7), (1024, 3), (1500, 5)])
def test_the_gated_product_of_one_token_is_that_of_two_kernels(
    random: torch.Generator, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    x_1I = numbers(random, 1, inputs, dtype=dtype)
    weight_UI = numbers(random, 2 * outputs, inputs, dtype=dtype) / inputs**0.5
    gate_1F, up_1F = gpu.one_token_linear(x_1I, weight_UI, None).chunk(2, dim=1)
    expected_1F = torch.empty_like(up_1F)
    gpu.silu_and_mul(gate_1F, up_1F, expected_1F)
    assert torch.equal(gpu.one_token_silu(x_1I, weight_UI), expected_1F)


PAGES_AND_WIDTHS = [(1, 64), (16, 128), (3, 20)]
GROUPS = range(1, 9)
EVERY_SHAPE = [(group, *shape) for group in GROUPS for shape in PAGES_AND_WIDTHS]
# Triton's interpreter takes seconds for each: there, each group meets one shape, by turns.
SOME_SHAPES = [(group, *PAGES_AND_WIDTHS[group % 3]) for group in GROUPS]


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(
    ("group", "page_size", "width"), EVERY_SHAPE if DEVICE.type == "cuda" else SOME_SHAPES
)
def test_decodes(
    random: torch.Generator, group: int, page_size: int, width: int, dtype: torch.dtype
) -> None:
    num_kv_heads = 2
    num_pages = 400 // page_size
    pool = numbers(random, 2, num_pages, page_size, num_kv_heads, width, dtype=dtype)
    page = torch.randperm(num_pages, generator=random, device=DEVICE).int()
    pages = page[: num_pages // 4 * 4].view(4, -1)
    q = numbers(random, 9, group * num_kv_heads, width, dtype=dtype)
    token, row, position = (
        torch.tensor(x, dtype=torch.int32, device=DEVICE)
        for x in ([8, 0, 3, 5], [2, 0, 3, 1], [0, 95, 41, -1])
    )
    outputs = torch.full((2, *q.shape), 7, dtype=dtype, device=DEVICE)
    arguments = (q, *pool, pages, token, row, position)
    gpu.attend_decode(*arguments, outputs[0], scale=0.2)
    attend_decode_reference(*arguments, outputs[1], scale=0.2)
    same(outputs[0], outputs[1])


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(
    "scores",
    [{"scale": 0.3, "window": 17}, {"scale": 0.3, "window": 50}, {"scale": 1.0, "softcap": 2.0}],
    ids=str,
)
def test_decodes_with_a_window_or_a_soft_cap(
    random: torch.Generator, scores: dict[str, Any], dtype: torch.dtype
) -> None:
    pool = numbers(random, 2, 100, 4, 2, 32, dtype=dtype)
    pages = torch.randperm(100, generator=random, device=DEVICE).int().view(4, 25)
    q = numbers(random, 4, 6, 32, dtype=dtype)
    token = torch.arange(4, dtype=torch.int32, device=DEVICE)
    row = torch.tensor([2, 0, 3, 1], dtype=torch.int32, device=DEVICE)
    position = torch.tensor([0, 95, 41, -1], dtype=torch.int32, device=DEVICE)
    outputs = torch.full((2, *q.shape), 7, dtype=dtype, device=DEVICE)
    arguments = (q, *pool, pages, token, row, position)
    gpu.attend_decode(*arguments, outputs[0], **scores)
    attend_decode_reference(*arguments, outputs[1], **scores)
    same(outputs[0], outputs[1])


LENGTHS = [1, 150, 33, 0, 64, 2]  # of prompts, after three decodes
STARTS = [90, 0, 7, 0, 36, 64]


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(
    ("group", "page_size", "width", "scores"),
    [
        (2, 64, 64, {}),
        (5, 16, 20, {"window": 17}),
        (1, 1, 80, {}),
        (3, 64, 128, {"softcap": 2.0}),
        (8, 3, 128, {"window": 100}),
        (16, 128, 256, {}),
        (2, 32, 512, {}),
    ],
    ids=str,
)
def test_prompts(
    random: torch.Generator,
    group: int,
    page_size: int,
    width: int,
    scores: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    num_pages = -(-150 // page_size)
    pool = numbers(random, 2, 6 * num_pages, page_size, 2, width, dtype=dtype)
    pages = torch.randperm(6 * num_pages, generator=random, device=DEVICE).int().view(6, -1)
    num_tokens = 3 + sum(LENGTHS)
    q = numbers(random, num_tokens, 2 * group, width, dtype=dtype)
    order = [2, 0, 5, 1, 3, 4]  # rows of the prompts
    host = [torch.tensor(x, dtype=torch.int32) for x in (order, STARTS, LENGTHS)]
    indptr = 3 + torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    row_T = torch.zeros(num_tokens, dtype=torch.int32)
    position_T = torch.zeros(num_tokens, dtype=torch.int32)
    for row, start, first, length in zip(order, STARTS, indptr, LENGTHS, strict=False):
        row_T[first : first + length] = row
        position_T[first : first + length] = torch.arange(start, start + length)
    outputs = torch.full((2, *q.shape), 7, dtype=dtype, device=DEVICE)
    arguments = (q, *pool, pages)
    scores = {"scale": width**-0.5, **scores}
    gpu.attend_prompts_on_device(
        *arguments,
        row_T.to(DEVICE),
        position_T.to(DEVICE),
        indptr.to(DEVICE),
        outputs[0],
        num_tokens=num_tokens,
        **scores,
    )
    attend_prompts_reference(*arguments, indptr[:-1], *host, outputs[1], **scores)
    same(outputs[0], outputs[1])


def test_the_pages_of_rows_are_listed(random: torch.Generator) -> None:
    pages = torch.randint(100, (7, 3000), generator=random, device=DEVICE, dtype=torch.int32)
    row_B = torch.tensor([5, 0, 6], dtype=torch.int32, device=DEVICE)
    indptr = torch.tensor([0, 2500, 2500, 2503], dtype=torch.int32, device=DEVICE)
    listed = torch.full((2600,), -1, dtype=torch.int32, device=DEVICE)
    gpu.list_pages(row_B, indptr, pages, listed)
    assert torch.equal(listed[:2503], torch.cat((pages[5, :2500], pages[6, :3])))
    assert (listed[2503:] == -1).all()


# How many loads kernels in CUDA have before they wait; a compiler may move them. A thread that
# multiplies has its rows and rounds of the weight. One that attends has the tile that it begins
# with, and where that is.
EARLY_LOADS = {
    "multiply_at_once<4, 4, false>": 16,
    "multiply_at_once<1, 8, false>": 8,
    "multiply_at_once<1, 12, false>": 12,
    "multiply_at_once<6, 4, true>": 24,
    "multiply_groups<8, 6>": 24,
    "multiply_groups<8, 8>": 32,
    "multiply_groups<8, 10>": 40,
    "multiply_groups<16, 6>": 24,
    "multiply_groups<16, 8>": 32,
    "multiply_groups<16, 10>": 40,
    "attend_ranges<64, false>": 12,
    "attend_ranges<128, false>": 20,
    "attend_ranges<64, true>": 12,
    "attend_ranges<128, true>": 20,
    "attend_in_clusters<64>": 13,
    "attend_in_clusters<128>": 21,
}


def test_every_kernel_compiles_for_hopper_and_waits_for_the_one_before_it() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(Path(__file__).with_name("compile_gpu.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = {line.split(":")[0] for line in lines}
    in_cuda = {"plan_ranges", "find_lowest", "multiply_gated_tiles"}
    in_cuda |= set(EARLY_LOADS)
    for number in ("BFloat16", "Float16", "Float32"):
        protocols = ("push", "one_shot", "two_shot")
        in_cuda |= {f"{name}<{number}>" for name in protocols}
        in_cuda |= {f"{name}_rows<{number}>" for name in protocols[1:]}
    assert len(names - in_cuda) >= 18
    if find_cuda_toolkit():
        assert names >= in_cuda
    for line in lines:
        if line.startswith(tuple(EARLY_LOADS)):
            early = int(line.split(" loads before it waits")[0].split()[-1])
            assert early == EARLY_LOADS[line.partition(":")[0]], f"the compiler moves some: {line}"
        assert line.endswith(", follows" if line.startswith("find_lowest") else ", waits"), line
        assert "loads through registers" not in line, (
            "Triton does not know that rows begin at multiples of 16 bytes"
        )
        assert int(line.split(" of shared memory")[0].split()[-1]) < SHARED_MEMORY, line
        if "spilled of torch.float32" not in line:  # float32 need not be fast
            assert " 0 spilled" in line, line
