"""Replayed steps give the tokens of eager steps.

Without a GPU, a graph is an object that calls the captured function again.
"""

# Dimensions: B requests of a step, H head width, K kv heads, N query heads, T tokens of a step.

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention import CapturedSlices
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.core import (
    BaseAttnMetadata,
    BatchPlan,
    Grammar,
    IntArray,
    Queries,
    Req,
    ReqSlice,
    SamplingParams,
    TableWrites,
)
from minisgl.distributed import DistributedInfo
from minisgl.engine import Engine, SampledStep, model_runner, sampler
from minisgl.engine.graphs import key as graph_key
from minisgl.engine.graphs import runner as graph_module
from minisgl.engine.graphs.capture import CudaGraphCapture, Graph, GraphCapture
from minisgl.engine.graphs.key import GraphKey, GraphKind
from minisgl.engine.graphs.runner import GraphRunner
from minisgl.engine.graphs.sizes import gpu_graph_keys, most_tokens_with_prompts
from minisgl.engine.steps import LaunchedStep, PreparedStep
from minisgl.kernel import GroupTensors, attend_decode
from minisgl.kvcache import radix_cache
from minisgl.message import AbortMsg
from minisgl.scheduler import prefix_groups
from tests.checkpoints import VOCAB_SIZE
from tests.engine.harness import Host, WatchedEngine, config_of, random_prompts

ARCH = "qwen3"
MAX_DECODES = 20


class RepeatedCall:
    """In place of a graph: calls again, and puts the result where the first one was."""

    def __init__(self, call: Callable[[], Any], result: Any, log: Counter[str], name: str) -> None:
        self._call = call
        self._result = result
        self._log = log
        self._name = name

    def replay(self) -> None:
        self._log[self._name] += 1
        for old, new in zip(_tensors(self._result), _tensors(self._call()), strict=True):
            old.copy_(new)


def _tensors(result: Tensor | tuple[Tensor, Tensor | None]) -> list[Tensor]:
    return [x for x in result if x is not None] if isinstance(result, tuple) else [result]


class CapturableAttention(TorchAttentionBackend):
    """In a captured step, each token is one query."""

    can_be_captured = True

    def make_capture_metadata(self, slices: CapturedSlices) -> BaseAttnMetadata:
        return BaseAttnMetadata()

    def update_metadata(
        self,
        metadata: BaseAttnMetadata,
        start_X: IntArray,
        end_X: IntArray,
        first_token: int = 0,
    ) -> None:
        assert len(start_X) == len(end_X)
        assert (start_X < end_X).any()

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: int, queries: Queries
    ) -> Tensor:
        if type(queries.attn_metadata) is not BaseAttnMetadata:
            return super().forward(q_TNH, k_TKH, v_TKH, layer, queries)
        o_TNH = q_TNH.new_empty(q_TNH.shape)
        attend_decode(
            q_TNH,
            self._pool.k_cache(layer),
            self._pool.v_cache(layer),
            self._page_table_RP,
            torch.arange(len(q_TNH), dtype=torch.int32),
            queries.row_X,
            queries.position_X,
            o_TNH,
            scale=self._specs[layer].scale,
        )
        return o_TNH


class RepeatedCalls(GraphCapture):
    """Captures calls of any kind, for a `GraphRunner` as a GPU has it."""

    def __init__(self, log: Counter[str]) -> None:
        self._log = log

    def rehearse(self, call: Callable[[], object]) -> None:
        call()
        self._log["rehearsed"] += 1

    def capture(self, call: Callable[[], Any]) -> tuple[RepeatedCall, Any]:
        result = call()
        name = "forward" if isinstance(result, tuple) else "sample"
        return RepeatedCall(call, result, self._log, name), result


Hosts = Callable[..., Any]


