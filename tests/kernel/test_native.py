"""The compiled kernels of a CPU against their references in torch."""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.builds import kernels, library
from minisgl.kernel import (
    HeadNorms,
    Rotation,
    add_rms_norm,
    attend_decode,
    causal_softmax,
    choose_tokens,
    dispatch,
    kernels_for,
    look_up,
    mask_logits,
    native,
    rms_norm,
    rotate_and_store,
    scatter,
    silu_and_mul,
)
from minisgl.processes.private_folder import temporary_folder
from minisgl.utils.cuda_toolkit import CudaToolkit
from minisgl.utils.env import env_with_sys_path

DTYPES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
SIZES = [1, 3, 40, 400]  # tokens: below and above what wakes a second thread


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def both(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """The results of the compiled kernel and of the reference for one input."""
    assert native.load_cpu_kernels() is not None
    compiled = call()
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "load_cpu_kernels", lambda: None)
        return compiled, call()


def same(results: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    compiled, reference = results
    assert compiled.dtype == reference.dtype == dtype
    torch.testing.assert_close(compiled, reference, atol=DTYPES[dtype], rtol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", SIZES)
def test_norms(
    monkeypatch: pytest.MonkeyPatch, random: torch.Generator, tokens: int, dtype: torch.dtype
) -> None:
    x, residual, weight = (
        torch.randn(n, 72, generator=random).to(dtype) for n in (tokens, tokens, 1)
    )
    same(both(monkeypatch, lambda: rms_norm(x, weight[0], 1e-5)), dtype)
    same(both(monkeypatch, lambda: add_rms_norm(x, residual.clone(), weight[0], 1e-5)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [32, 130, 5000])
def test_masks(
    monkeypatch: pytest.MonkeyPatch, random: torch.Generator, vocab_size: int, dtype: torch.dtype
) -> None:
    logits_BV = torch.randn(4, vocab_size, generator=random).to(dtype)
    bits_XW = torch.randint(-(2**31), 2**31, (2, -(-vocab_size // 32)), generator=random).int()

    def masked() -> Tensor:
        result_BV = logits_BV.clone()
        mask_logits(result_BV, torch.tensor([1, -1, -1, 0], dtype=torch.int32), bits_XW)
        return result_BV

    compiled, reference = both(monkeypatch, masked)
    assert torch.equal(compiled, reference)
    assert torch.equal(compiled[1:3], logits_BV[1:3])
    assert 0 < compiled[3].isinf().sum() < vocab_size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", SIZES)
def test_silu(
    monkeypatch: pytest.MonkeyPatch, random: torch.Generator, tokens: int, dtype: torch.dtype
) -> None:
    gate, up = (torch.randn(tokens, 130, generator=random) * 20).to(dtype).chunk(2, dim=1)
    same(both(monkeypatch, lambda: silu_and_mul(gate, up)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("has_norms", [False, True])
def test_heads_are_normed_rotated_and_stored(
    monkeypatch: pytest.MonkeyPatch,
    random: torch.Generator,
    has_norms: bool,
    width: int,
    tokens: int,
    dtype: torch.dtype,
) -> None:
    qkv = torch.randn(tokens, 6 + 2 + 2, width, generator=random).to(dtype)
    rotation = Rotation(
        *torch.randn(2, 50, width, generator=random).to(dtype),
        torch.randint(50, (tokens,), generator=random, dtype=torch.int32),
    )
    weights = torch.randn(2, width, generator=random).to(dtype)
    slot_T = torch.randperm(500, generator=random)[:tokens]

    def call() -> Tensor:
        # Head first within a page, as the pool of a CPU has it.
        pools = torch.zeros(2, 125, 2, 4, width, dtype=dtype).transpose(2, 3)
        norms = HeadNorms(weights[0], weights[1], 1e-5) if has_norms else None
        rotated = qkv.clone()
        rotate_and_store(rotated, norms, rotation, slot_T, pools[0], pools[1])
        return torch.cat((rotated.flatten(), pools.flatten()))

    tolerance = 2e-5 if dtype == torch.float32 else 6e-2  # torch rounds after every operator
    compiled, reference = both(monkeypatch, call)
    torch.testing.assert_close(compiled, reference, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("width", [17, 20, 64, 128])
@pytest.mark.parametrize(
    "scores",
    [{"scale": 0.2}, {"scale": 0.3, "window": 17}, {"scale": 1.0, "softcap": 2.0}],
    ids=str,
)
def test_decodes(
    monkeypatch: pytest.MonkeyPatch,
    random: torch.Generator,
    scores: dict[str, Any],
    width: int,
    group: int,
    dtype: torch.dtype,
) -> None:
    page_size = 4
    num_kv_heads = 2
    shape = (2, 100, num_kv_heads, page_size, width)
    pool = torch.randn(shape, generator=random).to(dtype).transpose(2, 3)
    page_table = torch.randperm(100, generator=random).int().view(4, 25)
    q = torch.randn(9, group * num_kv_heads, width, generator=random).to(dtype)
    token = torch.tensor([8, 0, 3, 5], dtype=torch.int32)
    row = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    position = torch.tensor([0, 98, 41, -1], dtype=torch.int32)

    def call() -> Tensor:
        o = torch.zeros_like(q)
        attend_decode(q, pool[0], pool[1], page_table, token, row, position, o, **scores)
        return o

    same(both(monkeypatch, call), dtype)
    assert not call()[[1, 2, 4, 5, 6, 7]].any(), "rows of other tokens, or of none, were written"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 4, 16, 48])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("group", "width"), [(1, 64), (3, 96), (16, 32), (20, 128), (3, 80)])
def test_decodes_read_their_context_alone(
    monkeypatch: pytest.MonkeyPatch,
    random: torch.Generator,
    group: int,
    width: int,
    window: int | None,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    """What other positions have, also of the last page, may be anything."""
    lengths = torch.tensor([1, 15, 16, 17, 63, 64, 79, 290], dtype=torch.int32)
    num_pages = -(-300 // page_size)
    page_table = torch.randperm(8 * num_pages, generator=random).int().view(8, num_pages)
    pool = torch.full((2, page_table.numel(), 2, page_size, width), torch.nan, dtype=dtype)
    for pages, length in zip(page_table, lengths.tolist(), strict=True):
        first = max(0, length - window) if window else 0
        for position in range(first, length):
            seen = torch.randn(2, 2, width, generator=random).to(dtype)
            pool[:, pages[position // page_size], :, position % page_size] = seen
    k, v = pool.transpose(2, 3)
    q = torch.randn(8, 2 * group, width, generator=random).to(dtype)
    index = torch.arange(8, dtype=torch.int32)

    def call() -> Tensor:
        o = torch.zeros_like(q)
        attend_decode(q, k, v, page_table, index, index, lengths - 1, o, scale=0.2, window=window)
        return o

    same(both(monkeypatch, call), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decodes_find_keys_between_neighbours_elsewhere(
    monkeypatch: pytest.MonkeyPatch, random: torch.Generator, dtype: torch.dtype
) -> None:
    """The first and the last of 16 keys lie as if all did so side by side."""
    k, v = torch.randn(2, 32, 1, 1, 64, generator=random).to(dtype)
    q = torch.randn(1, 3, 64, generator=random).to(dtype)
    page_table = torch.arange(32, dtype=torch.int32)[None]
    page_table[0, 3:12] = page_table[0, 3:12].flip(0)
    page_table[0, 5] = 30
    zero = torch.zeros(1, dtype=torch.int32)

    def call() -> Tensor:
        o = torch.zeros_like(q)
        attend_decode(q, k, v, page_table, zero, zero, zero + 15, o, scale=0.2)
        return o

    same(both(monkeypatch, call), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_decodes_are_rounded_both_ways(
    random: torch.Generator, dtype: torch.dtype
) -> None:
    k = torch.randn(125, 16, 1, 64, generator=random).to(dtype)
    v = torch.ones_like(k)
    q = torch.randn(1, 3, 64, generator=random).to(dtype)
    o = torch.zeros_like(q)
    page_table = torch.arange(125, dtype=torch.int32)[None]
    zero = torch.zeros(1, dtype=torch.int32)
    attend_decode(q, k, v, page_table, zero, zero, zero + 1999, o, scale=0.1)
    torch.testing.assert_close(o, torch.ones_like(o), atol=2e-3, rtol=0)


@pytest.fixture(params=[1, 2, 3, 7])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """So many threads for the kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[700, 0, 0, 0], [0, 0], [1, 900, 0]], ids=str)
def test_nothing_is_written_for_missing_decodes(
    monkeypatch: pytest.MonkeyPatch, random: torch.Generator, lengths: list[int], dtype: torch.dtype
) -> None:
    length_B = torch.tensor(lengths, dtype=torch.int32)
    page_table = torch.arange(4 * 60).int().view(4, 60)
    k, v = torch.randn(2, 4 * 60, 2, 16, 32, generator=random).to(dtype).transpose(2, 3)
    q = torch.randn(len(lengths), 6, 32, generator=random).to(dtype)
    index = torch.arange(len(lengths), dtype=torch.int32)

    def call() -> Tensor:
        o = torch.full_like(q, 7)
        attend_decode(q, k, v, page_table, index, index, length_B - 1, o, scale=0.5)
        return o

    same(both(monkeypatch, call), dtype)
    assert (call()[length_B == 0] == 7).all()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 300, 1000])
def test_decodes_of_long_contexts_depend_neither_on_each_other_nor_on_threads(
    monkeypatch: pytest.MonkeyPatch,
    random: torch.Generator,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    """A context is cut into ranges of up to 256 keys, which threads share."""
    lengths = torch.tensor([2000, 1, 64, 255, 256, 257, 700, 321], dtype=torch.int32)
    num_pages = -(-2000 // 16)
    page_table = torch.randperm(8 * num_pages, generator=random).int().view(8, num_pages)
    shape = (2, page_table.numel(), 2, 16, 32)
    k, v = torch.randn(shape, generator=random).to(dtype).transpose(2, 3)
    q = torch.randn(8, 6, 32, generator=random).to(dtype)

    def attended(index: Tensor) -> Tensor:
        o = torch.zeros_like(q)
        attend_decode(
            q, k, v, page_table, index, index, lengths[index] - 1, o, scale=0.5, window=window
        )
        return o[index]

    index = torch.arange(8, dtype=torch.int32)
    compiled, reference = both(monkeypatch, lambda: attended(index))
    same((compiled, reference), dtype)
    torch.set_num_threads(1)
    for one in index.split(1):
        assert torch.equal(attended(one), compiled[one])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 4, 150])
@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 5), (7, 3), (100, 128)])
def test_causal_softmax(
    monkeypatch: pytest.MonkeyPatch,
    random: torch.Generator,
    start: int,
    length: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    score = (torch.randn(2, 3 * length, start + length, generator=random) * 30).to(dtype)

    def call() -> Tensor:
        weight = score.clone()
        causal_softmax(weight, start, length, 0.3, window)
        return weight

    same(both(monkeypatch, call), dtype)
    visible = call().unflatten(1, (3, length)) > 0
    assert not visible.triu(start + 1).any()
    assert not visible.tril(start - (window or start + length)).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 1024, 1025, 5000])
def test_greedy_tokens(
    monkeypatch: pytest.MonkeyPatch, random: torch.Generator, vocab_size: int, dtype: torch.dtype
) -> None:
    logits_BV = torch.randint(-50, 50, (5, vocab_size), generator=random).to(dtype)  # many ties
    logits_BV[1] = -torch.inf
    logits_BV[2] = torch.nan
    logits_BV[3, vocab_size // 2] = torch.inf
    logits_BV[4, -1] = 60
    greedy_B = torch.zeros(5)
    numbers_B2 = torch.zeros(5, 2, dtype=torch.int32)

    def chosen() -> Tensor:
        return choose_tokens(logits_BV, None, greedy_B, numbers_B2, numbers_B2[:, 0])

    compiled, reference = both(monkeypatch, chosen)
    assert compiled.dtype == reference.dtype == torch.int32
    assert torch.equal(compiled, reference)


def test_tables(monkeypatch: pytest.MonkeyPatch, random: torch.Generator) -> None:
    row_T = torch.randint(3, (50,), generator=random).int()
    position_T = torch.randint(20, (50,), generator=random).int()
    page_table_RP = torch.randint(1000, (3, 5), generator=random).int()
    index_Z = torch.randperm(60, generator=random)[:17].int()

    def call() -> Tensor:
        token_pool_RL = torch.zeros(3, 20, dtype=torch.int32)
        scatter(token_pool_RL, index_Z, index_Z - 30)
        looked_up = look_up(row_T, position_T, token_pool_RL, page_table_RP, 4)
        return torch.cat([token_pool_RL.flatten(), *looked_up])

    compiled, reference = both(monkeypatch, call)
    assert torch.equal(compiled, reference)
    assert (compiled[:60] >= 0).all(), "the pool has tokens only"


def test_other_dtypes_and_devices_are_left_to_the_reference() -> None:
    assert kernels_for(torch.empty(1, dtype=torch.float16)) is None
    assert kernels_for(torch.empty(1, device="meta")) is None
    assert torch.equal(
        rms_norm(torch.ones(1, 4).half(), torch.ones(4).half(), 0.0), torch.ones(1, 4).half()
    )


@pytest.mark.parametrize(
    ("load", "compiler"),
    [
        (native.load_cpu_kernels.__wrapped__, "c++"),
        (partial(native.load_cuda_kernels.__wrapped__, 9, 0), "nvcc"),
    ],
)
def test_without_a_compiler_the_reference_is_used_and_a_warning_names_the_compiler(
    load: Callable[[], object],
    compiler: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(kernels, "find_cuda_toolkit", lambda: CudaToolkit(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert load() is None
    assert f"{compiler}'" in caplog.text


def test_a_compiler_that_fails_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "bin" / "c++"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho what flag is this >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{broken.parent}:/usr/bin:/bin")
    with caplog.at_level(logging.WARNING):
        assert native.load_cpu_kernels.__wrapped__() is None
    assert "what flag is this" in caplog.text
    assert not libraries(tmp_path)


@pytest.fixture
def fake_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A compiler that makes files, and a loader that reads them: what was loaded, in order."""
    loaded: list[str] = []

    def compile_(stages: list[list[list[str]]], folder: Path) -> None:
        (folder / stages[-1][0][-1]).write_text("compiled")

    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "run_compilers", compile_)
    monkeypatch.setattr(
        native.tvm_ffi, "load_module", lambda path: loaded.append(Path(path).read_text())
    )
    return loaded


def libraries(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "kernels").glob("*.so"))


def load_again() -> None:
    native.load_cpu_kernels.__wrapped__()


def test_a_compiled_kernel_is_kept_in_a_folder_that_is_ours(
    fake_compiler: list[str], tmp_path: Path
) -> None:
    load_again()
    folder = tmp_path / "cache" / "kernels"
    assert folder.stat().st_mode & 0o777 == 0o700
    (kept,) = libraries(tmp_path)
    kept.write_text("kept")
    load_again()
    assert fake_compiler == ["compiled", "kept"]


@pytest.mark.parametrize("kind", ["writable", "link"])
def test_a_library_that_others_can_write_is_compiled_anew(
    kind: str, fake_compiler: list[str], tmp_path: Path
) -> None:
    load_again()
    (kept,) = libraries(tmp_path)
    if kind == "link":
        kept.unlink()
        kept.symlink_to(tmp_path / "foreign")
        (tmp_path / "foreign").write_text("foreign")
    else:
        kept.write_text("foreign")
        kept.chmod(0o777)
    load_again()
    assert fake_compiler == ["compiled", "compiled"]


def test_in_a_cache_folder_that_others_can_write_nothing_is_kept_or_loaded(
    fake_compiler: list[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    load_again()
    cache = tmp_path / "cache"
    (kept,) = libraries(tmp_path)
    kept.write_text("foreign")
    cache.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        load_again()
    assert fake_compiler == ["compiled", "compiled"]
    assert f"compiled kernels are not kept: {cache}, above {cache / 'kernels'}" in caplog.text


KILLED = """
import os, signal
from minisgl.kernel import native

with native._library_folder() as folder:
    (folder / "scratch").mkdir()
    (folder / "scratch" / "made.so").touch()
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_has_compiled_for_itself_goes_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o777)  # nothing is kept in a cache that others can write
    env = {**env_with_sys_path(), "TMPDIR": str(tmp_path), "MINISGL_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", KILLED], check=False, stdout=subprocess.PIPE, env=env, text=True
    )
    left = Path(done.stdout.strip())
    assert (left / "scratch" / "made.so").exists()
    with temporary_folder():
        pass
    assert not left.exists()


def test_without_a_cuda_toolkit_only_kernels_that_are_kept_are_used(
    fake_compiler: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(kernels, "find_cuda_toolkit", lambda: None)
    with caplog.at_level(logging.WARNING):
        assert native.load_cuda_kernels.__wrapped__(9, 0) is None
        assert not native.can_load_cuda_kernels.__wrapped__(9, 0)
    assert not fake_compiler
    assert not caplog.text  # the engine says it, once for all kernels
    monkeypatch.setattr(kernels, "find_cuda_toolkit", lambda: CudaToolkit(tmp_path))
    assert native.can_load_cuda_kernels.__wrapped__(9, 0)
    native.load_cuda_kernels.__wrapped__(9, 0)
    monkeypatch.setattr(kernels, "find_cuda_toolkit", lambda: None)
    assert native.can_load_cuda_kernels.__wrapped__(9, 0)
    native.load_cuda_kernels.__wrapped__(9, 0)
    assert fake_compiler == ["compiled", "compiled"]
