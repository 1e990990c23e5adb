"""`benchmark/tune_experts.py` chooses few tiles that are fast enough, and writes what is read."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of a GPU need Triton")
import tests.kernel.interpreter  # noqa: F401 - repairs it
from minisgl.kernel import ExpertTiles, ProductTile, gpu
from minisgl.moe import ExpertShape
from minisgl.moe import fused as fused_module
from minisgl.moe import tiles as tiles_module

TUNE = Path(__file__).parents[2] / "benchmark" / "tune_experts.py"
MODELS = TUNE.parent / "models"
A, B, C = (ProductTile(rows, 128, 4, 3, 132) for rows in (32, 64, 128))


@pytest.fixture
def tune() -> ModuleType:
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("tune_experts", TUNE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["tune_experts"] = module
    spec.loader.exec_module(module)
    return module


def test_neighbours_share_tiles_that_are_within_the_tolerance(tune: ModuleType) -> None:
    """B is never the best for 64 tokens, but good enough there and at 256."""
    down = {A: 1.0}
    times = {
        16: {16: ({A: 1.0, B: 1.5}, down)},
        64: {16: ({A: 1.01, B: 1.02}, down)},
        256: {16: ({A: 2.0, B: 1.0, C: 0.99}, down)},
    }
    steps = tune.choose_steps(times, 0.02)
    assert [entry.num_tokens for entry in steps] == [64, 256]
    assert [entry.tiles.gate_up for entry in steps] == [A, C]
    assert [entry.num_tokens for entry in tune.choose_steps(times, 0.0)] == [64, 256]
    assert [entry.tiles.gate_up for entry in tune.choose_steps(times, 2.0)] == [B]


def test_both_products_take_blocks_of_one_size(tune: ModuleType) -> None:
    times = {64: {16: ({A: 1.0}, {A: 5.0}), 32: ({A: 2.0}, {B: 2.0})}}
    (entry,) = tune.choose_steps(times, 0.0)
    assert entry.tiles == ExpertTiles(32, A, B)


@pytest.mark.parametrize(
    ("num_tokens", "pairs"), [(1, [16]), (64, [16]), (256, [16, 32, 64]), (16384, [128, 256])]
)
def test_blocks_are_neither_nearly_empty_nor_filled_many_times(
    tune: ModuleType, num_tokens: int, pairs: list[int]
) -> None:
    (shape,) = tune.shapes_of(MODELS / "qwen3-30b-a3b", [1])
    assert tune.pairs_for(num_tokens, shape) == pairs


def test_shapes_are_those_of_a_rank(tune: ModuleType) -> None:
    shapes = tune.shapes_of(MODELS / "qwen3-30b-a3b", [1, 2, 4])
    assert shapes == [ExpertShape(128, 8, 2048, width, "bfloat16") for width in (768, 384, 192)]
    shapes = tune.shapes_of(MODELS / "qwen3-30b-a3b", [], [2, 4])
    assert shapes == [
        ExpertShape(64, 8, 2048, 768, "bfloat16", ep=2),
        ExpertShape(32, 8, 2048, 768, "bfloat16", ep=4),
    ]


def test_a_rank_of_several_gets_a_part_of_the_pairs(
    tune: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "DEVICE", "cpu")
    shape = ExpertShape(4, 2, 32, 16, "float32", ep=4)
    for routing_TA in tune.Layer(shape).routings(1000):
        assert routing_TA.shape == (1000, 2)
        assert set(routing_TA.unique().tolist()) == set(range(16))
        assert 400 < int((routing_TA < 4).sum()) < 600


@pytest.mark.parametrize("num_tokens", [64, 256, 16384])
def test_the_pairs_of_an_expert_do_not_depend_on_its_rank(
    tune: ModuleType, num_tokens: int
) -> None:
    whole, part = tune.shapes_of(MODELS / "qwen3-30b-a3b", [1], [4])
    assert tune.pairs_for(num_tokens, part) == tune.pairs_for(num_tokens, whole)


def seconds_on_the_host(calls: list[Callable[[], object]], repeat: int) -> float:
    began = time.perf_counter()
    calls[0]()
    return time.perf_counter() - began


@pytest.mark.parametrize("ep", [1, 2])
def test_a_file_is_written_that_the_engine_reads(
    tune: ModuleType, ep: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In Triton's interpreter, with a clock of the host."""
    if torch.cuda.is_available():
        pytest.skip("a stand-in for a GPU")
    few = [(32, 64, 4, 2), (64, 64, 4, 2)]
    monkeypatch.setattr(tune, "CANDIDATES", {16: few, 32: few})
    monkeypatch.setattr(tune, "DEVICE", "cpu")
    monkeypatch.setattr(tune, "DTYPE", torch.float32)
    monkeypatch.setattr(tune, "BY_TOKEN", (1, 2))
    monkeypatch.setattr(tune, "seconds_of", seconds_on_the_host)
    monkeypatch.setattr(tune, "TUNED_FOLDER", tmp_path)
    monkeypatch.setattr(tiles_module, "TUNED_FOLDER", tmp_path)
    monkeypatch.setattr(fused_module, "triton_kernels_for", lambda x: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    properties = argparse.Namespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(tune, "SMALL", (20, 4, 48, 16))
    assert tune.check_candidate((16, few[0], 2)) is None
    monkeypatch.setattr(tune, "MOST_ERROR", 0.0)
    fault = tune.check_candidate((16, few[0], 2))
    assert fault.startswith("16 pairs, (32, 64, 4, 2): wrong by ")

    shape = ExpertShape(4, 2, 32, 16, "float32", ep)
    args = argparse.Namespace(tokens=(9, 3), tolerance=0.1, out=tmp_path, times=tmp_path / "t")
    tune.tune(shape, args, time.monotonic() + 100)
    table = tiles_module.find_tuned_table("A GPU", shape)
    assert table is not None
    assert table.nums_of_tokens[-1] == 9
    assert table.find(9) is not None
    assert table.find(1) is None
    assert len((tmp_path / "t").read_text().splitlines()) == 16
