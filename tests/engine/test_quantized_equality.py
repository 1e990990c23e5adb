"""A quantized checkpoint gives exactly the logits of its dequantized copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.checkpoints import VOCAB_SIZE
from tests.distributed.harness import Job, run_ranks
from tests.engine.harness import (
    Answer,
    Host,
    WatchedEngine,
    config_of,
    greedy,
    random_prompts,
)
from tests.quantized import SCHEMES, quantize_checkpoint

PROMPTS = random_prompts([1, 5, 17], VOCAB_SIZE)
NUM_TOKENS = 6


def answers(folder: Path, dtype: str) -> list[Answer]:
    config = config_of(folder, dtype=dtype)
    return Host(WatchedEngine(config), config).ask(PROMPTS, greedy(NUM_TOKENS))


def assert_equal(given: list[Answer], expected: list[Answer]) -> None:
    for one, other in zip(given, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.logits_TV is not None
        assert other.logits_TV is not None
        assert torch.equal(one.logits_TV, other.logits_TV)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("arch", "scheme"),
    [
        ("llama", "fp8 blocks"),
        ("llama", "compressed int4 groups with zero points"),
        ("qwen3_moe", "fp8 blocks"),
    ],
)
def test_logits_are_those_of_the_dequantized_checkpoint(
    arch: str, scheme: str, dtype: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    quantized, dequantized = quantize_checkpoint(checkpoint(arch), SCHEMES[scheme], tmp_path)
    assert_equal(answers(quantized, dtype), answers(dequantized, dtype))


def test_two_ranks_give_the_logits_of_the_dequantized_checkpoint(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    cases = [("llama", "compressed fp8 channel"), ("qwen3_moe", "fp8 blocks")]
    folders = [
        folder
        for arch, scheme in cases
        for folder in quantize_checkpoint(checkpoint(arch), SCHEMES[scheme], tmp_path / arch)
    ]
    options = {"page_size": 4, "num_pages": 64}
    jobs = [Job(folder, [PROMPTS], NUM_TOKENS, options) for folder in folders]
    with TemporaryDirectory() as folder:  # its name is short, because it holds sockets
        first_rank = run_ranks(2, jobs, Path(folder))[0]
    for quantized, dequantized in zip(first_rank[::2], first_rank[1::2], strict=True):
        assert_equal(quantized, dequantized)
