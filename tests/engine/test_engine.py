"""The limits, pages and dtype of an engine, by checkpoint and options; and a step by hand."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from minisgl.core import BatchPlan, Req, ReqSlice, RowCopy, SamplingParams, TableWrites
from minisgl.distributed import DistributedInfo, SingleCommunicator
from minisgl.engine import (
    Engine,
    EngineLimits,
    kernel_builds,
    memory,
    model_loader,
    pool_size,
)
from minisgl.engine.memory import free_if_out_of_memory, out_of_memory_is_explained
from minisgl.engine.model_loader import may_pack
from minisgl.engine.pool_size import fit_limits, fit_num_pages, fit_num_rows
from minisgl.engine.warm_up import largest_step
from minisgl.errors import CheckpointError, ConfigError
from tests.checkpoints import (
    ARCHITECTURES,
    CONTEXT,
    EOS_ID,
    IM_END_ID,
    VOCAB_SIZE,
    save_checkpoint,
    tiny_checkpoint,
    tiny_model,
)
from tests.distributed.groups import Alone
from tests.engine.harness import Host, WatchedEngine, config_of, greedy, random_prompts
from tests.engine.oracle import Oracle

CPU = torch.device("cpu")
Checkpoints = Callable[[str], Path]


def limits_of(folder: Path, **options: Any) -> tuple[int, int]:
    limits = WatchedEngine(config_of(folder, **options)).limits
    return limits.max_seq_len, limits.num_pages


def test_a_token_that_takes_all_experts_is_multiplied_with_all_weights(tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path, num_experts_per_tok=4)
    loaded = WatchedEngine(config_of(folder))._loaded
    weights = load_file(folder / "model.safetensors")
    del weights["model.embed_tokens.weight"]
    assert loaded.multiplied_bytes == sum(
        weight.nbytes for weight in weights.values() if weight.dim() == 2
    )
    comm = SimpleNamespace(info=DistributedInfo(0, 2, ep=True))
    one_of_two = replace(loaded, comm=comm)
    num_bytes, num_bytes_of_all = (
        x.multiplied_bytes - x.weight_bytes for x in (one_of_two, loaded)
    )
    assert 2 * num_bytes == num_bytes_of_all


def test_limits_are_those_of_the_checkpoint(checkpoint: Checkpoints) -> None:
    limits = WatchedEngine(config_of(checkpoint("llama"), page_size=8, num_pages=100)).limits
    assert (limits.max_seq_len, limits.num_pages, limits.page_size) == (CONTEXT, 100, 8)
    assert limits.vocab_size == VOCAB_SIZE
    assert limits.eos_ids == {EOS_ID, IM_END_ID}


@pytest.mark.parametrize("page_size", [1, 8])
def test_a_tokens_keys_and_values_have_the_bytes_of_one_layer(
    checkpoint: Checkpoints, page_size: int
) -> None:
    engine = WatchedEngine(config_of(checkpoint("llama"), page_size=page_size, num_pages=100))
    keys = engine.context.kv_pool.k_cache(0)[0, 0]
    assert engine.limits.kv_bytes == 2 * keys.numel() * keys.element_size()


def test_a_pool_smaller_than_the_context_limits_it(checkpoint: Checkpoints) -> None:
    assert limits_of(checkpoint("llama"), page_size=8, num_pages=5) == (40, 5)


@pytest.mark.parametrize(("num_pages", "is_shorter"), [(31, True), (32, False)])
def test_a_pool_is_shorter_than_the_context_if_more_pages_would_lengthen_it(
    num_pages: int, is_shorter: bool, checkpoint: Checkpoints
) -> None:
    engine = WatchedEngine(config_of(checkpoint("llama"), page_size=8, num_pages=num_pages))
    assert engine.limits.is_pool_shorter == is_shorter


def test_the_context_can_be_shortened(checkpoint: Checkpoints) -> None:
    assert limits_of(checkpoint("llama"), max_seq_len=100)[0] == 100


def test_the_context_cannot_be_lengthened(checkpoint: Checkpoints) -> None:
    with pytest.raises(
        ConfigError, match=rf"--max-seq-len must be <= {CONTEXT} \(the model's context\), got 257"
    ):
        limits_of(checkpoint("llama"), max_seq_len=CONTEXT + 1)


@pytest.mark.parametrize("num_requests", [2**31 - 1, (2**31 - 1) // (CONTEXT + 1)])
def test_more_requests_than_the_tables_can_hold_are_refused_with_their_bound(
    num_requests: int, checkpoint: Checkpoints
) -> None:
    most = (2**31 - 1) // (CONTEXT + 1) - 1
    bound = f"--max-running-requests must be <= {most} with a context of {CONTEXT} tokens"
    with pytest.raises(ConfigError, match=f"{bound}, got {num_requests}"):
        limits_of(checkpoint("llama"), max_running_requests=num_requests)


def test_whole_experts_of_a_model_without_experts_are_refused(checkpoint: Checkpoints) -> None:
    config = config_of(checkpoint("llama"), tp=2, ep=True)
    with pytest.raises(ConfigError, match=r"--ep needs a model with experts, Llama.* has 0"):
        Engine(config, DistributedInfo(0, 2, ep=True))


def test_a_sliding_window_does_not_end_the_context(tmp_path: Path) -> None:
    folder = tiny_checkpoint("mistral", tmp_path, sliding_window=24)
    assert limits_of(folder)[0] == CONTEXT


def test_a_damaged_checkpoint_is_an_error_of_the_engine(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    (folder / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        Engine(config_of(folder), SingleCommunicator().info)


FREE = 1_000_000
PAGE_BYTES = 1_000


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_pages": 7}, 7),
        ({"memory_ratio": 0.5}, 500),
        ({"memory_ratio": 0.25, "tp": 2}, 125),
        ({"memory_ratio": 1.0, "max_running_requests": 1}, 1000),
        ({"memory_ratio": 0.0011}, 1),
    ],
)
def test_pages_are_as_many_as_asked_for_or_affordable(
    options: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: FREE)
    config = config_of(
        Path(), **{"num_pages": None, "page_size": 4, "max_running_requests": 32, **options}
    )
    assert fit_num_pages(config, PAGE_BYTES, CPU, SingleCommunicator()) == expected


@pytest.mark.parametrize(
    ("free", "options", "expected"),
    [
        (2**20, {}, 512),
        (2**20 - 4, {}, 256),
        (2**20, {"memory_ratio": 0.5}, 256),
        (0, {"max_running_requests": 3}, 3),
        (2**30, {"max_running_requests": 3}, 3),
    ],
)
def test_more_requests_run_where_memory_has_room_for_them(
    free: int, options: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token takes a byte here, so 2**20 are 2,048 for each of 512 requests."""
    monkeypatch.setattr(pool_size, "free_bytes", lambda *_: free)
    auto = {"max_running_requests": None, "page_size": 4, "memory_ratio": 1.0}
    config = replace(config_of(Path(), **{**auto, **options}), device="cuda")
    assert fit_num_rows(config, 4, CPU, SingleCommunicator()) == expected


