"""What an engine does before it serves, and what it then never does for the first time.

No GPU is needed: the Triton kernels run in Triton's interpreter, which launches the same variants.
"""

# Dimensions: K kv heads, L positions of a sequence, Z entries of a flat list.

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels of a GPU need Triton")
import tests.kernel.interpreter  # noqa: F401 - repairs it
from minisgl.core import BatchPlan, SamplingParams
from minisgl.engine import EngineLimits, LaunchedStep, SampledStep, model_runner, pool_size, warm_up
from minisgl.engine import sampler as sampler_module
from minisgl.engine.batch_builder import batch_capacity
from minisgl.engine.graphs.key import find_graph_key
from minisgl.engine.graphs.sizes import gpu_graph_keys
from minisgl.engine.limits import most_tokens
from minisgl.engine.pool_size import bytes_of_steps
from minisgl.engine.sampler import sampler_capacity
from minisgl.engine.warm_up import run_warm_up, warm_up_plans, warm_up_samples
from minisgl.kernel import attention, dispatch, gpu, lowest_kept_reference
from minisgl.kernel.attention import attend_prompts_reference
from minisgl.sampling_params import MAX_BIASES, MAX_STOPS
from minisgl.utils.staging import FixedStaging, StagedCopy, Staging, capacity_for
from tests.checkpoints import VOCAB_SIZE
from tests.engine.harness import Host, WatchedEngine, config_of, greedy, random_prompts
from tests.engine.test_captured_steps import KINDS
from tests.kernel.launches import Launches

ARCH = "qwen3"
SMALL = {"max_seq_len": 48, "max_prefill_length": 40, "max_running_requests": 19}


def limits_of(max_seq_len: int, num_rows: int) -> EngineLimits:
    return EngineLimits(
        page_size=4,
        max_seq_len=max_seq_len,
        num_pages=64,
        num_rows=num_rows,
        vocab_size=VOCAB_SIZE,
        eos_ids=frozenset({1}),
        kv_bytes=1,
    )


@pytest.mark.parametrize("max_seq_len", [1, 2, 3, 50, 4096])
@pytest.mark.parametrize("num_rows", [1, 2, 17, 256, 4096])
@pytest.mark.parametrize("max_prefill_length", [1, 9, 8192])
def test_warm_up_plans_are_plans_that_a_scheduler_makes(
    max_seq_len: int, num_rows: int, max_prefill_length: int
) -> None:
    limits = limits_of(max_seq_len, num_rows)
    config = config_of(
        Path("model"), max_running_requests=num_rows, max_prefill_length=max_prefill_length
    )
    plans = warm_up_plans(config, limits)
    samples = [BatchPlan(slices) for slices in warm_up_samples(limits)]
    for plan in plans + samples:
        rows = [req_slice.row for req_slice in plan.slices]
        assert len(set(rows)) == len(rows) > 0
        assert set(rows) <= set(range(num_rows))
        prompts = plan.slices[plan.num_decodes :]
        assert all(len(req_slice) > 1 for req_slice in prompts), "decodes come first"
        assert all(0 <= s.start < s.end <= max_seq_len for s in plan.slices)
        assert all(s.end < limits.num_row_tokens for s in plan.slices), "room for a token"
        assert plan.num_tokens <= most_tokens(config, num_rows)
    most = max(plan.num_tokens for plan in plans)
    assert plans[0].num_tokens >= most - num_rows, "the largest, but for a token a prompt"


def test_few_of_them_run_eagerly_where_steps_are_captured() -> None:
    """Each is a whole model, launched kernel by kernel."""
    limits = limits_of(40960, 256)
    config = config_of(Path("model"), max_running_requests=256)
    captured = gpu_graph_keys(256, 2048)
    eager = [plan for plan in warm_up_plans(config, limits) if not find_graph_key(plan, captured)]
    assert len(eager) == 6

    starts = [{s.start > 0 for s in plan.slices if len(s) > 1} for plan in eager]
    assert starts.count({True}) == starts.count({False}) == 3
    beside_decodes = [plan for plan in eager if 0 < plan.num_decodes < len(plan.slices)]
    assert len(beside_decodes) == 4