@pytest.fixture
def hosts(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Hosts:
    """Makes a host whose engine replays, and a log that counts the replays."""
    log = Counter[str]()

    monkeypatch.setattr(
        model_runner, "create_attention_backend", lambda _, *args: CapturableAttention(*args)
    )

    def make(
        info: DistributedInfo | None = None,
        rendezvous: Path | None = None,
        *,
        captures_filters: bool = False,
        **options: Any,
    ) -> tuple[Host, Counter[str]]:
        monkeypatch.setattr(graph_module, "has_filter_kernels", lambda _: captures_filters)
        config = config_of(checkpoint(ARCH), **options)
        engine = WatchedEngine(config, info, rendezvous)

        longest = most_tokens_with_prompts(
            engine.limits.num_row_tokens - 1, engine._loaded.multiplied_bytes
        )
        engine._graphs = GraphRunner(
            RepeatedCalls(log),
            gpu_graph_keys(MAX_DECODES, longest),
            engine._forward_to_logits,
            engine._sampler,
            engine.context,
        )
        write_tables = engine._write_tables

        def count_writes(writes: TableWrites) -> None:
            log["writes"] += len(writes.pages) + len(writes.tokens) > 0
            write_tables(writes)

        launch = engine.launch

        def count_steps(prepared: PreparedStep) -> LaunchedStep:
            log["steps"] += 1
            return launch(prepared)

        monkeypatch.setattr(engine, "launch", count_steps)
        monkeypatch.setattr(engine, "_write_tables", count_writes)
        return Host(engine, config), log

    return make


@contextmanager
def without_graphs(host: Host) -> Iterator[None]:
    with patch.object(host._engine._graphs, "_keys", {kind: [] for kind in GraphKind}):
        yield


KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "sampled": [{}, {"temperature": 0.5}],
    "filtered": [
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {},
        {"temperature": 0.0, "top_k": 3},
    ],
    "processed": [
        {"presence_penalty": 1.5},
        {},
        {"logit_bias": {7: 4.0}},
        {"min_tokens": 5, "ignore_eos": False},
    ],
    "logprobs": [{"logprobs": 2}, {}, {"logprobs": 0, "temperature": 0.0}],
    "grammar": [
        {"grammar": Grammar("regex", "[a-z ]{20}")},
        {},
        {"grammar": Grammar("regex", "(yes|no)")},
    ],
}
KINDS["all"] = [fields for each in KINDS.values() for fields in each] + [
    {"prompt_logprobs": 1},
    {"embeds": True},
]


# Where no request has a filter, it does not matter whether filters are captured.
KINDS_AND_CAPTURES = [*((kind, True) for kind in KINDS), ("filtered", False), ("all", False)]


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize(("kind", "captures_filters"), KINDS_AND_CAPTURES)
def test_tokens_are_those_without_graphs(
    kind: str, overlap: bool, captures_filters: bool, hosts: Hosts
) -> None:
    host, log = hosts(overlap=overlap, captures_filters=captures_filters, cache="naive")
    prompts = random_prompts([3, 30, 1, 17, 40, 2] * 3, VOCAB_SIZE)
    each = [
        SamplingParams(
            **{
                "max_tokens": 20 + i,
                "seed": i,
                "ignore_eos": True,
                **KINDS[kind][i % len(KINDS[kind])],
            }
        )
        for i in range(len(prompts))
    ]
    with without_graphs(host):
        expected = host.ask(prompts, each)
    assert log["forward"] == 0
    log.clear()
    answers = host.ask(prompts, each)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert log["forward"] > 15
    assert log["writes"] == 1, "pages are appended by graphs"
    is_eager = kind in ("processed", "all") or (kind == "filtered" and not captures_filters)
    assert (log["sample"] < log["forward"]) == is_eager


def test_a_short_prompt_is_replayed_too(hosts: Hosts) -> None:
    host, log = hosts(max_prefill_length=50)
    prompts = random_prompts([30, 140], VOCAB_SIZE)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    with without_graphs(host):
        expected = [host.ask([prompt], params)[0].tokens for prompt in prompts]
    other, log = hosts(max_prefill_length=50)
    log.clear()
    assert [other.ask([prompt], params)[0].tokens for prompt in prompts] == expected
    assert (log["forward"], log["sample"]) == (4, 2), (
        "one step, and three of which the last samples"
    )
    assert log["writes"] == 1, "a graph writes the pages and tokens of a prompt that fits it"