def test_what_loading_has_freed_counts_as_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the second copy of a tied head, which torch keeps until it is asked to give it back."""
    loaded = SimpleNamespace(
        kv_shape=(1, 1, 1),  # 4 bytes a token
        dtype=torch.float16,
        max_seq_len=4,
        config=SimpleNamespace(vocab_size=VOCAB_SIZE, eos_ids=frozenset()),
        device=torch.device("cuda"),
        comm=SingleCommunicator(),
    )
    free = [4 * 2**20 - 1]
    monkeypatch.setattr(pool_size, "return_memory", lambda: free.append(4 * 2**20))
    monkeypatch.setattr(pool_size, "free_bytes", lambda *_: free[-1])
    monkeypatch.setattr(pool_size, "_agree_on", lambda number, *_: number)
    auto = {"max_running_requests": None, "page_size": 1, "memory_ratio": 1.0, "num_pages": 9}
    config = replace(config_of(Path(), **auto), device="cuda")
    assert fit_limits(config, loaded).num_rows == 512  # type: ignore[arg-type]


def test_memory_is_not_why_a_cpu_runs_more_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_size, "free_bytes", lambda *_: 2**40)
    config = config_of(Path(), max_running_requests=None, memory_ratio=0.5)
    assert fit_num_rows(config, 4, CPU, SingleCommunicator()) == 256


def test_what_steps_take_is_not_given_to_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: FREE)
    config = config_of(
        Path(), num_pages=None, page_size=4, memory_ratio=0.5, max_running_requests=32
    )
    pages = fit_num_pages(config, PAGE_BYTES, CPU, SingleCommunicator(), step_bytes=400_000)
    assert pages == 300


def test_pages_are_not_more_than_int32_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 2**50)
    config = config_of(Path(), num_pages=None, page_size=4, memory_ratio=1.0)
    assert (fit_num_pages(config, PAGE_BYTES, CPU, SingleCommunicator()) + 1) * 4 < 2**31


@pytest.mark.parametrize("is_of_step", [False, True], ids=["a tensor", "a step"])
def test_a_full_gpu_is_explained(is_of_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 * 10**8, 80 * 10**9))
    message = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB."
    )
    expected = (
        r"the GPU's memory is full, loading: 0.3 of 80.0 GB are free. "
        r"Tried to allocate 2.00 GiB; take a smaller model$"
    )

    def fill(_: None) -> None:
        raise torch.OutOfMemoryError(message)

    explained = out_of_memory_is_explained("loading", "take a smaller model")
    with pytest.raises(ConfigError, match=expected), explained:
        if is_of_step:
            free_if_out_of_memory(fill, None)
        fill(None)


def small_limits(num_rows: int, page_size: int) -> EngineLimits:
    return EngineLimits(
        page_size=page_size,
        max_seq_len=10,
        num_pages=1,
        num_rows=num_rows,
        vocab_size=VOCAB_SIZE,
        eos_ids=frozenset(),
        kv_bytes=1,
    )


@pytest.mark.parametrize(("rows", "expected"), [(5, [1, 1, 9, 9, 2]), (3, [9, 9, 2]), (2, [9, 9])])
def test_the_largest_step_has_all_prompt_tokens_and_all_requests(
    rows: int, expected: list[int]
) -> None:
    config = config_of(Path(), max_prefill_length=20)
    plan = largest_step(config, small_limits(rows, page_size=4))
    assert [len(req_slice) for req_slice in plan.slices] == expected
    assert plan.num_decodes == expected.count(1)


@pytest.mark.parametrize(
    ("rows", "page_size", "expected"),
    [(10, 4, [(4, [*range(8)])]), (9, 4, []), (10, 10, [])],
    ids=["enough decodes", "too few", "a page is a whole context"],
)
def test_all_decodes_of_the_largest_step_share_a_prefix(
    rows: int, page_size: int, expected: list[tuple[int, list[int]]]
) -> None:
    """Adding up what they find in it takes memory, too."""
    config = config_of(Path(), max_prefill_length=18)
    plan = largest_step(config, small_limits(rows, page_size))
    assert plan.num_decodes == rows - 2
    assert [(group.num_tokens, group.members) for group in plan.prefix_groups] == expected
    for num_tokens, members in expected:
        assert all(plan.slices[member].start == num_tokens for member in members)


def test_memory_for_not_even_one_page_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: FREE)
    config = config_of(Path(), num_pages=None, memory_ratio=0.0001)
    with pytest.raises(
        ConfigError,
        match="of 1,000,000 free bytes steps take 0, and a page 1,000; raise --memory-ratio",
    ):
        fit_num_pages(config, PAGE_BYTES, CPU, SingleCommunicator())


@pytest.mark.parametrize(
    ("pack_weights", "weight_bytes", "expected"),
    [(None, 1000, True), (None, FREE, False), (True, FREE, True), (False, 1, False)],
)
def test_weights_are_packed_if_asked_for_or_if_memory_is_ample(
    pack_weights: bool | None, weight_bytes: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: FREE)
    assert may_pack(config_of(Path(), pack_weights=pack_weights), weight_bytes, CPU) == expected


def test_auto_pages_hold_the_context(checkpoint: Checkpoints) -> None:
    max_seq_len, pages = limits_of(
        checkpoint("llama"), num_pages=None, memory_ratio=0.1, max_running_requests=2
    )
    assert max_seq_len == CONTEXT
    assert pages >= 2 * CONTEXT // 4


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("pack", [False, True])
def test_bfloat16_logits_are_near_those_of_the_oracle(
    arch: str, pack: bool, checkpoint: Checkpoints, oracle: Callable[[str], Oracle]
) -> None:
    prompts = random_prompts([1, 5, 40], VOCAB_SIZE)
    config = config_of(checkpoint(arch), dtype="bfloat16", pack_weights=pack)
    answers = Host(WatchedEngine(config), config).ask(prompts, greedy(1))
    for prompt, answer in zip(prompts, answers, strict=True):
        expected_TV = oracle(arch).logits_after(prompt, answer.tokens)
        assert answer.logits_TV is not None
        error = (answer.logits_TV - expected_TV).norm() / expected_TV.norm()
        assert error < 0.1


def test_float16_logits_are_near_those_of_the_oracle_where_scores_are_large(tmp_path: Path) -> None:
    """Heads whose products of queries and keys float16 cannot hold before they are scaled."""
    model = tiny_model("qwen3")
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data *= 60
        layer.self_attn.k_norm.weight.data *= 60
    [prompt] = random_prompts([40], VOCAB_SIZE)
    config = config_of(save_checkpoint(model, tmp_path), dtype="float16")
    [answer] = Host(WatchedEngine(config), config).ask([prompt], greedy(1))
    expected_TV = Oracle(model).logits_after(prompt, answer.tokens)
    assert answer.logits_TV is not None
    error = (answer.logits_TV - expected_TV).norm() / expected_TV.norm()
    assert error < 0.1


@pytest.mark.parametrize(
    ("field", "stored", "computed", "is_said"),
    [
        ("dtype", "float16", "bfloat16", True),
        ("torch_dtype", "float16", "bfloat16", True),
        ("dtype", "float32", "bfloat16", True),
        ("dtype", "float16", "float32", False),
        ("dtype", "bfloat16", "bfloat16", False),
        ("dtype", None, "bfloat16", False),
    ],
)
def test_weights_that_lose_digits_are_one_line_of_the_log(
    field: str,
    stored: str | None,
    computed: str,
    is_said: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps({**config, field: stored}))
    with caplog.at_level(logging.INFO, "minisgl"):
        config = config_of(folder, dtype=computed, pack_weights=False)
        Engine(config, SingleCommunicator().info)
    line = f"the checkpoint is in {stored} and is rounded to {computed}; see --dtype"
    assert caplog.messages.count(line) == is_said


@pytest.mark.parametrize("num_layers", [2, 1])
def test_weights_without_a_place_in_the_model_are_one_line_of_the_log(
    num_layers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    (folder / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING, "minisgl"):
        Engine(config_of(folder), SingleCommunicator().info)
    warned = [
        "the model leaves out 9 of the checkpoint's tensors; see config.json: "
        "model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, "
        "model.layers.1.mlp.gate_proj.weight, model.layers.1.mlp.up_proj.weight, "
        "model.layers.1.post_attention_layernorm.weight, ..."
    ]
    assert caplog.messages == (warned if num_layers == 1 else [])


def test_recommendations_that_no_request_can_follow_are_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_checkpoint("llama", tmp_path) / "generation_config.json"
    unknown = {"typical_p": 0.5, "no_repeat_ngram_size": 3, "suppress_tokens": [5]}
    neutral = {"num_beams": 1, "guidance_scale": 1.0, "bad_words_ids": None, "stop_strings": []}
    path.write_text(json.dumps({"top_p": 0.9, "max_new_tokens": 8, **neutral, **unknown}))
    with caplog.at_level(logging.WARNING, "minisgl"):
        Engine(config_of(tmp_path), SingleCommunicator().info)
    names = "no_repeat_ngram_size, suppress_tokens, typical_p"
    assert [record.message for record in caplog.records] == [
        f"{path}: answers do not follow what it says of {names}"
    ]


@pytest.mark.parametrize(
    ("file", "ids", "shown"),
    [
        ("config.json", -1, "-1"),
        ("generation_config.json", [EOS_ID, VOCAB_SIZE], str(VOCAB_SIZE)),
        ("config.json", [*range(-5, 0), 0], "-5, -4, -3, -2, -1"),
        ("config.json", [*range(-1, -7, -1)], "-6, -5, -4, -3, -2, ..."),
        ("generation_config.json", 10**400, "an integer of 1329 bits"),
        ("generation_config.json", VOCAB_SIZE - 1, None),
        ("config.json", None, None),
    ],
    ids=lambda value: str(value)[:32],
)
def test_an_end_of_sequence_outside_the_vocabulary_is_one_line_of_the_log(
    file: str,
    ids: int | list[int] | None,
    shown: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Answers would only end by their length."""
    path = tiny_checkpoint("llama", tmp_path) / file
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ids}))
    with caplog.at_level(logging.WARNING, "minisgl"):
        Engine(config_of(tmp_path), SingleCommunicator().info)
    line = f"{path}: no answer ends at eos_token_id {shown}, which is not in [0, {VOCAB_SIZE})"
    assert caplog.messages == ([line] if shown is not None else [])