def test_what_is_sampled_first_is_all_that_can_be_asked_for() -> None:
    """Few rows and many, 32 of which are changed at a time; with filters and without."""
    samples = warm_up_samples(limits_of(100, 256))
    assert [len(slices) for slices in samples] == [1, 1, 12, 12, 40, 40]
    for slices in samples:
        for req_slice in slices:
            params = req_slice.req.params
            assert params.changes_logits
            assert params.min_tokens > 0
            assert params.logprobs is not None
    has_filters = [slices[0].req.params.top_p < 1 for slices in samples]
    assert has_filters == [False, True] * 3


def test_answers_are_the_same_after_the_warm_up(checkpoint: Callable[[str], Path]) -> None:
    prompts = random_prompts([1, 5, 30, 17], VOCAB_SIZE)
    config = config_of(checkpoint(ARCH), cuda_graph_max_bs=0, **SMALL)
    expected = Host(WatchedEngine(config), config).ask(prompts, greedy(9))
    engine = WatchedEngine(config)
    run_warm_up(engine, config, engine._loaded)
    page_table_RP = engine.context.page_table_RP
    assert (page_table_RP == engine.limits.num_pages).all(), "every page is the padding page still"
    answers = Host(engine, config).ask(prompts, greedy(9))
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]


def test_the_warm_up_looks_at_filters_where_a_step_would(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at those of the whole step, before the logits of some requests are changed."""
    config = config_of(checkpoint(ARCH), cuda_graph_max_bs=0, **SMALL)
    engine = WatchedEngine(config)
    is_filtered: list[bool] = []
    sample = engine.sample

    def noted(launched: LaunchedStep) -> SampledStep:
        is_filtered.append(launched.sampling_inputs.is_filtered)
        return sample(launched)

    monkeypatch.setattr(engine, "sample", noted)
    run_warm_up(engine, config, engine._loaded)
    num_samples = len(warm_up_samples(engine.limits))
    assert is_filtered[-num_samples:] == [False, True] * (num_samples // 2)


def test_memory_that_a_process_takes_once_is_counted_once(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules and workspaces stay when the runner of one page is closed: they are not free."""
    engine = WatchedEngine(config_of(checkpoint(ARCH), cuda_graph_max_bs=0, **SMALL))
    config = replace(config_of(checkpoint(ARCH), cuda_graph_max_bs=0, **SMALL), num_pages=None)
    readings = iter([700, 900])  # with the runner of one page, and after it
    monkeypatch.setattr(pool_size, "free_bytes", lambda *_: next(readings))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))  # before and after no graphs
    limits = replace(engine.limits, num_pages=1)
    assert bytes_of_steps(config, engine._loaded, limits) == 900 - 700


class WatchedStaging(Staging):
    """Compares what is sent with what fits without growing."""

    most: float = 0.0  # the largest part of a capacity

    def stage(self, *arrays: Any) -> StagedCopy:
        part = capacity_for(*map(len, arrays)) / self.capacity
        WatchedStaging.most = max(WatchedStaging.most, part)
        return super().stage(*arrays)


