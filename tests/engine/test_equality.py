"""Tokens and logits are transformers', however work is chunked, cached, overlapped or retracted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from minisgl.core import SamplingParams
from minisgl.engine import model_runner
from minisgl.utils.staging import Numbers
from tests.checkpoints import (
    ARCHITECTURES,
    CONTEXT,
    VOCAB_SIZE,
    WINDOW,
    save_checkpoint,
    tiny_checkpoint,
    tiny_model,
)
from tests.engine.harness import Host, WatchedEngine, config_of, greedy, random_prompts
from tests.engine.oracle import Oracle, assert_equals_oracle

NUM_TOKENS = 20
GREEDY = greedy(NUM_TOKENS)
PROMPTS = random_prompts([1, 2, 3, 5, 15, 16, 17, 33, 64, 65, 100], VOCAB_SIZE)
SUFFIXES = random_prompts([1, 4, 7], VOCAB_SIZE, seed=1)
RELATED = [
    prompt[: len(prompt) // 2] + suffix
    for prompt, suffix in zip(PROMPTS[-3:], SUFFIXES, strict=True)
]
UNLIMITED = 8192

Engines = Callable[..., WatchedEngine]
Oracles = Callable[[str], Oracle]
archs = pytest.mark.parametrize("arch", ARCHITECTURES)
PAGE_SIZES = [1, 4, 16]
PREFILL_LENGTHS = [1, 7, 64, UNLIMITED]
page_sizes = pytest.mark.parametrize("page_size", PAGE_SIZES)
overlaps = pytest.mark.parametrize("overlap", [False, True], ids=["in_turn", "overlap"])


def ways_to_cut() -> Iterator[tuple[str, int, bool, int]]:
    """Each page size with each prefill length, in turn and with overlap: llama.

    The scheduler cuts every architecture's work alike. A window depends on the cuts: olmo3 takes
    each pair of sizes, and the others take each size, with overlap by turns.
    """
    sizes = list(itertools.product(PAGE_SIZES, PREFILL_LENGTHS))
    for page_size, length in sizes:
        yield "llama", page_size, False, length
        yield "llama", page_size, True, length
    for number, (page_size, length) in enumerate(sizes):
        yield "olmo3", page_size, (number + number // len(PREFILL_LENGTHS)) % 2 == 1, length
    for turn, arch in enumerate(arch for arch in ARCHITECTURES if arch not in ("llama", "olmo3")):
        for number, length in enumerate(PREFILL_LENGTHS, turn):
            yield arch, PAGE_SIZES[number % len(PAGE_SIZES)], number % 2 == 1, length


CUTS = list(ways_to_cut())


@pytest.mark.parametrize(("arch", "page_size", "overlap", "max_prefill_length"), CUTS)
def test_tokens_and_logits_equal_the_oracles_with_a_cold_and_a_warm_cache(
    arch: str,
    page_size: int,
    overlap: bool,
    max_prefill_length: int,
    engine: Engines,
    oracle: Oracles,
) -> None:
    config = config_of(Path(), overlap=overlap, max_prefill_length=max_prefill_length)
    host = Host(engine(arch, page_size), config)

    cold = host.ask(PROMPTS, GREEDY)
    assert_equals_oracle(oracle(arch), PROMPTS, cold)

    # A second turn finds the first answer in the cache.
    second_turn = PROMPTS[4] + cold[4].tokens + SUFFIXES[0]
    warm_prompts = [*PROMPTS, *RELATED, second_turn]
    warm = host.ask(warm_prompts, GREEDY)
    assert_equals_oracle(oracle(arch), warm_prompts, warm)
    longest = PROMPTS.index(max(PROMPTS, key=len))
    assert warm[longest].num_cached == (len(PROMPTS[longest]) - 1) // page_size * page_size
    num_published = len(PROMPTS[4]) + NUM_TOKENS - 1  # the last token is not computed
    assert warm[-1].num_cached == num_published // page_size * page_size


@archs
@page_sizes
@overlaps
def test_tokens_and_logits_equal_the_oracles_without_a_prefix_cache(
    arch: str, page_size: int, overlap: bool, engine: Engines, oracle: Oracles
) -> None:
    config = config_of(Path(), cache="naive", overlap=overlap, max_prefill_length=64)
    host = Host(engine(arch, page_size), config)
    for _ in range(2):
        answers = host.ask(PROMPTS, GREEDY)
        assert_equals_oracle(oracle(arch), PROMPTS, answers)
        assert all(answer.num_cached == 0 for answer in answers)


@archs
@overlaps
def test_a_request_alone_gets_the_oracles_tokens_and_logits(
    arch: str, overlap: bool, engine: Engines, oracle: Oracles
) -> None:
    host = Host(engine(arch), config_of(Path(), overlap=overlap))
    answers = [host.ask([prompt], GREEDY)[0] for prompt in PROMPTS]
    assert_equals_oracle(oracle(arch), PROMPTS, answers)


@archs
@overlaps
@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_requests_that_lost_their_pages_still_get_the_oracles_tokens_and_logits(
    arch: str,
    overlap: bool,
    cache: str,
    checkpoint: Callable[[str], Path],
    oracle: Oracles,
) -> None:
    num_pages = -(-(len(PROMPTS[-1]) + NUM_TOKENS) // 4)  # just enough for the longest request
    config = config_of(
        checkpoint(arch), num_pages=num_pages, cache=cache, overlap=overlap, max_prefill_length=40
    )
    host = Host(WatchedEngine(config), config)
    answers = host.ask(PROMPTS, GREEDY)
    assert_equals_oracle(oracle(arch), PROMPTS, answers)
    assert host.scheduler.statistics.counts.num_retractions > 0


@archs
def test_equal_prompts_in_one_batch_get_equal_tokens(
    arch: str, engine: Engines, oracle: Oracles
) -> None:
    host = Host(engine(arch), config_of(Path(), max_prefill_length=64))
    prompts = [PROMPTS[6]] * 5
    assert_equals_oracle(oracle(arch), prompts, host.ask(prompts, GREEDY))


@archs
@pytest.mark.parametrize(("overlap", "page_size"), [(True, 1), (False, 4)])
def test_prompts_of_one_step_read_what_it_computes_of_their_prefix(
    arch: str, overlap: bool, page_size: int, engine: Engines, oracle: Oracles
) -> None:
    config = config_of(Path(), overlap=overlap, max_prefill_length=1000)
    host = Host(engine(arch, page_size), config)
    first = PROMPTS[-1]
    prompts = [first, first, first[:40] + PROMPTS[2], first[:41] + PROMPTS[3], first[:9]]

    answers = host.ask(prompts, GREEDY)
    assert_equals_oracle(oracle(arch), prompts, answers)
    assert [answer.num_cached > 0 for answer in answers] == [False, True, True, True, True]


def test_a_prompt_that_fills_the_context_overwrites_no_other_row(
    engine: Engines, oracle: Oracles
) -> None:
    """The token that is sampled after it has a place, though nobody wants it."""
    host = Host(engine("llama"), config_of(Path(), overlap=True))
    full = random_prompts([CONTEXT], VOCAB_SIZE, seed=3)[0]
    others = [PROMPTS[2], PROMPTS[3]]
    prompts = [others[0], full, others[1]]
    params = [greedy(NUM_TOKENS), SamplingParams(max_tokens=0), greedy(NUM_TOKENS)]
    answers = host.ask(prompts, params)

    assert (answers[1].tokens, answers[1].finish) == ([], "length")
    assert_equals_oracle(oracle("llama"), others, [answers[0], answers[2]])


def test_long_prompts_go_to_the_tables_in_pieces(
    engine: Engines, oracle: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = engine("llama")
    lengths: list[int] = []
    send = llama._extra_staging.send

    def counting(*arrays: Numbers) -> list[Tensor]:
        lengths.extend(map(len, arrays))
        return send(*arrays)

    monkeypatch.setattr(model_runner, "_MAX_WRITES", 10)
    monkeypatch.setattr(llama._extra_staging, "send", counting)
    answers = Host(llama, config_of(Path())).ask([PROMPTS[-1]], GREEDY)

    assert max(lengths) == 10
    assert_equals_oracle(oracle("llama"), [PROMPTS[-1]], answers)


@pytest.mark.parametrize("num_tokens", [1, 2, CONTEXT - 100])
def test_an_answer_may_fill_the_context_to_its_last_token(
    num_tokens: int, engine: Engines, oracle: Oracles
) -> None:
    prompt = PROMPTS[-1]
    host = Host(engine("llama"), config_of(Path()))
    [answer] = host.ask([prompt], greedy(num_tokens))
    assert answer.finish == "length"
    assert_equals_oracle(oracle("llama"), [prompt], [answer])


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW}
DIFFERENT: dict[str, tuple[str, dict[str, Any]]] = {
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "biases in attention of Qwen3": ("qwen3", {"attention_bias": True}),
    "tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "untied embeddings": ("qwen2", {"tie_word_embeddings": False}),
    "a key/value head for each query head": ("mistral", {"num_key_value_heads": 4}),
    "one key/value head": ("llama", {"num_key_value_heads": 1}),
    "heads wider than the model": ("llama", {"head_dim": 32}),
    "tanh gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "another norm epsilon": ("llama", {"rms_norm_eps": 0.1}),
    "a large theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn": ("qwen2", {"rope_parameters": YARN}),
    "a dense layer among experts": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "experts in every second layer": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "weights of experts as the router gives them": ("qwen3_moe", {"norm_topk_prob": False}),
    "all experts for each token": ("qwen3_moe", {"num_experts_per_tok": 4}),
    "a window as long as the context": ("mistral", {"sliding_window": CONTEXT}),
    "a window in every layer": ("mistral", {"sliding_window": WINDOW}),
    "a window of two tokens": ("mistral", {"sliding_window": 2}),
    "a window in the last layers of Qwen2": ("qwen2", {**SLIDING, "max_window_layers": 1}),
    "a window in the last layers of Qwen3": ("qwen3", {**SLIDING, "max_window_layers": 1}),
    "a window in the layers that Qwen3 lists": (
        "qwen3",
        {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "a window in every layer of Qwen3 with experts": ("qwen3_moe", SLIDING),
    "a window in the layers of SmolLM3 without rope": ("smollm3", SLIDING),
    "rope in every layer of SmolLM3": ("smollm3", {"no_rope_layers": [1, 1]}),
    "rope in no layer of SmolLM3": ("smollm3", {"no_rope_layers": [0, 0]}),
    "the layers that SmolLM3 has without rope if it does not say": (
        "smollm3",
        {"no_rope_layers": None, "num_hidden_layers": 4},
    ),
    "a stretched rope in every layer of OLMo 2": ("olmo2", {"rope_parameters": YARN}),
    "biases in attention of OLMo 2": ("olmo2", {"attention_bias": True}),
    "the layers that OLMo 3 slides if it does not say": (
        "olmo3",
        {"layer_types": None, "num_hidden_layers": 4},
    ),
}


@pytest.mark.parametrize(("arch", "overrides"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_a_model_that_differs_equals_the_oracle(
    arch: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model(arch, **overrides)
    config = config_of(save_checkpoint(model, tmp_path), max_prefill_length=64)
    host = Host(WatchedEngine(config), config)
    oracle = Oracle(model)
    for _ in range(2):  # the second time from the prefix cache
        assert_equals_oracle(oracle, PROMPTS, host.ask(PROMPTS, GREEDY))


@pytest.mark.parametrize("place", ["config.json", "generation_config.json"])
def test_an_answer_ends_with_an_eos_token_of_either_config(
    place: str, tmp_path: Path, engine: Engines, oracle: Oracles
) -> None:
    prompt = PROMPTS[5]
    endless = Host(engine("llama"), config_of(Path())).ask([prompt], GREEDY)
    assert_equals_oracle(oracle("llama"), [prompt], endless)
    tokens = endless[0].tokens
    last = tokens[7]
    tiny_checkpoint("llama", tmp_path)
    path = tmp_path / place
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": last}))
    config = config_of(tmp_path)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    [answer] = Host(WatchedEngine(config), config).ask([prompt], params)
    assert answer.finish == "stop"
    assert answer.tokens == tokens[: tokens.index(last) + 1]