def test_prompts_beside_decodes_are_replayed(hosts: Hosts) -> None:
    """Requests come one after the other, with chunks of prompts and without grammars or scores."""
    host, log = hosts(max_prefill_length=50, overlap=True, cache="naive")
    prompts = random_prompts([30, 140, 3, 64, 1, 90, 20, 75], VOCAB_SIZE)
    each = [
        SamplingParams(max_tokens=12 + 5 * i, temperature=i % 2, seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    with without_graphs(host):
        expected = host.ask(prompts, each)
    log.clear()
    answers = host.ask(prompts, each)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert log["forward"] == log["steps"]


def test_how_much_decodes_share_reaches_the_attention_of_their_graph(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of decodes alone, and beside prompts."""
    groups_of: dict[int, GroupTensors] = {}
    numbers: set[tuple[bool, int]] = set()
    make_capture_metadata = CapturableAttention.make_capture_metadata
    forward = CapturableAttention.forward

    def make_and_note(self: CapturableAttention, slices: CapturedSlices) -> BaseAttnMetadata:
        metadata = make_capture_metadata(self, slices)
        if slices.groups is not None:
            groups_of[id(metadata)] = slices.groups
        return metadata

    def check(self: CapturableAttention, *arguments: Any) -> Tensor:
        queries: Queries = arguments[-1]
        groups = groups_of.get(id(queries.attn_metadata))
        if groups is not None:
            has_prompts = len(queries.row_X) > len(groups.num_shared_B)
            for begin, end in itertools.pairwise(groups.indptr.tolist()):
                member_X = groups.member_B[begin:end].long()
                shared = set(groups.num_shared_B[member_X].tolist())
                assert len(shared) <= 1
                numbers.update((has_prompts, number) for number in shared)
                num_pages, rest = divmod(max(shared, default=0), self._pool.page_size)
                assert rest == 0
                pages_XP = self._page_table_RP[queries.row_X[member_X].long(), :num_pages]
                assert (pages_XP == pages_XP[:1]).all()
                assert (queries.position_X[member_X] >= max(shared, default=0)).all()
        return forward(self, *arguments)

    monkeypatch.setattr(CapturableAttention, "make_capture_metadata", make_and_note)
    monkeypatch.setattr(CapturableAttention, "forward", check)
    monkeypatch.setattr(prefix_groups, "_LEAST_BYTES", -(10**15))
    for module in (graph_key, radix_cache, prefix_groups):
        monkeypatch.setattr(module, "FEWEST_IN_GROUP", 4)
    first, second, *rests = random_prompts([64, 96, *range(1, MAX_DECODES)], VOCAB_SIZE)
    prompts = [(first if i % 2 else second) + rest for i, rest in enumerate(rests)]
    params = [
        SamplingParams(max_tokens=20 + i, temperature=0.0, ignore_eos=True)
        for i in range(len(prompts))
    ]
    host, _ = hosts(overlap=True, max_prefill_length=100)
    answers = [answer.tokens for answer in host.ask(prompts, params)]
    assert numbers >= {(False, 64), (False, 96), (True, 64), (True, 96)}
    with without_graphs(host):
        assert [answer.tokens for answer in host.ask(prompts, params)] == answers


@pytest.mark.parametrize(("kind", "captures_filters"), KINDS_AND_CAPTURES)
def test_ranks_replay_and_call_what_one_rank_does(
    kind: str, captures_filters: bool, hosts: Hosts, tmp_path: Path
) -> None:
    """Each rank has logits of its tokens, and chooses; two threads are the ranks."""
    asked = KINDS[kind] * (1 if kind == "all" else 3)
    prompts = [random_prompts([30, 3, 17, 9], VOCAB_SIZE)[i % 4] for i in range(len(asked))]
    each = [
        SamplingParams(**{"max_tokens": 20, "seed": i, "ignore_eos": True, **fields})
        for i, fields in enumerate(asked)
    ]
    alone, log = hosts(overlap=True, captures_filters=captures_filters)
    expected = [answer.tokens for answer in alone.ask(prompts, each)]
    log.clear()

    def run(rank: int) -> None:
        info = DistributedInfo(rank, 2)
        host, _ = hosts(
            info,
            tmp_path / "rendezvous",
            tp=2,
            overlap=True,
            captures_filters=captures_filters,
        )
        with without_graphs(host):
            assert [answer.tokens for answer in host.ask(prompts, each)] == expected
        assert [answer.tokens for answer in host.ask(prompts, each)] == expected

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    assert log["forward"] > 30
    is_eager = kind in ("processed", "all") or (kind == "filtered" and not captures_filters)
    assert (log["sample"] < log["forward"]) == is_eager


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_come_go_and_lose_their_pages(seed: int, hosts: Hosts) -> None:
    source = random.Random(seed)
    host, log = hosts(num_pages=40, overlap=True, max_prefill_length=60)
    prompts = random_prompts([source.randint(1, 60) for _ in range(40)], VOCAB_SIZE, seed)
    each = [
        SamplingParams(
            **{"max_tokens": source.randint(5, 60), "seed": i, **source.choice(KINDS["all"][:-2])}
        )
        for i in range(len(prompts))
    ]
    with without_graphs(host):
        expected = host.ask(prompts, each)
    assert [answer.tokens for answer in host.ask(prompts, each)] == [
        answer.tokens for answer in expected
    ]
    assert host.scheduler.statistics.counts.num_retractions > 0
    assert 0 < log["sample"] < log["forward"]


def test_an_abort_between_replayed_steps_changes_no_other_answer(hosts: Hosts) -> None:
    host, _ = hosts(overlap=True)
    prompts = random_prompts([9] * 6, VOCAB_SIZE)
    params = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    expected = host.ask(prompts, params)
    step = host.scheduler.step
    aborted = host._num_asked + 2

    def step_and_abort() -> None:
        step()
        if len(host.outbox.msgs) > 50 and host.scheduler.requests._live.get(aborted):
            host.inbox.msgs = [AbortMsg(aborted)]

    host.scheduler.step = step_and_abort  # type: ignore[method-assign]
    answers = host.ask(prompts, params)
    assert answers[2].finish == "abort"
    assert len(answers[2].tokens) < 30
    assert [a.tokens for i, a in enumerate(answers) if i != 2] == [
        a.tokens for i, a in enumerate(expected) if i != 2
    ]


def test_nothing_but_padding_is_written_to_what_pads(hosts: Hosts) -> None:
    """The padding row keeps its pages, and all tokens but the last, which is never read."""
    host, _ = hosts()
    context = host._engine.context
    limits = host._engine.limits
    host.ask(random_prompts([5] * 3, VOCAB_SIZE), SamplingParams(max_tokens=9, ignore_eos=True))
    assert (context.page_table_RP[-1] == limits.num_pages).all()
    assert not context.token_pool_RL[-1, :-1].any()


def test_a_filter_that_is_not_captured_does_not_concern_greedy_requests(hosts: Hosts) -> None:
    host, log = hosts()
    for temperature, expected in ((0.0, 9), (1.0, 0)):
        log.clear()
        host.ask(
            [[1, 2]],
            SamplingParams(max_tokens=9, temperature=temperature, top_k=3, ignore_eos=True),
        )
        assert (log["forward"], log["sample"]) == (9, expected)


def test_cuda_graphs_share_a_stream_and_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each stream cuBLAS would keep a workspace; a pool is shared on one stream alone."""
    num_streams = itertools.count()
    current: list[int] = []
    log: list[tuple[Any, ...]] = []

    @contextmanager
    def use(stream: SimpleNamespace) -> Iterator[None]:
        current.append(stream.number)
        yield
        current.pop()

    class Recorded:
        def capture_begin(self, *, pool: int, capture_error_mode: str) -> None:
            log.append(("begin", pool, capture_error_mode, *current))

        def capture_end(self) -> None:
            log.append(("end", *current))

        def replay(self) -> None:
            log.append(("replay", *current))

    def stream() -> SimpleNamespace:
        return SimpleNamespace(number=next(num_streams), wait_stream=lambda other: None)

    def fail() -> None:
        raise ValueError

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", stream)
        patch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=id))
        patch.setattr(torch.cuda, "stream", use)
        patch.setattr(torch.cuda, "empty_cache", lambda: log.append(("freed",)))
        patch.setattr(torch.cuda, "CUDAGraph", Recorded)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: 7)
        device_capture = CudaGraphCapture()
        device_capture.rehearse(lambda: log.append(("rehearsed", *current)))
        results = [device_capture.capture(lambda: "result")[1] for _ in range(2)]
        with pytest.raises(ValueError):
            device_capture.capture(fail)
    assert results == ["result"] * 2
    captured = [("begin", 7, "relaxed", 0), ("end", 0)]
    twice = [*captured, ("replay",)] * 2
    assert log == [("rehearsed", 0), ("freed",), *twice, *captured]
    assert next(num_streams) == 1