def test_a_model_without_an_end_of_sequence_is_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**fields, "eos_token_id": None}))
    with caplog.at_level(logging.WARNING, "minisgl"):
        Engine(config_of(folder), SingleCommunicator().info)
    assert caplog.messages == [
        f"{folder}: neither config.json nor generation_config.json has an eos_token_id, so an "
        "answer ends at max_tokens, at a stop, or with the context"
    ]


def test_an_end_outside_the_vocabulary_is_said_by_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_checkpoint("llama", tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": -1}))
    monkeypatch.setattr(model_loader, "create_communicator", lambda info, *_: Alone(info.rank, 2))
    with caplog.at_level(logging.WARNING, "minisgl"):
        model_loader.load_model(config_of(tmp_path), DistributedInfo(1, 2))
        assert caplog.messages == []
        model_loader.load_model(config_of(tmp_path), DistributedInfo(0, 2))
        assert len(caplog.messages) == 1


def test_a_model_without_defaults_of_generation_starts_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tiny_checkpoint("llama", tmp_path) / "generation_config.json").unlink()
    with caplog.at_level(logging.WARNING, "minisgl"):
        Engine(config_of(tmp_path), SingleCommunicator().info)
    assert caplog.messages == []


def test_kernels_are_built_before_the_engine_is_ready(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first request would wait for the compiler."""
    built: list[torch.dtype] = []
    monkeypatch.setattr(kernel_builds, "kernels_for", lambda x: built.append(x.dtype))
    Engine(config_of(checkpoint("llama"), dtype="bfloat16"), SingleCommunicator().info)
    assert built == [torch.bfloat16]


def test_a_step_by_hand_computes_chunks_and_samples_at_the_end(checkpoint: Checkpoints) -> None:
    """Two chunks of a prompt sample nothing; the third writes its token to the pool too."""
    engine = Engine(config_of(checkpoint("llama")), SingleCommunicator().info)
    [prompt] = random_prompts([20], VOCAB_SIZE)
    req = Req(
        0, np.array(prompt, dtype=np.int32), SamplingParams(temperature=0.0), max_length=30, seed=0
    )
    req.row = 3
    engine.context.page_table_RP[3, :8] = torch.tensor([9, 2, 4, 0, 7, 30, 31, 32])
    engine.context.token_pool_RL[3, :20] = torch.tensor(prompt)

    spans = [(0, 6, False), (6, 7, False), (7, 20, True)]
    plans = [BatchPlan([ReqSlice(req, *span)]) for span in spans]
    outputs = [engine.sample(engine.launch(engine.prepare(plan))).wait() for plan in plans]

    assert outputs[:2] == [[], []]
    config = config_of(Path())
    [expected] = Host(WatchedEngine(config_of(checkpoint("llama"))), config).ask(
        [prompt], greedy(1)
    )
    assert outputs[2] == expected.tokens
    assert engine.context.token_pool_RL[3, 20] == expected.tokens[0]


def test_rows_are_copied_in_order_after_the_other_writes(checkpoint: Checkpoints) -> None:
    """Rows that are copied may be copied on, and several from one row at once."""
    engine = Engine(config_of(checkpoint("llama")), SingleCommunicator().info)
    page_size = engine.limits.page_size
    pages_RP = engine.context.page_table_RP
    tokens_RL = engine.context.token_pool_RL
    pages_RP.copy_(torch.arange(pages_RP.numel()).view_as(pages_RP))
    tokens_RL.copy_(torch.arange(tokens_RL.numel()).view_as(tokens_RL))
    sources = [0, 0, 0, 2, 0, 0, 5, 9, 0]
    targets = [1, 2, 3, 4, 5, 6, 7, 8, 10]
    lengths = [12, 12, 12, 12, 8, 12, 8, 4, tokens_RL.shape[1]]
    copies = tuple(RowCopy(*numbers) for numbers in zip(sources, targets, lengths, strict=True))
    first = np.zeros(1, dtype=np.int32)
    written = np.full(1, 77, dtype=np.int32)

    expected_pages = pages_RP.clone()
    expected_tokens = tokens_RL.clone()
    expected_pages[0, 0] = expected_tokens[0, 0] = 77
    for copy in copies:
        num_pages = copy.num_tokens // page_size
        expected_pages[copy.target, :num_pages] = expected_pages[copy.source, :num_pages]
        num = copy.num_tokens
        expected_tokens[copy.target, :num] = expected_tokens[copy.source, :num]

    engine._write_tables(TableWrites(first, written, first, written, copies))
    assert torch.equal(pages_RP, expected_pages)
    assert torch.equal(tokens_RL, expected_tokens)
