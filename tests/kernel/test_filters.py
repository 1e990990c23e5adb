"""The filters' border: of a GPU's kernel, or its source built for a CPU, and of a CPU's kernel."""

# Dimensions: B requests of a step, V vocabulary.

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.kernel import cuda_kernels_for, filters, lowest_kept, lowest_kept_reference, native
from minisgl.utils.cuda_toolkit import find_cuda_toolkit

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
only_on_a_cpu = pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU has the reference there")
# The magnitudes that the kernel distinguishes.
SMALLEST = 2.0**-15
LARGEST = 4080.0


@pytest.fixture
def counted(cuda_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`lowest_kept` by the kernel of a GPU."""
    monkeypatch.setattr(filters, "cuda_kernels_for", lambda x: cuda_kernels)
    return lowest_kept


@pytest.fixture(params=["GPU", "CPU"])
def compiled(request: pytest.FixtureRequest) -> Any:
    """`lowest_kept` by each kernel that this machine can run."""
    if request.param == "GPU":
        return request.getfixturevalue("counted")
    if DEVICE.type == "cuda":
        pytest.skip("it is tested where there is no GPU")
    return lowest_kept


def lowest(find: Any, logits_BV: Tensor, *filters_of_all: float) -> Tensor:
    """The border of each row, as `find` computes it.

    All rows have these filters: temperature, top_k, top_p and min_p.
    """
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    columns = [
        torch.full(logits_BV.shape[:1], x, dtype=dtype, device=DEVICE)
        for x, dtype in zip(filters_of_all, dtypes, strict=True)
    ]
    result_B: Tensor = find(logits_BV, *columns)
    assert result_B.shape == logits_BV.shape[:1]
    assert result_B.dtype == torch.float32
    return result_B


def by_definition(
    logits_BV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor
) -> Tensor:
    """The border, in float64 and over all ranks."""
    sorted_BV = logits_BV.double().sort(dim=1, descending=True).values
    rank_V = torch.arange(logits_BV.shape[1], device=DEVICE)
    score_BV = (sorted_BV - sorted_BV[:, :1]) / temperature_B.double()[:, None]
    mass_BV = score_BV.exp() * (rank_V < top_k_B[:, None])
    before_BV = (mass_BV.cumsum(dim=1) - mass_BV) / mass_BV.sum(dim=1, keepdim=True)
    is_kept_BV = (before_BV < top_p_B[:, None]) | (top_p_B >= 1)[:, None] | (rank_V == 0)
    is_kept_BV &= (rank_V < top_k_B[:, None]) & (score_BV.float() >= min_p_B.log()[:, None])
    return sorted_BV.gather(1, is_kept_BV.sum(dim=1, keepdim=True) - 1).flatten().float()


def same_tokens_are_kept(
    find: Any, logits_BV: Tensor, temperature: float, k: int, p: float, min_p: float
) -> None:
    """Check that `find` keeps the tokens that the definition keeps.

    A sum of float32 may put a mass that nearly equals top_p on either side of it.
    """
    result_B = lowest(find, logits_BV, temperature, k, p, min_p)
    kept_B = (logits_BV.float() >= result_B[:, None]).sum(dim=1)
    seen_BV = logits_BV.float().masked_fill(logits_BV.abs() < SMALLEST, 0.0)

    def num_kept_by_definition(top_p: float) -> Tensor:
        border_B = lowest(by_definition, seen_BV, temperature, k, top_p, min_p)
        return (seen_BV >= border_B[:, None]).sum(dim=1)

    most_B = num_kept_by_definition(min(p * (1 + 1e-5), 1.0))
    fewest_B = num_kept_by_definition(p * (1 - 1e-5) if p < 1 else p)
    assert (kept_B >= fewest_B).all(), (kept_B, fewest_B)
    assert (kept_B <= most_B).all(), (kept_B, most_B)


def numbers(batch_size: int, vocab_size: int, width: float, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (
        torch.randn(batch_size, vocab_size, generator=generator, device=DEVICE) * width
    ).bfloat16()


FILTERS = [
    (1, 1.0, 0.0),
    (50, 1.0, 0.0),
    (10**6, 0.1, 0.0),
    (10**6, 0.95, 0.0),
    (10**6, 0.9999, 0.0),
    (10**6, 1.0, 0.02),
    (50, 0.9, 0.0),
    (1000, 1.0, 1e-3),
    (40, 0.95, 0.05),
    (10**6, 1.0, 1.0),
    (10**6, 1e-50, 0.0),  # zero in float32
]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
@pytest.mark.parametrize(("batch_size", "vocab_size"), [(1, 1), (3, 130), (2, 9001)])
def test_counting_keeps_what_the_definition_keeps(
    compiled: Any, batch_size: int, vocab_size: int, top_k: int, top_p: float, min_p: float
) -> None:
    for width, temperature in [(0.6, 1.0), (4.0, 0.7), (1.0, 5.0)]:
        logits_BV = numbers(batch_size, vocab_size, width)
        same_tokens_are_kept(compiled, logits_BV, temperature, min(top_k, vocab_size), top_p, min_p)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
@pytest.mark.parametrize("batch_size", [1, 256])
def test_counting_keeps_it_in_large_vocabularies(
    compiled: Any, batch_size: int, top_k: int, top_p: float, min_p: float
) -> None:
    rows = batch_size if DEVICE.type == "cuda" else 1
    same_tokens_are_kept(
        compiled, numbers(rows, 151936, 0.6), 1.0, min(top_k, 151936), top_p, min_p
    )


@only_on_a_cpu
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_a_cpu_keeps_it_of_float32(top_k: int, top_p: float, min_p: float) -> None:
    random = torch.Generator().manual_seed(0)
    for width in (0.6, 30.0):
        logits_BV = torch.randn(2, 9001, generator=random) * width
        same_tokens_are_kept(lowest_kept, logits_BV, 1.0, min(top_k, 9001), top_p, min_p)


@only_on_a_cpu
@pytest.mark.parametrize(("width", "temperature", "top_p"), [(5.0, 1.0, 0.9999), (1.0, 0.3, 0.999)])
def test_a_cpu_adds_up_many_small_weights(width: float, temperature: float, top_p: float) -> None:
    random = torch.Generator().manual_seed(0)
    logits_BV = torch.randn(1, 151936, generator=random) * width
    filters = (temperature, 151936, top_p, 0.0)
    kept = logits_BV >= lowest(lowest_kept, logits_BV, *filters)
    kept_by_definition = logits_BV >= lowest(by_definition, logits_BV, *filters)
    assert int(kept.sum()) == pytest.approx(int(kept_by_definition.sum()), rel=1e-3)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_the_reference_keeps_what_the_definition_keeps(
    top_k: int, top_p: float, min_p: float
) -> None:
    logits_BV = numbers(2, 9001, 2.0).float()
    same_tokens_are_kept(lowest_kept_reference, logits_BV, 1.0, min(top_k, 9001), top_p, min_p)


@pytest.mark.parametrize("column", range(9))
@pytest.mark.parametrize("vocab_size", [1, 6, 7, 8, 9, 15, 16, 17, 1000])
def test_rows_begin_and_end_anywhere(compiled: Any, vocab_size: int, column: int) -> None:
    """What lies around a row must not count."""
    wide_BV = torch.full((3, 1024), 100.0, device=DEVICE).bfloat16()
    logits_BV = wide_BV[:, column : column + vocab_size]
    logits_BV.copy_(numbers(3, vocab_size, 1.0))
    same_tokens_are_kept(compiled, logits_BV, 1.0, min(5, vocab_size), 0.9, 0.0)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3.0, 1e-30, 3e38, -3e38, math.inf, -math.inf])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_equal_logits_are_all_kept(
    compiled: Any, top_k: int, top_p: float, min_p: float, value: float
) -> None:
    logits_BV = torch.full((1, 777), value, device=DEVICE).bfloat16()
    assert (logits_BV >= lowest(compiled, logits_BV, 1.0, min(top_k, 777), top_p, min_p)).all()


@pytest.mark.parametrize("scale", [1.0, 0.125, 200.0])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_many_ties_at_the_border(
    compiled: Any, top_k: int, top_p: float, min_p: float, scale: float
) -> None:
    logits_BV = numbers(2, 3000, 2.0).round() * scale
    same_tokens_are_kept(compiled, logits_BV, 0.8 * scale, min(top_k, 3000), top_p, min_p)


def test_magnitudes_at_the_ends(counted: Any) -> None:
    values = [LARGEST, 4064.0, 1.0, 2.0**-14, SMALLEST, 2.0**-16]
    logits_BV = torch.tensor([[*values, *(-x for x in values)]], device=DEVICE).bfloat16()
    kept = [
        int((logits_BV >= lowest(counted, logits_BV, 1.0, k, 1.0, 0.0)).sum()) for k in range(1, 13)
    ]
    assert kept == [1, 2, 3, 4, 5, 7, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("top_p", [0.3, 0.999, 1.0])
def test_infinite_logits(compiled: Any, top_p: float) -> None:
    logits_BV = numbers(1, 200, 1.0)
    logits_BV[0, :50] = -math.inf
    same_tokens_are_kept(compiled, logits_BV, 1.0, 170, top_p, 0.0)
    logits_BV[0, 60:62] = math.inf
    [border] = lowest(compiled, logits_BV, 1.0, 2, top_p, 0.0).tolist()
    assert border in (LARGEST, math.inf)


def test_not_a_number_is_survived(compiled: Any) -> None:
    logits_BV = numbers(3, 100, 1.0)
    logits_BV[0] = math.nan
    logits_BV[1, 3] = math.nan
    logits_BV[2, 3] = -math.nan
    assert not lowest(compiled, logits_BV, 1.0, 5, 0.9, 0.1).isnan().any()


def test_rows_are_filtered_each_in_its_own_way(compiled: Any) -> None:
    logits_BV = numbers(5, 500, 1.0)
    logits_BV[0] = 7.0
    temperature_B = torch.tensor([0.0, 1.0, 1.0, 0.5, 1e-42], device=DEVICE)
    top_k_B = torch.tensor([5, 500, 20, 500, 3], dtype=torch.int32, device=DEVICE)
    top_p_B = torch.tensor([0.1, 1.0, 1.0, 0.5, 0.9], device=DEVICE)
    min_p_B = torch.zeros(5, device=DEVICE)
    lowest_B = compiled(logits_BV, temperature_B, top_k_B, top_p_B, min_p_B)
    expected_B = lowest_kept_reference(logits_BV.float(), temperature_B, top_k_B, top_p_B, min_p_B)
    assert lowest_B[:2].tolist() == [-math.inf] * 2
    assert torch.equal(lowest_B[2:], expected_B[2:])


def test_other_dtypes_and_devices_are_not_for_the_kernel_of_a_gpu() -> None:
    for dtype in (torch.float32, torch.float16):
        assert cuda_kernels_for(torch.empty(1, dtype=dtype, device=DEVICE)) is None
    assert cuda_kernels_for(torch.empty(1, dtype=torch.bfloat16)) is None


@pytest.mark.skipif(not find_cuda_toolkit(), reason="there is no nvcc")
def test_the_kernels_compile_for_ampere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For Hopper, test_gpu.py compiles them and looks at what they became."""
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path))
    assert native.load_cuda_kernels.__wrapped__(8, 0) is not None
