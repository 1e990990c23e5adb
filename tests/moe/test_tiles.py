"""Which tiles steps take: those of a file that fits device and shape, or those of the rule."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from minisgl.checkpoint import ModelConfig
from minisgl.distributed import DistributedInfo
from minisgl.errors import ConfigError
from minisgl.kernel import ExpertTiles, ProductTile, moe_reference
from minisgl.moe import (
    ExpertShape,
    FusedMoeBackend,
    TiledSteps,
    TileTable,
    create_moe_backend,
    expert_shape,
    find_tuned_table,
    rule_table,
    tuned_path,
    write_tuned_table,
)
from minisgl.moe import tiles as tiles_module
from minisgl.moe.tiles import TUNED_FOLDER

SHAPE = ExpertShape(16, 4, 64, 32, "bfloat16")
DEVICE = "NVIDIA GPU 80GB"
TILE = ProductTile(64, 128, 4, 3, 132)
FEW = ExpertTiles(16, TILE, TILE)
MANY = ExpertTiles(128, TILE, TILE)
STEPS = (TiledSteps(16, FEW), TiledSteps(1024, MANY))
SHIPPED = sorted(TUNED_FOLDER.rglob("*.json"))


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file that was written for SHAPE on DEVICE."""
    monkeypatch.setattr(tiles_module, "TUNED_FOLDER", tmp_path)
    path = tuned_path(DEVICE, SHAPE)
    write_tuned_table(path, DEVICE, SHAPE, STEPS, 2, {"commit": "1234567"})
    return path


@pytest.mark.usefixtures("path")
def test_what_was_written_is_found() -> None:
    assert find_tuned_table(DEVICE, SHAPE) == TileTable(2, STEPS)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("field", ["num_experts", "each", "width", "mlp_width", "ep"])
def test_other_shapes_and_devices_have_no_tiles(field: str) -> None:
    other = msgspec.structs.replace(SHAPE, **{field: getattr(SHAPE, field) * 2})
    assert find_tuned_table(DEVICE, other) is None
    assert find_tuned_table(DEVICE, msgspec.structs.replace(SHAPE, dtype="float16")) is None
    assert find_tuned_table("NVIDIA GPU", SHAPE) is None


def model(num_experts: int) -> ModelConfig:
    folder = Path(__file__).parents[2] / "benchmark" / "models" / "qwen3-30b-a3b"
    return replace(ModelConfig.from_folder(folder), num_experts=num_experts)


def test_a_rank_has_a_part_of_each_expert_or_with_ep_whole_ones() -> None:
    bf16 = torch.bfloat16
    by_width = expert_shape(model(128), DistributedInfo(1, 4), bf16)
    by_expert = expert_shape(model(128), DistributedInfo(1, 4, ep=True), bf16)
    assert by_width == ExpertShape(128, 8, 2048, 192, "bfloat16")
    assert by_expert == ExpertShape(32, 8, 2048, 768, "bfloat16", ep=4)
    assert by_expert.file_name == "e32-ep4-a8-d2048-f768-bfloat16.json"
    assert expert_shape(model(0), DistributedInfo(1, 4, ep=True), bf16) is None


def test_the_rule_counts_the_pairs_that_experts_of_all_ranks_have() -> None:
    """A rank with 32 of 128 experts takes the tiles of one with all 128."""
    assert FusedMoeBackend(None, ep=4)._table(32, 8) == rule_table(128, 8)
    whole = FusedMoeBackend().nums_of_tokens(128, 8)
    assert FusedMoeBackend(None, ep=4).nums_of_tokens(32, 8) == whole


def test_a_file_that_was_renamed_is_refused(path: Path) -> None:
    other = msgspec.structs.replace(SHAPE, num_experts=8)
    path.rename(tuned_path(DEVICE, other))
    with pytest.raises(ConfigError, match=r"tiles for e16-a4-.* on .*, and not for e8-a4-"):
        find_tuned_table(DEVICE, other)


def test_a_file_of_another_device_is_refused(path: Path) -> None:
    moved = tuned_path("Another GPU", SHAPE)
    moved.parent.mkdir()
    path.rename(moved)
    with pytest.raises(ConfigError, match=f"on {DEVICE}, and not for .* on Another GPU"):
        find_tuned_table("Another GPU", SHAPE)


