"""Options of the engine: bounds, and what auto becomes."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.engine import EngineConfig
from minisgl.errors import ConfigError
from minisgl.utils import Hardware

LAPTOP = Hardware("cpu", has_bf16=True, num_devices=0)
OLD_LAPTOP = Hardware("cpu", has_bf16=False, num_devices=0)
TWO_GPUS = Hardware("cuda", has_bf16=True, num_devices=2)
OLD_GPU = Hardware("cuda", has_bf16=False, num_devices=1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tp", 0, "--tp must be >= 1, got 0"),
        ("page_size", 0, "--page-size must be >= 1, got 0"),
        ("num_pages", -3, "--num-pages must be >= 1, got -3"),
        ("max_seq_len", 0, "--max-seq-len must be >= 1, got 0"),
        ("max_running_requests", 0, "--max-running-requests must be >= 1, got 0"),
        ("memory_ratio", 0.0, r"--memory-ratio must be in \(0, 1\], got 0.0"),
        ("memory_ratio", 1.1, r"--memory-ratio must be in \(0, 1\], got 1.1"),
        ("memory_ratio", float("nan"), r"--memory-ratio must be in \(0, 1\], got nan"),
        ("device", "tpu", "--device must be one of cpu, cuda, got 'tpu'"),
        ("dtype", "int8", "--dtype must be one of .*bfloat16.*, got 'int8'"),
        ("model_source", "ftp", "--model-source must be one of huggingface, .*, got 'ftp'"),
        ("attn", "none", "unknown attention backend 'none'; there is .*torch"),
    ],
)
def test_a_value_outside_its_bounds_is_named_with_them(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{name: value})


@pytest.mark.parametrize(
    ("hardware", "device", "dtype", "memory_ratio"),
    [
        (LAPTOP, "cpu", "bfloat16", 0.5),
        (OLD_LAPTOP, "cpu", "float32", 0.5),
        (TWO_GPUS, "cuda", "bfloat16", 0.9),
        (OLD_GPU, "cuda", "float16", 0.9),
    ],
)
def test_auto_becomes_what_fits_the_machine(hardware: Hardware, device: str, dtype: str, memory_ratio: float) -> None:
    config = EngineConfig().resolve(hardware)
    assert (config.device, config.dtype, config.memory_ratio) == (device, dtype, memory_ratio)
    assert config.attn is not None


def test_what_was_said_stays() -> None:
    said = EngineConfig(device="cpu", dtype="float16", memory_ratio=0.25, attn="torch", tp=3, page_size=3)
    assert said.resolve(TWO_GPUS) == said


@pytest.mark.parametrize(
    ("hardware", "options", "attn", "page_size"),
    [(LAPTOP, {}, "torch", 16), (TWO_GPUS, {}, "fi", 64), (TWO_GPUS, {"dtype": "float32"}, "torch", 64)],
)
def test_attention_and_pages_fit_device_and_dtype(
    hardware: Hardware, options: dict[str, Any], attn: str, page_size: int
) -> None:
    config = EngineConfig(**options).resolve(hardware)
    assert (config.attn, config.page_size) == (attn, page_size)


@pytest.mark.parametrize(("options", "what"), [({"device": "cpu"}, "cpu"), ({"dtype": "float32"}, "float32")])
def test_flashinfer_is_refused_where_it_cannot_work(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=rf"--attn fi needs a GPU and a half-precision dtype, got .*{what}"):
        EngineConfig(attn="fi", **options).resolve(TWO_GPUS)


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="--tp 4 on cuda needs 4 GPUs, 2 are there"):
        EngineConfig(tp=4).resolve(TWO_GPUS)
