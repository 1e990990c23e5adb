"""Decodes that a CPU replays give the tokens of eager ones; the rest runs eagerly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.engine.graph_key import GraphKind
from minisgl.kernel import CpuGraph
from tests.checkpoints import VOCAB_SIZE
from tests.engine.harness import Host, WatchedEngine, config_of, random_prompts
from tests.engine.test_captured_steps import KINDS

Checkpoints = Callable[[str], Path]
CAPTURED = ("llama", "mistral", "qwen2", "qwen3")


def host_of(folder: Path, **options: Any) -> Host:
    config = config_of(folder, **{"dtype": "bfloat16", "cache": "naive", **options})
    return Host(WatchedEngine(config), config)


def captured_sizes(host: Host) -> list[int]:
    graphs = host._engine._graphs
    assert graphs is not None
    keys = graphs._keys[GraphKind.DECODES]
    assert set(graphs._captured) == set(keys)
    return [key.num_decodes for key in keys]


def count_replays(monkeypatch: pytest.MonkeyPatch) -> list[CpuGraph]:
    replays: list[CpuGraph] = []
    replay = CpuGraph.replay

    def counted(self: CpuGraph) -> None:
        replays.append(self)
        replay(self)

    monkeypatch.setattr(CpuGraph, "replay", counted)
    return replays


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_without_graphs(
    kind: str, overlap: bool, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of one to eight shrink as their answers end, so that all sizes are replayed."""
    replays = count_replays(monkeypatch)
    folder = checkpoint("qwen3")
    fields = KINDS[kind]
    for num_requests in (1, 8):
        prompts = random_prompts([3, 30, 1, 17, 2, 5, 40, 9][:num_requests], VOCAB_SIZE)
        each = [
            SamplingParams(
                **{
                    "max_tokens": 20 + 5 * i,
                    "seed": i,
                    "ignore_eos": True,
                    **fields[i % len(fields)],
                }
            )
            for i in range(num_requests)
        ]
        expected = host_of(folder, overlap=overlap, cuda_graph_max_bs=0).ask(prompts, each)
        assert not replays
        answers = host_of(folder, overlap=overlap).ask(prompts, each)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
        assert len(replays) > 5
        replays.clear()


@pytest.mark.parametrize("arch", CAPTURED)
def test_logits_of_few_decodes_are_those_without_graphs(arch: str, checkpoint: Checkpoints) -> None:
    prompts = random_prompts([3, 30, 1, 17], VOCAB_SIZE)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    eager = host_of(checkpoint(arch), cuda_graph_max_bs=0)
    replaying = host_of(checkpoint(arch))
    assert captured_sizes(replaying) == list(range(1, 9))
    eager.ask(prompts, params)
    replaying.ask(prompts, params)
    expected = eager._engine.logits
    assert len(expected) == 4 * 30
    for place, logits_V in replaying._engine.logits.items():
        assert torch.equal(logits_V, expected[place])


@pytest.mark.parametrize(
    ("arch", "dtype"), [("llama", "float32"), ("qwen3_moe", "bfloat16"), ("olmo2", "bfloat16")]
)
def test_what_torch_computes_runs_eagerly(
    arch: str, dtype: str, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays = count_replays(monkeypatch)
    host = host_of(checkpoint(arch), dtype=dtype)
    assert captured_sizes(host) == []
    [answer] = host.ask([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(answer.tokens) == 5
    assert not replays


def test_the_option_bounds_what_is_captured(checkpoint: Checkpoints) -> None:
    assert captured_sizes(host_of(checkpoint("llama"), cuda_graph_max_bs=2)) == [1, 2]
    assert captured_sizes(host_of(checkpoint("llama"), max_running_requests=3)) == [1, 2, 3]
    assert host_of(checkpoint("llama"), cuda_graph_max_bs=0)._engine._graphs is None
