"""Steps that a CPU replays give the logits and tokens of eager ones; the rest runs eagerly.

Up to 12 rows are multiplied in another order than more: up to 8 without AVX-512, and up to 4 with a
matrix unit (csrc/cpu_linear.cpp). A captured step has more rows than its plan. So logits are equal
bit by bit where both have more than 12, or both 5 to 8, or neither more than 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.attention import CapturedSlices
from minisgl.attention.torch_backend import TorchAttentionBackend, TorchAttnMetadata
from minisgl.core import SamplingParams
from minisgl.engine import model_runner
from minisgl.engine.graphs.capture import Graph
from minisgl.engine.graphs.key import GraphKey, GraphKind
from minisgl.engine.graphs.runner import CapturedStep, GraphRunner, PreparedReplay
from minisgl.engine.sampler import SamplingInputs
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
    assert set(graphs._captured) == {key for keys in graphs._keys.values() for key in keys}
    return [key.num_decodes for key in graphs._keys[GraphKind.DECODES]]


def count_replays(monkeypatch: pytest.MonkeyPatch) -> list[CpuGraph]:
    replays: list[CpuGraph] = []
    replay = CpuGraph.replay

    def counted(self: CpuGraph) -> None:
        replays.append(self)
        replay(self)

    monkeypatch.setattr(CpuGraph, "replay", counted)
    return replays


def sampling_graphs(engine: WatchedEngine) -> list[Graph]:
    steps = engine._graphs._captured.values()
    return [choice.graph for step in steps for choice in step.sampling_graphs.values()]


@pytest.fixture(scope="module")
def engines(checkpoint: Checkpoints) -> tuple[WatchedEngine, WatchedEngine]:
    """One that computes each step eagerly, and one that replays, for any number of hosts."""
    eager = host_of(checkpoint("qwen3"), cuda_graph_max_bs=0)
    return eager._engine, host_of(checkpoint("qwen3"))._engine


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_without_graphs(
    kind: str,
    overlap: bool,
    engines: tuple[WatchedEngine, WatchedEngine],
    checkpoint: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches of one to eight shrink as their answers end, so that all sizes are replayed."""
    replays = count_replays(monkeypatch)
    config = config_of(checkpoint("qwen3"), cache="naive", overlap=overlap)
    eager, replaying = engines
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
        expected = Host(eager, config).ask(prompts, each)
        assert not replays
        answers = Host(replaying, config).ask(prompts, each)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
        assert len(replays) > 5
        sampling = set(map(id, sampling_graphs(replaying)))
        num_sampled = sum(id(graph) in sampling for graph in replays)
        if kind not in ("processed", "all"):
            assert num_sampled > 5
        replays.clear()


