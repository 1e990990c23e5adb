"""Options of engine and scheduler: bounds, and what auto becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl.attention import ATTENTION_BACKENDS
from minisgl.config import (
    ATTENTION_BACKEND_NAMES,
    COMM_NAMES,
    PREFIX_CACHE_NAMES,
    EngineConfig,
    SchedulerConfig,
)
from minisgl.errors import ConfigError
from minisgl.kvcache import PREFIX_CACHES
from minisgl.sampling_params import MAX_SEED, MIN_SEED
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
        ("device", "tpu", "--device must be one of auto, cpu, cuda, got 'tpu'"),
        ("dtype", "int8", "--dtype must be one of .*bfloat16.*, got 'int8'"),
        ("model_source", "ftp", "--model-source must be one of huggingface, .*, got 'ftp'"),
        ("attn", "none", "--attn must be of .*torch.*, got 'none'"),
        (
            "attn",
            "fa,fi,fa",
            "--attn takes one backend, or one for prompts and one for decodes, got 'fa,fi,fa'",
        ),
        ("cache", "lru", "--cache must be one of naive, radix, got 'lru'"),
        ("max_prefill_length", 0, "--max-prefill-length must be >= 1, got 0"),
    ],
)
def test_a_value_outside_its_bounds_is_named_with_them(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**{name: value})


@pytest.mark.parametrize(
    ("seed", "bound"), [(MAX_SEED + 1, f"<= {MAX_SEED}"), (MIN_SEED - 1, f">= {MIN_SEED}")]
)
def test_a_seed_has_the_bounds_of_those_of_requests(seed: int, bound: str) -> None:
    for allowed in (MIN_SEED, MAX_SEED):
        assert SchedulerConfig(seed=allowed).seed == allowed
    with pytest.raises(ConfigError, match=f"--seed must be {bound}, got {seed}"):
        SchedulerConfig(seed=seed)


def test_a_bound_that_is_no_time_is_refused() -> None:
    for value in (-1.0, float("inf"), float("nan")):
        with pytest.raises(
            ConfigError, match=f"--target-itl-ms must be finite and >= 0, got {value}"
        ):
            SchedulerConfig(target_itl_ms=value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "x" * 10**5),
        ("attn", "x" * 10**5),
        ("attn", "x,x," * 10**5),
        ("tp", "x" * 10**5),
        ("tp", -(10**5000)),
    ],
    ids=["word", "backend", "backends", "type", "bound"],
)
def test_a_long_value_is_cut_where_it_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"--{name} .*got ") as refusal:
        SchedulerConfig(**{name: value})
    assert len(str(refusal.value)) < 500


def test_the_names_that_are_offered_are_those_that_there_are() -> None:
    assert sorted(ATTENTION_BACKEND_NAMES) == sorted(ATTENTION_BACKENDS)
    assert sorted(PREFIX_CACHE_NAMES) == sorted(PREFIX_CACHES)


@pytest.mark.parametrize(
    ("hardware", "device", "dtype", "memory_ratio", "max_prefill_length"),
    [
        (LAPTOP, "cpu", "bfloat16", 0.5, 512),
        (OLD_LAPTOP, "cpu", "float32", 0.5, 512),
        (TWO_GPUS, "cuda", "bfloat16", 0.9, 8192),
        (OLD_GPU, "cuda", "float16", 0.9, 8192),
    ],
)
def test_auto_becomes_what_fits_the_machine(
    hardware: Hardware, device: str, dtype: str, memory_ratio: float, max_prefill_length: int
) -> None:
    config = EngineConfig().resolve(hardware)
    assert (config.device, config.dtype, config.memory_ratio) == (device, dtype, memory_ratio)
    assert config.max_prefill_length == max_prefill_length


def test_what_was_said_stays() -> None:
    said = EngineConfig(
        device="cpu",
        dtype="float16",
        memory_ratio=0.25,
        attn="torch",
        tp=3,
        page_size=3,
        max_prefill_length=7,
    )
    assert said.resolve(TWO_GPUS) == said


@pytest.mark.parametrize(
    ("hardware", "options", "attn", "page_size"),
    [
        (LAPTOP, {}, "torch", 16),
        (TWO_GPUS, {}, None, 64),
        (TWO_GPUS, {"dtype": "float32"}, "triton", 64),
        (TWO_GPUS, {"dtype": "float32", "device": "cpu"}, "torch", 16),
        (TWO_GPUS, {"dtype": "float32", "attn": "torch"}, "torch", 64),
    ],
)
def test_attention_and_pages_fit_device_and_dtype(
    hardware: Hardware, options: dict[str, Any], attn: str | None, page_size: int
) -> None:
    config = EngineConfig(**options).resolve(hardware)
    assert (config.attn, config.page_size) == (attn, page_size)


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({"attn": "fi", "device": "cpu"}, "a GPU, got cpu"),
        ({"attn": "triton", "device": "cpu"}, "a GPU, got cpu"),
        ({"attn": "torch,triton", "device": "cpu"}, "a GPU, got cpu"),
        ({"attn": "fi", "dtype": "float32"}, "a half-precision dtype, got float32"),
        ({"attn": "triton,fi", "dtype": "float32"}, "a half-precision dtype, got float32"),
    ],
)
def test_attention_is_refused_where_it_cannot_work(options: dict[str, Any], needs: str) -> None:
    with pytest.raises(ConfigError, match=f"--attn {options['attn']} needs {needs}"):
        EngineConfig(**options).resolve(TWO_GPUS)


@pytest.mark.parametrize("comm", COMM_NAMES)
def test_what_adds_up_on_gpus_is_refused_on_a_cpu(comm: str) -> None:
    assert EngineConfig(comm=comm).resolve(TWO_GPUS).comm == comm
    with pytest.raises(ConfigError, match=f"--comm {comm} needs GPUs, got cpu"):
        EngineConfig(comm=comm, device="cpu").resolve(TWO_GPUS)


def test_whole_experts_for_one_rank_are_refused() -> None:
    assert EngineConfig(ep=True, tp=2).resolve(LAPTOP).ep
    with pytest.raises(ConfigError, match="--ep needs --tp to be >= 2, got 1"):
        EngineConfig(ep=True)


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="--tp 4 on cuda needs 4 GPUs, 2 are there"):
        EngineConfig(tp=4).resolve(TWO_GPUS)


@pytest.mark.parametrize(
    ("hardware", "options", "most"),
    [(LAPTOP, {}, 160), (TWO_GPUS, {}, 640), (TWO_GPUS, {"page_size": 3}, 30)],
)
def test_a_length_that_the_pages_cannot_hold_is_refused(
    hardware: Hardware, options: dict[str, int], most: int
) -> None:
    fitting = EngineConfig(num_pages=10, max_seq_len=most, **options)
    assert fitting.resolve(hardware).max_seq_len == most
    page_size = most // 10
    pages = f"--num-pages 10 of {page_size} tokens"
    with pytest.raises(
        ConfigError, match=rf"--max-seq-len must be <= {most} \({pages}\), got {most + 1}"
    ):
        EngineConfig(num_pages=10, max_seq_len=most + 1, **options).resolve(hardware)


def test_the_length_of_the_model_itself_may_be_more_than_the_pages_hold() -> None:
    assert EngineConfig(num_pages=1).resolve(LAPTOP).max_seq_len is None


def test_overlap_is_on_for_gpus_unless_it_is_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MINISGL_DISABLE_OVERLAP_SCHEDULING", raising=False)

    assert SchedulerConfig().resolve(TWO_GPUS).overlap is True
    assert SchedulerConfig().resolve(LAPTOP).overlap is False
    assert SchedulerConfig(overlap=True).resolve(LAPTOP).overlap is True
    assert SchedulerConfig(overlap=False).resolve(TWO_GPUS).overlap is False


@pytest.mark.parametrize(
    ("value", "overlap"),
    [
        *((word, False) for word in ("1", "true", "yes", "on", "True")),
        *((word, True) for word in ("0", "false", "no", "off", "NO", "")),
    ],
)
def test_the_environment_can_switch_overlap_off(
    monkeypatch: pytest.MonkeyPatch, value: str, overlap: bool
) -> None:
    monkeypatch.setenv("MINISGL_DISABLE_OVERLAP_SCHEDULING", value)

    assert SchedulerConfig().resolve(TWO_GPUS).overlap is overlap


@pytest.mark.parametrize("value", ["maybe", " ", "2", "x" * 10**5], ids=lambda value: value[:5])
def test_what_is_neither_yes_nor_no_is_refused_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("MINISGL_DISABLE_OVERLAP_SCHEDULING", value)

    words = "1, true, yes, on, 0, false, no, off"
    expected = f"MINISGL_DISABLE_OVERLAP_SCHEDULING must be one of {words}, got '{value[:30]}"
    for hardware in (TWO_GPUS, LAPTOP):
        with pytest.raises(ConfigError, match=expected) as refusal:
            SchedulerConfig().resolve(hardware)
        assert len(str(refusal.value)) < 500


def test_ranks_that_agreed_resolve_to_the_same() -> None:
    fixed = SchedulerConfig(model="a/hub-id").fix_for_ranks(Path("/folder"))

    assert fixed.model == "/folder"
    assert fixed.resolve(LAPTOP) == fixed.resolve(LAPTOP) == fixed.resolve(LAPTOP).resolve(LAPTOP)


def test_a_seed_is_drawn_if_none_is_given() -> None:
    drawn = {SchedulerConfig().fix_for_ranks(Path()).seed for _ in range(5)}

    assert None not in drawn
    assert len(drawn) > 1
    assert SchedulerConfig(seed=0).fix_for_ranks(Path()).seed == 0
