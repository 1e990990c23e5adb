"""Files of models that were damaged on purpose or not: each loads, or is refused by name."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.checkpoint.files import MAX_CONFIG_BYTES, read_json
from minisgl.checkpoint.gguf_header import check_gguf_header
from minisgl.errors import CheckpointError
from minisgl.models.safetensors_files import SafetensorsCheckpoint
from minisgl.tokenizer import Tokenizer
from tests.checkpoint.gguf_files import saved_weights, write_gguf
from tests.checkpoints import tiny_model

COUNTS = {
    "safetensors": 150,
    "index": 60,
    "config": 150,
    "generation config": 40,
    "tokenizer": 60,
    "tokenizer config": 40,
    "gguf": 120,
}
ROOT = Path(__file__).parents[2]


def folder_for(kind: str, checkpoint: Callable[[str], Path], scratch: Path) -> Path:
    if kind == "index":
        return checkpoint("mistral")
    if kind == "gguf":
        weights = saved_weights(checkpoint("llama"))
        return write_gguf(scratch / "model.gguf", tiny_model("llama"), weights).parent
    return checkpoint("llama")


@pytest.fixture(scope="module")
def outcomes(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """The lines about each kind. One program does all, because it takes seconds to import."""
    arguments = []
    scratch = {kind: tmp_path_factory.mktemp("hostile") for kind in COUNTS}
    for kind, count in COUNTS.items():
        source = scratch[kind] / "source"
        source.mkdir()
        folder = folder_for(kind, checkpoint, source)
        arguments += [kind, str(folder), str(scratch[kind]), "0", str(count)]
    program = [sys.executable, "-m", "tests.checkpoint.hostile_files", *arguments]
    done = subprocess.run(
        program, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {kind: (scratch[kind] / "outcomes").read_text().splitlines() for kind in COUNTS}


@pytest.mark.parametrize("kind", COUNTS)
def test_damaged_files_load_or_are_refused(kind: str, outcomes: dict[str, list[str]]) -> None:
    """Within bounded memory and time, and never by another error or a crash."""
    lines = [json.loads(line) for line in outcomes[kind][:-1] if line.startswith("[")]
    assert outcomes[kind][-1] == "0", lines[-1:]
    assert lines[0] == ["intact", "loaded"]
    seen = [(name, what) for name, what in lines[1:] if what != "begun"]
    wrong = [(name, what) for name, what in seen if what not in ("loaded", "refused")]
    assert wrong == []
    assert len(seen) == COUNTS[kind]
    assert Counter(what for _, what in seen)["refused"] > COUNTS[kind] // 10


def safetensors_file(folder: Path, header: dict[str, Any], num_bytes: int) -> Path:
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_bytes))
    return path


def tensor(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": tensor(0, 16, [4]), "b": tensor(8, 24, [4])},
        {"a": tensor(0, 16, [4]), "b": tensor(20, 24, [1])},
        {"a": tensor(0, 24, [6]), "b": tensor(24, 32, [2])},
        {"a": tensor(0, 20, [5])},
        {"a": tensor(0, 24, [5])},
        {"a": tensor(0, 24, [2**62, 2**62])},
        {"a": tensor(0, 24, [6], "F33")},
        {"a": tensor(24, 0, [6])},
        {"a": tensor(0, 24, [-6])},
    ],
    ids=["overlap", "gap", "outside", "rest", "size", "overflow", "dtype", "backwards", "negative"],
)
def test_ranges_in_a_safetensors_file_fit_it(header: dict[str, Any], tmp_path: Path) -> None:
    path = safetensors_file(tmp_path, header, 24)
    with pytest.raises(CheckpointError, match=str(path)):
        SafetensorsCheckpoint(tmp_path, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("size", [100_000_001, 2**40, 2**64 - 1])
def test_a_safetensors_header_has_a_bounded_size(size: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", size) + b"{}")
        file.truncate(110_000_000)  # without blocks on the disk
    with pytest.raises(CheckpointError, match=str(path)):
        SafetensorsCheckpoint(tmp_path, torch.float32, torch.device("cpu"))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def number_field(name: str, value: int) -> bytes:
    return text(name) + struct.pack("<II", 4, value)


def gguf_tensor(name: str, shape: list[int], start: int, kind: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, start)


def gguf_file(folder: Path, fields: list[bytes], tensors: list[bytes], **counts: int) -> Path:
    """A file with 256 bytes of tensors."""
    num_tensors = counts.get("num_tensors", len(tensors))
    num_fields = counts.get("num_fields", len(fields))
    header = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields) + b"".join(fields + tensors)
    path = folder / "one.gguf"
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(256))
    return path


STRINGS = struct.pack("<II", 9, 8)
ARRAYS = struct.pack("<II", 9, 9)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"num_fields": 2**63}, "has 9223372036854775808 fields"),
        ({"num_tensors": 2**40}, "has 1099511627776 tensors"),
        ({"fields": [struct.pack("<Q", 2**60)]}, "bytes in a name"),
        ({"fields": [text("a") + struct.pack("<IQ", 8, 2**63)]}, "beyond the end"),
        ({"fields": [text("a") + STRINGS + struct.pack("<Q", 2**33)]}, "items up to"),
        ({"fields": [text("a") + STRINGS + struct.pack("<Q", 2**19)] * 3}, "beyond the end"),
        ({"fields": [text("a") + ARRAYS + struct.pack("<Q", 1)]}, "array of arrays"),
        ({"fields": [text("a") + struct.pack("<I", 13)]}, "has the type 13"),
        ({"fields": [number_field("general.alignment", 0)]}, "power of two, got 0"),
        ({"fields": [number_field("general.alignment", 48)]}, "power of two, got 48"),
        ({"tensors": [gguf_tensor("a", [65], 0)]}, "'a' reaches beyond the end"),
        ({"tensors": [gguf_tensor("a", [1], 2**40)]}, "'a' reaches beyond the end"),
        ({"tensors": [gguf_tensor("a", [2**63, 2**63], 0)]}, "'a' reaches beyond the end"),
        ({"tensors": [gguf_tensor("a", [1], 4)]}, "not aligned"),
        ({"tensors": [gguf_tensor("a", [16], 0), gguf_tensor("b", [1], 32)]}, "within another"),
        ({"tensors": [gguf_tensor("a", [1], 0), gguf_tensor("a", [1], 32)]}, "one name"),
        ({"tensors": [gguf_tensor("a", [0, 2**60], 0)]}, "cannot have the shape"),
        ({"tensors": [gguf_tensor("a", [], 0)]}, "cannot have the shape"),
        ({"tensors": [gguf_tensor("a", [33], 0, kind=8)]}, "cannot have the shape"),
        ({"tensors": [gguf_tensor("a", [1], 0, kind=99)]}, "99 is not a valid"),
        ({"tensors": [gguf_tensor("a", [1] * 5, 0)]}, "5 dimensions"),
    ],
)
def test_numbers_in_a_gguf_header_have_bounds(
    content: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = gguf_file(tmp_path, **{"fields": [], "tensors": [], **content})
    with pytest.raises(CheckpointError, match=reason):
        check_gguf_header(path)


def test_a_gguf_header_within_its_bounds_is_taken(tmp_path: Path) -> None:
    fields = [number_field("general.alignment", 64), number_field("a", 2**32 - 1)]
    tensors = [gguf_tensor("b", [32], 64), gguf_tensor("a", [16], 0)]
    check_gguf_header(gguf_file(tmp_path, fields, tensors))


def test_small_files_have_a_bounded_size(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=r"config\.json has 1099511627776 bytes"):
        read_json(path, MAX_CONFIG_BYTES)
    path.rename(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has 1099511627776 bytes"):
        Tokenizer(tmp_path)