def test_one_step_of_each_kind_is_rehearsed(hosts: Hosts) -> None:
    host, log = hosts()
    num_kinds = sum(1 for keys in host._engine._graphs._keys.values() if keys)
    assert num_kinds == 2
    assert log["rehearsed"] == 2 * num_kinds, "to logits, and from logits to tokens"


def test_few_graphs_are_captured_and_the_rest_estimated(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _ = hosts()
    engine = host._engine
    free = 1000
    captured: list[GraphKey] = []

    def capture(self: GraphRunner, key: GraphKey) -> None:
        nonlocal free
        captured.append(key)
        free -= 7

    monkeypatch.setattr(GraphRunner, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 1000))
    graphs = GraphRunner(
        RepeatedCalls(Counter()),
        gpu_graph_keys(256, 256),
        engine._forward_to_logits,
        engine._sampler,
        engine.context,
        few_graphs=True,
    )
    num_all = sum(map(len, gpu_graph_keys(256, 256).values()))
    assert captured[:2] == [keys[-1] for keys in gpu_graph_keys(256, 256).values()]
    assert len(captured) == len(set(captured)) == 8
    assert graphs.bytes_not_captured == 7 * (num_all - 8)
    req = Req(0, np.zeros(1, dtype=np.int32), SamplingParams(), max_length=2, seed=0)
    decodes = BatchPlan([ReqSlice(req, 5, 6, samples=True)] * 3)
    assert graphs.find_key(decodes) == GraphKey(128, 128)