def damaged(content: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The content with a fault in each place, and what the error says of it."""
    table = content["table"]
    entry = table["steps"][0]
    tiles = entry["tiles"]
    for change, fault in (
        ({"pairs": 24}, "pairs is 24, which is no power of two"),
        ({"pairs": 8}, "pairs"),
        ({"gate_up": {**tiles["gate_up"], "rows": 96}}, "rows is 96"),
        ({"gate_up": {**tiles["gate_up"], "num_warps": 0}}, "num_warps"),
        ({"down": {**tiles["down"], "more": 1}}, "more"),
        ({"down": None}, "down"),
    ):
        steps = [{**entry, "tiles": {**tiles, **change}}]
        yield {**content, "table": {**table, "steps": steps}}, fault
    yield {**content, "table": {**table, "steps": []}}, "do not ascend"
    yield {**content, "table": {**table, "steps": [entry, entry]}}, "do not ascend"
    yield {**content, "table": {**table, "most_by_token": 16}}, "do not ascend"
    yield {**content, "extra": 1}, "extra"
    yield {"device": DEVICE}, "shape"


def test_a_damaged_file_is_refused_by_name(path: Path) -> None:
    whole = path.read_bytes()
    for content, fault in damaged(json.loads(whole)):
        path.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=f"{path.name} has no tiles of experts: .*{fault}"):
            find_tuned_table(DEVICE, SHAPE)
    for content in (b"", whole[:-9], b"[1]", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"{path.name} has no tiles of experts"):
            find_tuned_table(DEVICE, SHAPE)


def test_a_step_takes_the_tiles_of_the_next_larger_number_of_tokens() -> None:
    table = TileTable(2, STEPS)
    assert [table.find(n) for n in (1, 2)] == [None, None]
    assert [table.find(n) for n in (3, 16)] == [FEW, FEW]
    assert [table.find(n) for n in (17, 1024, 5000)] == [MANY, MANY, MANY]
    assert table.nums_of_tokens == [1, 16, 1024]
    assert TileTable(0, STEPS).find(1) == FEW


@pytest.mark.parametrize(("num_experts", "each"), [(16, 4), (128, 8), (512, 10), (60, 4), (5, 5)])
def test_some_numbers_of_tokens_take_every_tile_of_the_rule(num_experts: int, each: int) -> None:
    table = rule_table(num_experts, each)
    every = {table.find(num_tokens) for num_tokens in range(1, 200 * num_experts)}
    assert {table.find(num_tokens) for num_tokens in table.nums_of_tokens} == every
    assert table.find(4) is None
    assert table.find(200 * num_experts) == tiles_module._LARGEST_TILES


@pytest.mark.usefixtures("path")
def test_the_backend_of_a_gpu_takes_the_tiles_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: DEVICE)
    cuda = torch.device("cuda", 1)
    tuned = create_moe_backend(cuda, torch.bfloat16, SHAPE)
    ruled = create_moe_backend(cuda, torch.bfloat16, msgspec.structs.replace(SHAPE, width=128))
    assert isinstance(tuned, FusedMoeBackend)
    assert isinstance(ruled, FusedMoeBackend)
    by_expert = create_moe_backend(cuda, torch.bfloat16, msgspec.structs.replace(SHAPE, ep=2))
    assert isinstance(by_expert, FusedMoeBackend)
    assert by_expert._table(16, 4) == rule_table(32, 4)
    assert tuned._table(16, 4) == TileTable(2, STEPS)
    assert ruled._table(16, 4) == rule_table(16, 4)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_shipped_file_is_for_the_device_and_the_shape_of_its_name(path: Path) -> None:
    """And its tiles multiply as the reference does: in Triton's interpreter, a few tokens."""
    tuned = msgspec.json.decode(path.read_bytes(), type=tiles_module._TunedFile)
    assert tuned_path(tuned.device, tuned.shape) == path
    table = find_tuned_table(tuned.device, tuned.shape)
    assert table is not None

    pytest.importorskip("triton", reason="the kernels of a GPU need Triton")
    from tests.kernel.harness import DEVICE, DOT_DTYPES, numbers, same

    gpu = pytest.importorskip("minisgl.kernel.gpu")
    dtype = DOT_DTYPES[-1]
    random = torch.Generator(DEVICE).manual_seed(0)
    x_TD = numbers(random, 9, 80, dtype=dtype)
    gate_up_EUD = numbers(random, 3, 96, 80, dtype=dtype) / 80**0.5
    down_EDF = numbers(random, 3, 80, 48, dtype=dtype) / 48**0.5
    weight_TA, expert_TA = torch.rand(9, 3, generator=random, device=DEVICE).topk(2)
    inputs = (x_TD, gate_up_EUD, down_EDF, weight_TA.to(dtype))
    wide = moe_reference(*(x.float() for x in inputs), expert_TA)
    for tiles in {entry.tiles for entry in table.steps}:
        y_TD = torch.full_like(x_TD, torch.nan)
        gpu.moe_by_expert(*inputs, expert_TA.int(), y_TD, tiles)
        same(y_TD, wide.to(dtype))


def test_the_shipped_files_travel_with_the_package() -> None:
    """What setuptools takes along is listed; a folder that it does not know stays behind."""
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"moe/tuned/*/*.json"' in pyproject
    assert all(path.parent.parent == TUNED_FOLDER for path in SHIPPED)
