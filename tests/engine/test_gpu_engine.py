"""The engine on a GPU, in bfloat16, against transformers in float32: tokens differ only where logits nearly tie."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
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
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from minisgl.core import ReqSlice, TableWrites
from minisgl.engine.choose import LogitsStep
from minisgl.engine.engine import Engine
from minisgl.engine.logits import LogprobsOutput, wants_change
from minisgl.engine.record import unowned
from minisgl.engine.sample import BatchSamplingArgs, sample
from minisgl.llm import LLM, SamplingParams
from minisgl.utils.staging import Staging
from tests.checkpoints import EOS_ID, tiny_tokenizer
from tests.engine.test_recorded_steps import KINDS as ASKED

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
}
EXPERTS = {"moe_intermediate_size": 192, "norm_topk_prob": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**EXPERTS, "num_experts": 8, "num_experts_per_tok": 8},
    "sparse_moe": {**EXPERTS, "num_experts": 16, "num_experts_per_tok": 4},
}
LIBRARIES = {"fa": "flash_attn", "fi": "flashinfer", "trtllm": "flashinfer"}
Models = Callable[[str, int, int], tuple[Path, PreTrainedModel]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    @cache
    def make(kind: str, num_heads: int, num_kv_heads: int) -> tuple[Path, PreTrainedModel]:
        torch.manual_seed(0)
        config_class, model_class = KINDS[kind]
        config = config_class(
            vocab_size=VOCAB_SIZE,
            hidden_size=512,
            num_hidden_layers=3,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=128,
            intermediate_size=1024,
            max_position_embeddings=4096,
            initializer_range=0.08,
            eos_token_id=VOCAB_SIZE - 1,
            **OPTIONS.get(kind, {}),
        )
        model = model_class(config).float().eval().cuda()
        folder = tmp_path_factory.mktemp(f"{kind}_{num_heads}_{num_kv_heads}")
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
    gaps, rounding = [0.0], [0.0]
    for ids, answer in zip(prompts, answers, strict=True):
        logits_TV = logits_of(model, ids, answer)
        chosen_T1 = logits_TV.gather(1, torch.tensor(answer, device="cuda")[:, None])
        gaps.append(float((logits_TV.amax(dim=1, keepdim=True) - chosen_T1).max()))
        rounding.append(float((logits_of(rough, ids, answer) - logits_TV).abs().max()))
    assert max(gaps) < 2 * max(rounding) < float(logits_TV.std())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cuda_graph_max_bs": 0},
        {"overlap": False},
        {"overlap": False, "cuda_graph_max_bs": 0},
        {"max_prefill_length": 50},
        {"page_size": 1},
        {"page_size": 16, "cache": "naive"},
        {"num_pages": 30},
        {"attn": "torch"},
        {"attn": "fi"},
        {"attn": "fi", "cuda_graph_max_bs": 0, "max_prefill_length": 50},
        {"attn": "fa"},
        {"attn": "fa", "cuda_graph_max_bs": 0, "page_size": 128, "max_prefill_length": 50},
        {"attn": "fa,fi"},
        {"attn": "fa,fi", "cuda_graph_max_bs": 0, "max_prefill_length": 50},
        {"attn": "fi,trtllm"},
        {"attn": "fi,trtllm", "overlap": False},
        {"tp": 2},
        {"tp": 2, "cuda_graph_max_bs": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads"),
    [("qwen3", 4, 2), ("qwen3", 10, 2), ("llama", 8, 2), ("qwen3_moe", 4, 2)],
)
def test_tokens_are_the_references(
    models: Models, kind: str, heads: int, kv_heads: int, options: dict[str, Any]
) -> None:
    for name in options.get("attn", "torch").split(","):
        pytest.importorskip(LIBRARIES.get(name, "torch"), reason=f"{name} is not installed")
    if torch.cuda.device_count() < options.get("tp", 1):
        pytest.skip("needs more GPUs")
    folder, model = models(kind, heads, kv_heads)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    sizes = {"dtype": "bfloat16", "max_seq_len": 1024, "max_running_requests": 32}
    with LLM(folder, skip_tokenizer_init=True, **sizes, **options) as llm:
        for batch in batches():
            answers = [out.token_ids for out in llm.generate(batch, params, use_tqdm=False)]
            assert all(len(answer) == 40 for answer in answers)
            assert_chosen(folder, model, batch, answers)
            llm._scheduler.check_integrity()


def test_abandoned_streams_leave_nothing_behind(models: Models) -> None:
    """Requests that end at any moment, by abort or length, while the device is a step ahead."""
    folder, _ = models("qwen3", 4, 2)
    source = random.Random(1)
    with LLM(
        folder, skip_tokenizer_init=True, max_seq_len=512, max_running_requests=32, num_pages=40
    ) as llm:
        for _ in range(30):
            prompts = [prompt(source.randint(1, 200), source) for _ in range(source.randint(1, 40))]
            params = [
                SamplingParams(
                    temperature=source.choice([0.0, 1.0]),
                    max_tokens=source.randint(1, 60),
                    ignore_eos=True,
                )
                for _ in prompts
            ]
            news = llm._run(prompts, params, wants_text=False)
            for _ in range(source.randint(1, 300)):
                if next(news, None) is None:
                    break
                llm._scheduler.check_integrity()
            news.close()
            llm._scheduler.check_integrity()
        assert llm._scheduler.is_idle


def test_an_engine_after_another_has_as_much_memory(models: Models) -> None:
    folder, _ = models("qwen3", 4, 2)
    pages = []
    for _ in range(2):
        with LLM(
            folder, skip_tokenizer_init=True, max_running_requests=4096, cuda_graph_max_bs=4
        ) as llm:
            pages.append(llm._scheduler._executor.limits.num_pages)
    assert abs(pages[1] - pages[0]) < 0.01 * pages[0]


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
    """Have every choice of tokens compared with one that is not recorded, of the same logits; count what happens."""
    log, staging = Counter[str](), Staging(engine._device)
    finish, write = engine._chooser.finish, engine._write_tables
    engine.grammar_masks.fill(0)  # until masks are made, no token may be

    def checked(
        step: LogitsStep, parts: list[ReqSlice], logits_BV: Tensor
    ) -> tuple[Tensor, LogprobsOutput | None]:
        before_BV = logits_BV.clone()
        token_B, logprobs = finish(step, parts, logits_BV)
        own, tokens = BatchSamplingArgs.of(parts, staging), token_B.tolist()
        for field in fields(own)[2:]:
            expected = getattr(own, field.name)
            assert torch.equal(getattr(step.args, field.name)[: len(expected)], expected), (
                field.name
            )
        plain = [i for i, part in enumerate(parts) if not wants_change(part)]
        assert torch.equal(token_B[plain], sample(logits_BV, own)[plain])
        written = [int(engine.context.token_pool_RL[part.row, part.end]) for part in parts]
        assert written == tokens
        for i, part in enumerate(parts):
            if part.req.params.grammar and part.req.finish is None:
                assert (
                    engine.grammar_masks[int(own.mask_B[i])][tokens[i] // 32] >> tokens[i] % 32 & 1
                )
        for i, told in (logprobs.read() if logprobs else {}).items():
            assert told.logprob == pytest.approx(
                float(before_BV[i].float().log_softmax(0)[tokens[i]]), abs=1e-4
            )
        log["steps"] += 1
        log["replayed"] += step.recorded is not None and len(plain) == len(parts)
        return token_B, logprobs

    def counted(writes: TableWrites) -> None:
        log["writes"] += len(writes.pages) + len(writes.tokens) > 0
        write(writes)

    monkeypatch.setattr(engine._chooser, "finish", checked)
    monkeypatch.setattr(engine, "_write_tables", counted)
    return log


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": False}, {"attn": "fa"}, {"dtype": "float16"}, {"num_pages": 100}, {"tp": 2}],
    ids=str,
)
def test_recorded_steps_are_those_that_are_computed(
    models: Models, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever is asked, by some or all; logits are judged by the greedy answers, beyond the first page of each."""
    pytest.importorskip(LIBRARIES[options.get("attn", "fi")])
    if torch.cuda.device_count() < options.get("tp", 1):
        pytest.skip("needs more GPUs")
    folder, model = models("qwen3", 4, 2)
    guided = shutil.copytree(folder, tmp_path / "guided")
    tiny_tokenizer().save_pretrained(guided)  # for grammars; it knows fewer tokens
    for name in ("config.json", "generation_config.json"):
        text = (guided / name).read_text()
        (guided / name).write_text(
            text.replace(f'"eos_token_id": {VOCAB_SIZE - 1}', f'"eos_token_id": {EOS_ID}')
        )
    source = random.Random(3)
    prompts = [prompt(source.randint(1, 90), source) for _ in range(21)]
    sizes = {"max_seq_len": 256, "page_size": 16, "max_running_requests": 24, "cache": "naive"}
    with LLM(guided, skip_tokenizer_init=True, **{"dtype": "bfloat16", **sizes, **options}) as llm:
        log = watch(llm._scheduler._executor, monkeypatch)
        for kind, asked in ASKED.items():
            log.clear()
            each = [
                {"max_tokens": 60 + i, "seed": i, "ignore_eos": True, **asked[i % len(asked)]}
                for i in range(21)
            ]
            outs = llm.generate(
                prompts, [SamplingParams(**fields) for fields in each], use_tqdm=False
            )
            greedy = {"max_tokens", "seed", "ignore_eos", "temperature", "logprobs"}
            judged = [
                i
                for i, it in enumerate(each)
                if it.keys() <= greedy and it.get("temperature") == 0.0
            ]
            if judged:
                answers = [outs[i].token_ids for i in judged]
                assert_chosen(folder, model, [prompts[i] for i in judged], answers)
            is_replayed = kind != "changed" and not (kind == "filtered" and "dtype" in options)
            if kind != "all" and "num_pages" not in options:
                assert log["steps"] > 60 and (log["replayed"] > 50) == is_replayed, (kind, log)
                assert log["writes"] == 1, "pages are appended by graphs"
            llm._scheduler.check_integrity()
        assert llm._scheduler._num_retractions > 0 or "num_pages" not in options