def graphs_of(engine: Engine) -> list[weakref.ref[Graph]]:
    captured = engine._graphs._captured.values()
    graphs = [weakref.ref(step.forward_graph) for step in captured]
    for step in captured:
        graphs += [weakref.ref(choice.graph) for choice in step.sampling_graphs.values()]
    return graphs


def raise_in_call(
    number: int, function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, owner: Any
) -> None:
    """Interrupt a call of a function that its owner has under its name."""
    num_calls = itertools.count()

    def interrupted(*args: Any) -> Any:
        if next(num_calls) == number:
            raise KeyboardInterrupt
        return function(*args)

    monkeypatch.setattr(owner, function.__name__, interrupted)


@pytest.mark.parametrize(
    ("owner", "function"),
    [(SampledStep, SampledStep.wait), (sampler, sampler.process_logits)],
    ids=["wait", "process_logits"],
)
def test_no_graph_outlives_an_engine_that_was_interrupted(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, owner: Any, function: Callable[..., Any]
) -> None:
    """With a step half done, whose frames the exception holds: NCCL could not leave its group."""
    host, _ = hosts(overlap=True)
    engine = host._engine
    graphs = graphs_of(engine)
    params = SamplingParams(max_tokens=20, ignore_eos=True, presence_penalty=1.0)
    raise_in_call(3, function, monkeypatch, owner)

    try:
        host.ask(random_prompts([5] * 3, VOCAB_SIZE), params)
    except KeyboardInterrupt:
        engine.close()
        gc.collect()
        assert len(graphs) > 0
        assert all(graph() is None for graph in graphs)
    else:
        pytest.fail("no step was interrupted")
