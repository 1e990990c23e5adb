"""Types of metadata that are right, and those that are not."""

from __future__ import annotations

import pytest
from gguf import GGUFValueType as Type

from minisgl.checkpoint.gguf_types import fault_of_type


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("llama.block_count", [Type.UINT32]),
        ("qwen3moe.block_count", [Type.INT64]),
        ("llama.rope.freq_base", [Type.FLOAT64]),
        ("llama.rope.freq_base", [Type.UINT32]),
        ("tokenizer.ggml.add_bos_token", [Type.BOOL]),
        ("tokenizer.ggml.tokens", [Type.ARRAY, Type.STRING]),
        ("tokenizer.ggml.token_type", [Type.ARRAY, Type.UINT8]),
        ("tokenizer.ggml.merges", [Type.ARRAY]),  # without items
        ("general.anything", [Type.ARRAY, Type.BOOL]),
    ],
)
def test_a_type_of_the_kind_is_right(name: str, types: list[Type]) -> None:
    assert fault_of_type(name, types) is None


@pytest.mark.parametrize(
    ("name", "types", "fault"),
    [
        ("llama.block_count", [Type.FLOAT32], "an integer, and it is a float32"),
        ("llama.block_count", [Type.ARRAY], "an integer, and it is an array"),
        ("llama.block_count", [Type.ARRAY, Type.UINT32], "an integer, and it is an array of"),
        ("tokenizer.ggml.tokens", [Type.STRING], "an array of strings, and it is a string"),
    ],
)
def test_another_type_is_named(name: str, types: list[Type], fault: str) -> None:
    assert str(fault_of_type(name, types)).startswith(f"{name} must be {fault}")