def test_nothing_that_is_sent_to_the_device_needs_more_room_than_there_is(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token returns a hidden state, and every request changes as many logits as it may."""
    monkeypatch.setattr(model_runner, "Staging", WatchedStaging)
    monkeypatch.setattr(model_runner, "_MAX_WRITES", 8)
    monkeypatch.setattr(WatchedStaging, "most", 0.0)
    config = config_of(checkpoint(ARCH), cuda_graph_max_bs=0, **SMALL)
    engine = WatchedEngine(config)
    host = Host(engine, config)
    tokens = range(2, 2 + MAX_STOPS)
    biases = dict.fromkeys(range(MAX_BIASES), 1.0)  # more than the model has tokens are refused
    params = SamplingParams(
        max_tokens=3,
        min_tokens=3,
        top_p=0.5,
        presence_penalty=1.0,
        logit_bias={token: bias for token, bias in biases.items() if token < VOCAB_SIZE},
        stop_token_ids=tuple(tokens),
        prompt_logprobs=1,
        logprobs=1,
    )
    host.ask(random_prompts([30, 7, *[1] * 17], VOCAB_SIZE), params)
    assert 0.1 < WatchedStaging.most <= 1

    run_warm_up(engine, config, engine._loaded)
    assert WatchedStaging.most <= 1


@pytest.mark.parametrize("num_slices", [1, 3, 31, 256])
def test_the_capacity_is_that_of_the_most_that_can_be_sent(num_slices: int) -> None:
    """All the arrays of a step, with as many numbers as they can have."""
    num_tokens = 8192 + num_slices
    step = [num_tokens] * 2 + [num_slices] * 10 + [2 * num_slices]
    assert batch_capacity(num_tokens, num_slices) >= capacity_for(*step)
    num_changed = min(num_slices, 32)
    biases = [num_changed * (MAX_BIASES + MAX_STOPS + 2)] * 3
    assert sampler_capacity(num_slices, num_eos=2) >= capacity_for(*biases)
    changed = [num_changed] * 6 + [2 * num_changed]
    assert sampler_capacity(num_slices, num_eos=2) >= capacity_for(*changed)


def in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine on a CPU run the kernels of a GPU, on arrays that lie as they lie on a GPU."""

    def attend_decode(*args: Any) -> None:
        *tensors, scale, window = args
        gpu.attend_decode(*tensors, scale=scale, window=window or None)

    def attend_prompts(*args: Any) -> None:
        *tensors, scale, window = args  # on a GPU it has no kernel
        attend_prompts_reference(*tensors, scale=scale, window=window or None)

    def take_rows(weight_VD: Tensor, token_T: Tensor, x_TD: Tensor) -> None:
        x_TD.copy_(weight_VD[token_T])

    def causal_softmax(
        score_KZL: Tensor, start: int, length: int, scale: float, window: int
    ) -> None:
        everything = torch.ones(length, score_KZL.shape[2], dtype=torch.bool)
        is_hidden = everything.triu(start + 1)
        if window:
            is_hidden |= everything.tril(start - window)
        score_KGTL = score_KZL.unflatten(1, (-1, length))
        score_KGTL.mul_(scale).masked_fill_(is_hidden, -torch.inf)
        score_KGTL.copy_(score_KGTL.softmax(dim=-1))

    def filters_reference(logits_BV: Tensor, *filters: Tensor) -> Tensor:
        return lowest_kept_reference(logits_BV.float(), *filters)

    kernels = SimpleNamespace(**{name: getattr(gpu, name) for name in gpu.__all__})
    kernels.attend_decode = attend_decode
    kernels.attend_prompts = attend_prompts
    kernels.take_rows = take_rows
    kernels.causal_softmax = causal_softmax
    monkeypatch.setattr(dispatch, "load_cpu_kernels", lambda: kernels)
    monkeypatch.setattr(attention, "triton_kernels_for", lambda x: gpu)
    monkeypatch.setattr(sampler_module, "choose_tokens", gpu.choose_tokens)
    monkeypatch.setattr(sampler_module, "lowest_kept", filters_reference)
    monkeypatch.setattr(gpu.sample, "_PROGRAMS", 1)
    for module in (model_runner, warm_up):
        monkeypatch.setattr(module, "Staging", lambda _, capacity: FixedStaging(capacity))


def make_logits_numbers(engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let logits that nothing computes be zeros: an answer ends where none of them is a number."""
    logits = engine._model.logits
    monkeypatch.setattr(engine._model, "logits", lambda hidden_BD: logits(hidden_BD).zero_())


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/engine/test_gpu_engine.py does it")
def test_no_variant_of_a_kernel_is_met_first_while_serving(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_interpreter(monkeypatch)
    sizes = {"max_seq_len": 12, "max_prefill_length": 10, "max_running_requests": 5}
    config = config_of(checkpoint(ARCH), cuda_graph_max_bs=0, **sizes)
    engine = WatchedEngine(config)
    make_logits_numbers(engine, monkeypatch)
    # The interpreter takes milliseconds a program: it runs what makes tokens and slots, any tokens.
    runs = {"_look_up", "_scatter", "_best_of_split", "_best_of_all"}
    launches = Launches(monkeypatch, runs=runs)
    run_warm_up(engine, config, engine._loaded)
    known = launches.take()
    assert {"_best_of_split", "_rotate_and_store", "_attend_split", "_mask_logits"} <= known.keys()

    host = Host(engine, config)
    source = random.Random(0)
    # A grammar would refuse the tokens, which are of logits that nothing computes.
    kinds = itertools.cycle(kind for kind in KINDS["all"] if "grammar" not in kind)
    for count in (1, 2, 3, 5, 5, 5):
        lengths = [source.randint(1, 9) for _ in range(count)]
        fields = [{**next(kinds), "max_tokens": 3, "min_tokens": 0} for _ in lengths]
        each = [SamplingParams(**some) for some in fields]
        host.ask(random_prompts(lengths, VOCAB_SIZE, seed=count), each)
        for name, variants in launches.take().items():
            assert variants <= known[name], (count, name)
