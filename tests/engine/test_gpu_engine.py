"""The engine on a GPU, in bfloat16, against transformers in float32.

Tokens differ only where logits nearly tie.
"""

# Dimensions: B requests of a step, T tokens of a step, V vocabulary.

from __future__ import annotations

import itertools
import random
import shutil
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

pytest.importorskip("triton", reason="the kernels of a GPU need Triton")
from triton import knobs

from minisgl.config import SchedulerConfig
from minisgl.core import Batch, BatchPlan, ReqSlice, TableWrites
from minisgl.engine import Engine, sample_logits
from minisgl.engine.graphs.capture import unowned
from minisgl.engine.graphs.key import GraphKey
from minisgl.engine.graphs.runner import GraphRunner, PreparedReplay
from minisgl.engine.logits_processing import wants_processing
from minisgl.engine.sampler import SampledTokens, SamplingGraph, SamplingInputs
from minisgl.engine.sampling_batch import send_sampling
from minisgl.kernel import gpu, row_tiles
from minisgl.kernel.gpu.launch import RememberedKernel
from minisgl.layers import Context
from minisgl.llm import LLM, SamplingParams
from minisgl.llm.local_rank import LocalRank
from minisgl.message import UserMsg, pack_ids
from minisgl.scheduler import prefix_groups
from minisgl.utils import detect_hardware
from minisgl.utils.staging import Staging
from tests.checkpoints import EOS_ID, tiny_tokenizer
from tests.engine.harness import Host, WatchedEngine, greedy
from tests.engine.test_captured_steps import KINDS as SAMPLING_KINDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
VOCAB_SIZE = 1000
KINDS = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    ),  # with all experts: rounding may choose no others
    "sparse_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "olmo3": (Olmo3Config, Olmo3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
}
EXPERTS = {"moe_intermediate_size": 192, "norm_topk_prob": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**EXPERTS, "num_experts": 8, "num_experts_per_tok": 8},
    "sparse_moe": {**EXPERTS, "num_experts": 16, "num_experts_per_tok": 4},
    "olmo3": {
        "sliding_window": 50,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "smollm3": {"no_rope_layer_interval": 2, "pad_token_id": None},
}
LIBRARIES = {"fa": "flash_attn", "fi": "flashinfer", "trtllm": "flashinfer"}
Models = Callable[..., tuple[Path, PreTrainedModel]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    @cache
    def make(
        kind: str, num_heads: int, num_kv_heads: int, head_dim: int = 128
    ) -> tuple[Path, PreTrainedModel]:
        torch.manual_seed(0)
        config_class, model_class = KINDS[kind]
        config = config_class(
            vocab_size=VOCAB_SIZE,
            hidden_size=512,
            num_hidden_layers=3,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=1024,
            max_position_embeddings=8192,
            initializer_range=0.08,
            eos_token_id=VOCAB_SIZE - 1,
            **OPTIONS.get(kind, {}),
        )
        model = model_class(config).float().eval().cuda()
        folder = tmp_path_factory.mktemp(f"{kind}_{num_heads}_{num_kv_heads}_{head_dim}")
        model.save_pretrained(folder)
        return folder, model

    return make


def prompt(length: int, source: random.Random) -> list[int]:
    return [source.randrange(VOCAB_SIZE) for _ in range(length)]


def batches() -> list[list[list[int]]]:
    """Prompts of many lengths; many that share a prefix, cold and warm; some alone."""
    source = random.Random(0)
    mixed = [prompt(n, source) for n in (1, 3, 17, 64, 100, 129, 300, 511, 700, 16, 15, 33)]
    prefix = prompt(400, source)
    sharing = [prefix + prompt(source.randint(1, 60), source) for _ in range(24)]
    return [mixed, mixed, sharing, sharing, sharing[:1], mixed[5:6]]


@torch.inference_mode()
def logits_of(model: PreTrainedModel, ids: list[int], answer: list[int]) -> Tensor:
    """Those from which each token of the answer was chosen: float32 [T, V]."""
    logits: Tensor = model(torch.tensor([ids + answer[:-1]], device="cuda")).logits
    return logits[0, len(ids) - 1 :].float()


def assert_chosen(
    folder: Path, model: PreTrainedModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    """Each token is the best of the float32 reference, or as near to it as rounding can make up.

    That is twice the farthest that bfloat16 moves a logit in transformers.
    """
    rough = type(model).from_pretrained(folder, dtype=torch.bfloat16).eval().cuda()
    gaps = [0.0]
    rounding = [0.0]
    for ids, answer in zip(prompts, answers, strict=True):
        logits_TV = logits_of(model, ids, answer)
        chosen_T1 = logits_TV.gather(1, torch.tensor(answer, device="cuda")[:, None])
        gaps.append(float((logits_TV.amax(dim=1, keepdim=True) - chosen_T1).max()))
        rounding.append(float((logits_of(rough, ids, answer) - logits_TV).abs().max()))
    assert max(gaps) < 2 * max(rounding) < float(logits_TV.std())


def assert_references_tokens(folder: Path, model: PreTrainedModel, options: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    # A pool of a given size, so that several of these tests can share a GPU.
    sizes = {"dtype": "bfloat16", "max_seq_len": 1024, "max_running_requests": 32}
    sizes["num_pages"] = 65536 // options.get("page_size", 16)
    with LLM(folder, skip_tokenizer_init=True, **{**sizes, **options}) as llm:
        for batch in batches():
            answers = [out.token_ids for out in llm.generate(batch, params, use_tqdm=False)]
            assert all(len(answer) == 40 for answer in answers)
            assert_chosen(folder, model, batch, answers)
            check_integrity(llm)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cuda_graph_max_bs": 0},
        {"overlap": False},
        {"overlap": False, "cuda_graph_max_bs": 0},
        {"max_prefill_length": 50},
        {"cuda_graph_max_bs": 0, "max_prefill_length": 50},
        {"page_size": 1},
        {"page_size": 16, "cache": "naive"},
        {"num_pages": 30},
        {"attn": "torch"},
        {"attn": "triton"},
        {"attn": "triton", "cuda_graph_max_bs": 0, "max_prefill_length": 50, "page_size": 1},
        {"attn": "triton,fi"},
        {"attn": "triton", "dtype": "float16"},
        {"attn": "fi"},
        {"attn": "fi", "cuda_graph_max_bs": 0, "max_prefill_length": 50},
        {"attn": "fa"},
        {"attn": "fa", "cuda_graph_max_bs": 0, "page_size": 128, "max_prefill_length": 50},
        {"attn": "fa,fi"},
        {"attn": "fa,fi", "cuda_graph_max_bs": 0, "max_prefill_length": 50},
        {"attn": "fi,trtllm"},
        {"attn": "fi,trtllm", "overlap": False},
        {"tp": 2, "comm": "torch"},
        {"tp": 2, "comm": "pynccl"},
        {"tp": 2, "comm": "peer"},
        {"tp": 2, "cuda_graph_max_bs": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads"),
    [
        ("qwen3", 4, 2),
        ("qwen3", 10, 2),
        ("llama", 8, 2),
        ("qwen3_moe", 4, 2),
        ("olmo3", 4, 2),
        ("smollm3", 4, 2),
    ],
)
def test_tokens_are_the_references(
    models: Models,
    kind: str,
    heads: int,
    kv_heads: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        prefix_groups, "_LEAST_BYTES", -(10**15)
    )  # to read few shared tokens once, too
    for name in options.get("attn", "torch").split(","):
        pytest.importorskip(LIBRARIES.get(name, "torch"), reason=f"{name} is not installed")
    if torch.cuda.device_count() < options.get("tp", 1):
        pytest.skip("needs more GPUs")
    assert_references_tokens(*models(kind, heads, kv_heads), options)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(8, 2, 32), (8, 2, 80), (2, 1, 512), (32, 2, 256), (64, 4, 128), (16, 1, 128), (24, 1, 64)],
)
def test_heads_of_any_width_and_number_choose_the_references_tokens(
    models: Models, heads: int, kv_heads: int, head_dim: int
) -> None:
    """FlashInfer takes few widths. For many query heads a kv head, it needs much scratch memory."""
    folder, model = models("qwen3", heads, kv_heads, head_dim)
    assert_references_tokens(folder, model, {"max_running_requests": 256})


@pytest.mark.parametrize("options", [{}, {"cuda_graph_max_bs": 0, "max_prefill_length": 50}])
@pytest.mark.parametrize(
    ("kind", "heads"), [("qwen3", 4), ("llama", 8), ("qwen2", 4), ("qwen3_moe", 4), ("olmo3", 4)]
)
def test_tiles_of_rows_choose_the_references_tokens(
    models: Models, kind: str, heads: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Hopper, which only weights larger than these have."""
    for limit in ("_FEWEST_NUMBERS", "_FEWEST_ROWS", "_FEWEST_TILES"):
        monkeypatch.setattr(row_tiles, limit, 0)
    assert_references_tokens(*models(kind, heads, 2), options)


@pytest.mark.parametrize("attn", [None, "fa", "fa,fi", "fi,fi", "fi,trtllm", "triton"])
def test_hundreds_of_decodes_beside_prompts_choose_the_references_tokens(
    models: Models, attn: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In captured steps, whose tokens decodes and prompts share. Two of three share a prefix."""
    monkeypatch.setattr(prefix_groups, "_LEAST_BYTES", -(10**15))
    for name in (attn or "fi").split(","):
        pytest.importorskip(LIBRARIES.get(name, "torch"), reason=f"{name} is not installed")
    folder, model = models("qwen3", 4, 2)
    source = random.Random(3)
    prefixes = [[], prompt(64, source), prompt(96, source)]
    rests = [prompt(source.randint(20, 150), source) for _ in range(420)]
    prompts = [prefixes[i % 3] + rest for i, rest in enumerate(rests)]
    params = [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=source.randint(150, 250))
        for _ in prompts
    ]
    most_decodes = most_groups = 0
    prepare = GraphRunner.prepare

    def watch(
        self: GraphRunner, plan: BatchPlan, writes: TableWrites, key: GraphKey
    ) -> PreparedReplay:
        nonlocal most_decodes, most_groups
        if key.num_prompts and plan.num_decodes < len(plan.slices):
            most_decodes = max(most_decodes, plan.num_decodes)
            most_groups = max(most_groups, len(plan.prefix_groups))
        return prepare(self, plan, writes, key)

    monkeypatch.setattr(GraphRunner, "prepare", watch)
    sizes = {"max_seq_len": 512, "max_running_requests": 512, "num_pages": 65536 // 16}
    with LLM(folder, skip_tokenizer_init=True, attn=attn, max_prefill_length=200, **sizes) as llm:
        answers = [out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
        check_integrity(llm)
    assert most_decodes > 257
    assert most_groups == 2
    assert_chosen(folder, model, prompts, answers)


NOT_SPARSE = [kind for kind in KINDS if kind != "sparse_moe"]


@pytest.mark.parametrize(
    ("kind", "tp", "ep"),
    [
        *((kind, tp, False) for kind in NOT_SPARSE for tp in (1, 2, 4)),
        ("qwen3_moe", 2, True),
        ("qwen3_moe", 4, True),
    ],
)
def test_any_number_of_ranks_chooses_the_references_tokens(
    models: Models, kind: str, tp: int, ep: bool
) -> None:
    """Of every architecture; four ranks replicate the kv heads.

    Of mixtures that with all experts: rounding chooses others in the sparse one, in transformers,
    too, and moves its logits by more than they differ.
    """
    if torch.cuda.device_count() < tp:
        pytest.skip("needs more GPUs")
    folder, model = models(kind, 4, 2)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    sizes = {"dtype": "bfloat16", "max_seq_len": 1024, "max_running_requests": 32}
    with LLM(folder, skip_tokenizer_init=True, tp=tp, ep=ep, num_pages=4096, **sizes) as llm:
        for batch in batches():
            answers = [out.token_ids for out in llm.generate(batch, params, use_tqdm=False)]
            assert_chosen(folder, model, batch, answers)


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_with_whole_experts_choose_the_tokens_of_one(models: Models, tp: int) -> None:
    """A token has 4 of 16 experts, so a rank may have none of them. In float32, for few tokens."""
    if torch.cuda.device_count() < tp:
        pytest.skip("needs more GPUs")
    folder, _ = models("sparse_moe", 4, 2)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    sizes = {"dtype": "float32", "max_seq_len": 1024, "max_running_requests": 32, "num_pages": 1024}
    answers = []
    for options in ({}, {"tp": tp, "ep": True}):
        with LLM(folder, skip_tokenizer_init=True, **{**sizes, **options}) as llm:
            outputs = llm.generate(batches()[0], params, use_tqdm=False)
            answers.append([out.token_ids for out in outputs])
    assert answers[0] == answers[1]


def check_integrity(llm: LLM) -> None:
    """Check the scheduler, if it is in this process."""
    if isinstance(llm._ranks, LocalRank):
        llm._ranks.scheduler.check_integrity()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_abandoned_streams_leave_nothing_behind(models: Models, tp: int) -> None:
    """Requests that end at any moment, by abort or length, while the device is a step ahead.

    Ranks that do not plan the same steps end with an error, and pages that are left would soon be
    missing: all of them are in use most of the time.
    """
    if torch.cuda.device_count() < tp:
        pytest.skip("needs more GPUs")
    folder, _ = models("qwen3", 4, 2)
    source = random.Random(1)
    sizes = {"max_seq_len": 512, "max_running_requests": 32, "num_pages": 40}
    with LLM(folder, skip_tokenizer_init=True, tp=tp, **sizes) as llm:
        for _ in range(100):
            prompts = [prompt(source.randint(1, 200), source) for _ in range(source.randint(1, 40))]
            params = [
                SamplingParams(
                    temperature=source.choice([0.0, 1.0]),
                    max_tokens=source.randint(1, 60),
                    ignore_eos=True,
                )
                for _ in prompts
            ]
            outputs = llm._run(prompts, params, wants_text=False)
            for _ in range(source.randint(1, 300)):
                if next(outputs, None) is None:
                    break
                check_integrity(llm)
            outputs.close()
            check_integrity(llm)
        if isinstance(llm._ranks, LocalRank):
            assert llm._ranks.scheduler.is_idle


def test_an_engine_after_another_has_as_much_memory(models: Models) -> None:
    folder, _ = models("qwen3", 4, 2)
    pages = []
    for _ in range(2):
        with LLM(
            folder, skip_tokenizer_init=True, max_running_requests=4096, cuda_graph_max_bs=4
        ) as llm:
            pages.append(llm._ranks.scheduler._executor.limits.num_pages)
    assert abs(pages[1] - pages[0]) < 0.01 * pages[0]


class FullMemory:
    """The forward function of an engine's model, for which all free memory is taken once."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_failures = 0
        self._forward = engine._model.forward
        monkeypatch.setattr(engine._model, "forward", self)

    def __call__(self, batch: Batch, context: Context) -> Tensor:
        if self.num_failures:
            return self._forward(batch, context)
        taken = take_free_memory()
        try:
            return self._forward(batch, context)
        except torch.OutOfMemoryError:
            self.num_failures += 1
            raise
        finally:
            taken.clear()


def take_free_memory() -> list[Tensor]:
    torch.cuda.empty_cache()
    taken = []
    num_bytes = torch.cuda.mem_get_info()[0]
    while num_bytes >= 512:
        try:
            taken.append(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            num_bytes //= 2
    return taken


@pytest.mark.parametrize("overlap", [False, True])
def test_full_memory_ends_the_newest_request_alone(
    models: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, overlap: bool
) -> None:
    """That of a prompt which is too long for a graph, while others decode in theirs."""
    num_tokens = 5000  # no graph has more than 4,096
    source = random.Random(3)
    config = SchedulerConfig(
        model=str(copy_with_tokenizer(models("qwen3", 4, 2)[0], tmp_path / "model")),
        dtype="bfloat16",
        overlap=overlap,
        seed=0,
        num_pages=100,
        max_running_requests=16,
        max_prefill_length=8192,
        target_itl_ms=0,
    ).resolve(detect_hardware())
    engine = WatchedEngine(config)
    host = Host(engine, config)
    prompts = [prompt(30, source) for _ in range(4)]
    expected = [answer.tokens for answer in host.ask(prompts, greedy(40))]
    host.outbox.msgs.clear()

    memory = FullMemory(engine, monkeypatch)
    host.inbox.msgs = [UserMsg(uid, pack_ids(ids), greedy(40)) for uid, ids in enumerate(prompts)]
    for _ in range(10):
        host.scheduler.step()
    host.inbox.msgs = [UserMsg(4, pack_ids(prompt(num_tokens, source)), greedy(40))]
    while host.inbox.msgs or not host.scheduler.is_idle:
        host.scheduler.step()
        host.scheduler.check_integrity()

    assert memory.num_failures == 1
    errors = {msg.uid: msg.error.code for msg in host.outbox.msgs if msg.error}
    assert errors == {4: "out_of_memory"}
    for uid, tokens in enumerate(expected):
        assert [t for msg in host.outbox.msgs if msg.uid == uid for t in msg.tokens] == tokens
    [answer] = host.ask([prompt(num_tokens, source)], greedy(5))
    assert len(answer.tokens) == 5


@pytest.mark.parametrize("kind", ["llama", "sparse_moe"])
def test_a_seeded_token_is_the_same_on_both_devices(models: Models, kind: str) -> None:
    folder, _ = models(kind, 8, 2)
    params = SamplingParams(temperature=0.8, max_tokens=1, seed=7)
    source = random.Random(2)
    prompts = [prompt(20, source) for _ in range(40)]
    answers = []
    for device in ("cuda", "cpu"):
        with LLM(
            folder,
            skip_tokenizer_init=True,
            device=device,
            dtype="float32",
            attn="torch",
            max_seq_len=64,
        ) as llm:
            answers.append([out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)])
    assert answers[0] == answers[1]


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Compare every choice of tokens with an eager one of equal logits; count steps and writes."""
    log = Counter[str]()
    staging = Staging(engine._device)
    sample_slices = engine._sampler.sample_slices
    write_tables = engine._write_tables
    engine.grammar_masks.fill(0)  # until masks are made, no token is allowed

    def check_tokens(
        slices: list[ReqSlice], inputs: SamplingInputs, graph: SamplingGraph | None
    ) -> SampledTokens:
        assert inputs.logits_BV is not None
        unmasked_BV = inputs.logits_BV.clone()
        sampled = sample_slices(slices, inputs, graph)
        tokens = sampled.token_B.tolist()

        numbers, is_filtered = send_sampling(slices, staging)
        for name, given, expected in zip(numbers._fields, inputs.numbers, numbers, strict=True):
            assert torch.equal(given[: len(expected)], expected), name
        plain = [i for i, req_slice in enumerate(slices) if not wants_processing(req_slice)]
        eager_B = sample_logits(
            inputs.logits_BV[: len(slices)], numbers, engine._vocab, is_filtered=is_filtered
        )
        assert torch.equal(sampled.token_B[plain], eager_B[plain])

        for i, req_slice in enumerate(slices):
            written = engine.context.token_pool_RL[req_slice.row, req_slice.end]
            assert int(written) == tokens[i]
            if req_slice.req.params.grammar and req_slice.req.finish is None:
                mask = engine.grammar_masks[int(numbers.mask_B[i])]
                assert mask[tokens[i] // 32] >> tokens[i] % 32 & 1
        logprobs = sampled.logprobs.read() if sampled.logprobs else {}
        for i, token_logprobs in logprobs.items():
            expected_logprob = float(unmasked_BV[i].float().log_softmax(0)[tokens[i]])
            assert token_logprobs.logprob == pytest.approx(expected_logprob, abs=1e-4)

        log["steps"] += 1
        log["replayed"] += graph is not None and len(plain) == len(slices)
        return sampled

    def count_writes(writes: TableWrites) -> None:
        log["writes"] += len(writes.pages) + len(writes.tokens) > 0
        write_tables(writes)

    monkeypatch.setattr(engine._sampler, "sample_slices", check_tokens)
    monkeypatch.setattr(engine, "_write_tables", count_writes)
    return log


def copy_with_tokenizer(folder: Path, copy: Path) -> Path:
    """Copy a model, and give it a tokenizer for grammars; it knows fewer tokens than the model."""
    shutil.copytree(folder, copy)
    tiny_tokenizer().save_pretrained(copy)
    for name in ("config.json", "generation_config.json"):
        text = (copy / name).read_text()
        (copy / name).write_text(
            text.replace(f'"eos_token_id": {VOCAB_SIZE - 1}', f'"eos_token_id": {EOS_ID}')
        )
    return copy


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": False}, {"attn": "fa"}, {"dtype": "float16"}, {"num_pages": 100}, {"tp": 2}],
    ids=str,
)
def test_captured_steps_are_those_that_are_computed(
    models: Models, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With every kind of sampling parameters, of some or all requests.

    Logits are judged by the greedy answers, beyond the first page of each.
    """
    pytest.importorskip(LIBRARIES[options.get("attn", "fi")])
    if torch.cuda.device_count() < options.get("tp", 1):
        pytest.skip("needs more GPUs")
    folder, model = models("qwen3", 4, 2)
    with_tokenizer = copy_with_tokenizer(folder, tmp_path / "with_tokenizer")
    source = random.Random(3)
    prompts = [prompt(source.randint(1, 90), source) for _ in range(21)]
    sizes = {"max_seq_len": 256, "page_size": 16, "max_running_requests": 24, "cache": "naive"}
    with LLM(
        with_tokenizer, skip_tokenizer_init=True, **{"dtype": "bfloat16", **sizes, **options}
    ) as llm:
        log = None  # of other processes there is none
        if isinstance(llm._ranks, LocalRank):
            log = watch(llm._ranks.scheduler._executor, monkeypatch)
        for kind, asked in SAMPLING_KINDS.items():
            each = [
                {"max_tokens": 60 + i, "seed": i, "ignore_eos": True, **asked[i % len(asked)]}
                for i in range(21)
            ]
            # Grammars are compiled before, so that all requests are admitted in one step.
            grammars = [fields["grammar"] for fields in each if "grammar" in fields]
            for grammar in grammars:
                params = SamplingParams(max_tokens=1, grammar=grammar)
                llm.generate(prompts[:1], params, use_tqdm=False)
            if log is not None:
                log.clear()

            outs = llm.generate(
                prompts, [SamplingParams(**fields) for fields in each], use_tqdm=False
            )
            greedy = {"max_tokens", "seed", "ignore_eos", "temperature", "logprobs"}
            plain = [i for i, fields in enumerate(each) if fields.keys() <= greedy]
            judged = [i for i in plain if each[i].get("temperature") == 0.0]
            if judged:
                answers = [outs[i].token_ids for i in judged]
                assert_chosen(folder, model, [prompts[i] for i in judged], answers)
            is_replayed = kind != "processed" and not (kind == "filtered" and "dtype" in options)
            if log is not None and kind != "all" and "num_pages" not in options:
                assert log["steps"] > 60, (kind, log)
                assert (log["replayed"] > 50) == is_replayed, (kind, log)
                assert log["writes"] == 1, "pages are appended by graphs"
            check_integrity(llm)
        if "num_pages" in options:
            assert llm._ranks.scheduler.statistics.counts.num_retractions > 0


def triton_kernels() -> list[RememberedKernel]:
    modules = (
        gpu.activation,
        gpu.attention,
        gpu.experts,
        gpu.linear,
        gpu.mask,
        gpu.norm,
        gpu.rotary,
        gpu.sample,
        gpu.tables,
    )
    named = itertools.chain.from_iterable(vars(module).values() for module in modules)
    return [kernel for kernel in named if isinstance(kernel, RememberedKernel)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"cuda_graph_max_bs": 0},
        {"cuda_graph_max_bs": 8},
        {"num_pages": 100},
        {"page_size": 1},
        {"dtype": "float16"},
        {"attn": "torch"},
        {"attn": "fa"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["qwen3", "sparse_moe", "olmo3"])
def test_nothing_is_compiled_while_serving(
    models: Models,
    kind: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Prompts of odd lengths come beside decodes, with all kinds of parameters.

    To read a compiled kernel from a file counts, too. With -s it says how often torch took memory
    from the device.
    """
    library = LIBRARIES.get(options.get("attn", "fi"), "torch")
    pytest.importorskip(library, reason=f"{library} is not installed")
    folder = copy_with_tokenizer(models(kind, 4, 2)[0], tmp_path / "model")
    for kernel in triton_kernels():
        kernel.forget()  # those of the tests before
    compiled: list[str] = []
    monkeypatch.setattr(
        knobs.runtime, "jit_cache_hook", lambda **about: compiled.append(about["repr"])
    )
    sizes = {"max_seq_len": 1024, "max_running_requests": 24, "max_prefill_length": 300}
    with LLM(folder, skip_tokenizer_init=True, **{"dtype": "bfloat16", **sizes, **options}) as llm:
        assert compiled, "the hook works"
        compiled.clear()
        engine = llm._ranks.scheduler._executor
        stagings = (engine._staging, engine._extra_staging)
        capacities = [staging.capacity for staging in stagings]
        num_allocations = torch.cuda.memory_stats()["num_device_alloc"]

        source = random.Random(4)
        kinds = itertools.cycle(SAMPLING_KINDS["all"])
        for num_prompts in (1, 2, 3, 1, 5, 7, 11, 15, 16, 17, 19, 20, 33):
            prompts = [prompt(source.choice([1, 3, 17, 33, 90, 701]), source)] * (num_prompts == 1)
            prompts += [
                prompt(2 * source.randrange(60) + 1, source)
                for _ in range(num_prompts - len(prompts))
            ]
            lengths = [{"max_tokens": source.randint(5, 40), "ignore_eos": True} for _ in prompts]
            for each in (lengths, [{**length, **next(kinds)} for length in lengths]):
                params = [SamplingParams(**fields) for fields in each]
                llm.generate(prompts, params, use_tqdm=False)
                assert not compiled, (num_prompts, each)

        assert [staging.capacity for staging in stagings] == capacities
        taken = torch.cuda.memory_stats()["num_device_alloc"] - num_allocations
        print(f"torch took memory from the device {taken} times")


def test_memory_that_is_not_owned_serves_others() -> None:
    x_BV = torch.randn(64, 1 << 16, dtype=torch.bfloat16, device="cuda")[:, 3:]
    before = torch.cuda.memory_allocated()
    view_BV = unowned(x_BV)
    assert torch.equal(view_BV, x_BV)
    assert view_BV.data_ptr() == x_BV.data_ptr()
    assert view_BV.stride() == x_BV.stride()
    view_BV[5] = 7.0
    assert (x_BV[5] == 7.0).all()
    del x_BV
    assert torch.cuda.memory_allocated() < before


def test_what_is_sent_arrives_however_fast_and_much() -> None:
    source = np.random.default_rng(0)
    staging = Staging(torch.device("cuda"), capacity=64)
    structured = np.zeros(9, dtype=[("a", "<f4"), ("b", "<i4")])
    structured["a"] = source.random(9)
    structured["b"] = np.arange(9)
    places: dict[tuple[int, ...], list[int]] = {}
    for turn in range(400):
        lengths = tuple(source.integers(0, 5 if turn < 200 else 500, size=3).tolist())
        ints = source.integers(0, 99, lengths[0]).astype(np.int32)
        floats = source.random(lengths[1]).astype(np.float32)
        sent = (
            ints,
            floats,
            structured["a"],
            structured["b"],
            np.arange(lengths[2], dtype=np.int32),
        )
        received = staging.send(*sent)
        if turn < 200:  # before it grew
            addresses = [x.data_ptr() for x in received]
            assert places.setdefault(lengths, addresses) == addresses
        copies = [x.clone() for x in received]
        num_others = 40 if turn < 300 else 2000
        staged = staging.stage(np.full(num_others, -1, dtype=np.int32))
        for array, x in zip(sent, received, strict=True):
            assert np.array_equal(x.cpu().numpy(), array), "changed before its time"
        [others] = staged.start()
        assert (others == -1).all()
        for array, copy in zip(sent, copies, strict=True):
            assert np.array_equal(copy.cpu().numpy(), array)