def test_an_attention_backend_hears_which_decodes_are_of_a_step_with_prompts(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are the returned tokens of such a step."""
    asked: list[CapturedSlices] = []
    make_metadata = TorchAttentionBackend.make_capture_metadata

    def watched(backend: TorchAttentionBackend, slices: CapturedSlices) -> TorchAttnMetadata:
        asked.append(slices)
        return make_metadata(backend, slices)

    monkeypatch.setattr(TorchAttentionBackend, "make_capture_metadata", watched)
    host = host_of(checkpoint("qwen3"))
    num_decode_graphs = len(captured_sizes(host))
    host._engine.close()
    whole = [slices for slices in asked if slices.prompt_indptr is not None]
    assert whole
    of_steps_with_prompts = [slices for slices in asked if slices.beside_prompts]
    assert len(of_steps_with_prompts) == 2 * len(whole)
    assert len(asked) == 2 * len(whole) + num_decode_graphs


def test_logits_of_captured_steps_lie_in_the_same_memory(checkpoint: Checkpoints) -> None:
    """They are the largest thing that a graph leaves, and are read before the next replay."""
    captured = host_of(checkpoint("qwen3"))._engine._graphs._captured
    addresses = {step.logits_BV.data_ptr() for step in captured.values()}
    assert 5 * len(addresses) < len(captured), "a few blocks serve all"


@pytest.mark.parametrize("arch", CAPTURED)
def test_logits_of_few_decodes_are_those_without_graphs(arch: str, checkpoint: Checkpoints) -> None:
    prompts = random_prompts([3, 30, 1, 17], VOCAB_SIZE)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    eager = host_of(checkpoint(arch), cuda_graph_max_bs=0)
    replaying = host_of(checkpoint(arch))
    assert captured_sizes(replaying) == [*range(1, 9), 12, 16, 20, 24, 28, 32]
    eager.ask(prompts, params)
    replaying.ask(prompts, params)
    expected = eager._engine.logits
    assert len(expected) == 4 * 30
    for key, logits_V in replaying._engine.logits.items():
        assert torch.equal(logits_V, expected[key])


def count_keys(host: Host) -> Counter[GraphKind]:
    """From now on, how many steps each kind of graph takes."""
    counts = Counter[GraphKind]()
    graphs = host._engine._graphs
    replay = graphs.replay

    def counted(prepared: PreparedReplay) -> tuple[Tensor, SamplingInputs]:
        counts[prepared.key.kind] += 1
        return replay(prepared)

    graphs.replay = counted  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("arch", CAPTURED)
def test_logits_of_steps_with_prompts_are_those_without_graphs(
    arch: str, page_size: int, checkpoint: Checkpoints
) -> None:
    """Beside 13 and more decodes prompts come in chunks; the last one of each samples."""
    prompts = random_prompts([2] * 13 + [100, 7, 1, 3, 60], VOCAB_SIZE)
    params = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
    options = {"max_prefill_length": 24, "page_size": page_size}
    eager = host_of(checkpoint(arch), cuda_graph_max_bs=0, **options)
    replaying = host_of(checkpoint(arch), **options)
    counts = count_keys(replaying)
    eager.ask(prompts, params)
    replaying.ask(prompts, params)
    assert counts[GraphKind.WITH_PROMPTS] >= 7
    expected = eager._engine.logits
    assert len(expected) == len(prompts) * 25
    for key, logits_V in replaying._engine.logits.items():
        assert torch.equal(logits_V, expected[key])


def test_logits_beside_few_decodes_are_nearly_those_without_graphs(
    checkpoint: Checkpoints,
) -> None:
    """A few tokens may be added up in another order than the same ones with padding."""
    prompts = random_prompts([3, 70, 40], VOCAB_SIZE)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    eager = host_of(checkpoint("qwen3"), cuda_graph_max_bs=0, max_prefill_length=10)
    replaying = host_of(checkpoint("qwen3"), max_prefill_length=10)
    counts = count_keys(replaying)
    expected = eager.ask(prompts, params)
    answers = replaying.ask(prompts, params)
    assert counts[GraphKind.WITH_PROMPTS] >= 10
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    for key, logits_V in replaying._engine.logits.items():
        difference_V = (logits_V - eager._engine.logits[key]).abs()
        assert difference_V.mean() < 0.05
        assert difference_V.max() < 0.3


@pytest.mark.parametrize(
    ("arch", "dtype"), [("llama", "float32"), ("qwen3_moe", "bfloat16"), ("olmo2", "bfloat16")]
)
def test_what_torch_computes_runs_eagerly(
    arch: str, dtype: str, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays = count_replays(monkeypatch)
    tried: list[GraphKey] = []
    capture = GraphRunner._capture

    def recorded(self: GraphRunner, key: GraphKey) -> CapturedStep:
        tried.append(key)
        return capture(self, key)

    monkeypatch.setattr(GraphRunner, "_capture", recorded)
    host = host_of(checkpoint(arch), dtype=dtype)
    assert captured_sizes(host) == []
    assert len(tried) == 4, "of both kinds the largest and the smallest"
    [answer] = host.ask([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(answer.tokens) == 5
    assert not replays


def test_the_option_bounds_what_is_captured(checkpoint: Checkpoints) -> None:
    assert captured_sizes(host_of(checkpoint("llama"), cuda_graph_max_bs=2)) == [1, 2]
    assert captured_sizes(host_of(checkpoint("llama"), max_running_requests=10))[-2:] == [8, 10]
    assert captured_sizes(host_of(checkpoint("llama"), cuda_graph_max_bs=0)) == []


def test_without_compiled_kernels_all_steps_are_eager(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "load_cpu_kernels", lambda: None)
    replays = count_replays(monkeypatch)
    host = host_of(checkpoint("llama"))
    assert captured_sizes(host) == []
    [answer] = host.ask([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(answer.tokens) == 5
    assert not replays


def test_there_is_room_for_what_is_captured_and_for_what_is_not_padded(
    checkpoint: Checkpoints,
) -> None:
    engine = host_of(checkpoint("llama"), max_prefill_length=512)._engine
    for num_decodes in (1, 8, 20, 32):
        sizes = engine.unpadded_prompt_sizes(num_decodes)
        assert sizes == sorted(set(sizes))
        captured = [num_tokens - num_decodes for num_tokens in (16, 24, 32, 40, 48, 64, 80, 96)]
        assert [size for size in sizes if size <= 96 - num_decodes] == [
            size for size in captured if size >= 8
        ]
        assert 512 - 32 < sizes[-1] <= 512


def test_nothing_is_padded_in_float32(checkpoint: Checkpoints) -> None:
    engine = host_of(checkpoint("llama"), dtype="float32")._engine
    assert engine.unpadded_prompt_sizes(8) == []