def test_memory_that_is_not_owned_serves_others() -> None:
    x_BV = torch.randn(64, 1 << 16, dtype=torch.bfloat16, device="cuda")[:, 3:]
    before = torch.cuda.memory_allocated()
    view_BV = unowned(x_BV)
    assert torch.equal(view_BV, x_BV) and (view_BV.data_ptr(), view_BV.stride()) == (
        x_BV.data_ptr(),
        x_BV.stride(),
    )
    view_BV[5] = 7.0
    assert (x_BV[5] == 7.0).all()
    del x_BV
    assert torch.cuda.memory_allocated() < before


def test_what_is_sent_arrives_however_fast_and_much() -> None:
    source = np.random.default_rng(0)
    staging = Staging(torch.device("cuda"), capacity=64)
    structured = np.zeros(9, dtype=[("a", "<f4"), ("b", "<i4")])
    structured["a"], structured["b"] = source.random(9), np.arange(9)
    places: dict[tuple[int, ...], list[int]] = {}
    for turn in range(400):
        lengths = tuple(source.integers(0, 5 if turn < 200 else 500, size=3).tolist())
        ints, floats = (
            source.integers(0, 99, lengths[0]).astype(np.int32),
            source.random(lengths[1]).astype(np.float32),
        )
        sent = (
            ints,
            floats,
            structured["a"],
            structured["b"],
            np.arange(lengths[2], dtype=np.int32),
        )
        received = staging.send(*sent)
        if turn < 200:  # before it grew
            assert places.setdefault(lengths, [x.data_ptr() for x in received]) == [
                x.data_ptr() for x in received
            ]
        copies = [x.clone() for x in received]
        start = staging.load(np.full(40 if turn < 300 else 2000, -1, dtype=np.int32))
        for array, x in zip(sent, received, strict=True):
            assert np.array_equal(x.cpu().numpy(), array), "changed before its time"
        [others] = start()
        assert (others == -1).all()
        for array, copy in zip(sent, copies, strict=True):
            assert np.array_equal(copy.cpu().numpy(), array)
