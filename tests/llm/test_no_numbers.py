"""A model whose logits are no numbers: requests that get them end with an error, others do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.core import Grammar, SamplingParams
from minisgl.engine import Engine
from minisgl.errors import NoNumbers, RequestError
from minisgl.llm import LLM
from minisgl.llm.local_rank import LocalRank
from tests.checkpoints import VOCAB_SIZE, save_checkpoint, tiny_model
from tests.llm.test_llm import ARCH, make
from tests.llm.test_parameters import ENGINES

PROMPT = "The quick brown fox jumps"
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0},
    "filtered": {"temperature": 1.0, "top_k": 5, "top_p": 0.9},
    "penalized": {"temperature": 1.0, "presence_penalty": 1.0, "min_tokens": 2},
    "with log probabilities": {"temperature": 0.0, "logprobs": 2},
    "a pattern": {"grammar": Grammar("regex", "[a-z]+")},
    "a forced text": {"grammar": Grammar("regex", "the dog says to the fox")},
}
BAD_TOKEN = 200  # after it, and where it stands, the hidden states are NaN
GOOD_PROMPT = [5, 17, 130, 44, 61]
BAD_PROMPT = [5, 17, BAD_TOKEN, 44, 61]
WORDS = Grammar("regex", "[a-z ]{40}")
NEVER_BAD: dict[str, Any] = {"logit_bias": {BAD_TOKEN: -100.0}}


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All weights of this model are numbers. Its last layer's sums are beyond those of float32."""
    model = tiny_model("llama")
    model.model.norm.weight.data.fill_(3e38)
    return save_checkpoint(model, tmp_path_factory.mktemp("overflowing"))


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def overflowing_llm(request: pytest.FixtureRequest, overflowing: Path) -> Iterator[LLM]:
    with make(overflowing, tp=request.param, overlap=True) as llm:
        yield llm


@pytest.mark.parametrize("sampling", SAMPLING)
def test_an_answer_of_no_numbers_ends_with_an_error_that_says_so(
    overflowing_llm: LLM, sampling: str
) -> None:
    params = SamplingParams(max_tokens=40, **SAMPLING[sampling])
    with pytest.raises(RequestError, match="logits are not numbers") as caught:
        overflowing_llm.generate([PROMPT] * 3, params, use_tqdm=False)
    assert (caught.value.status, caught.value.code) == (500, NoNumbers.code)
    assert caught.value.param is None


def test_so_do_outputs_of_a_prompt(overflowing_llm: LLM) -> None:
    with pytest.raises(RequestError, match="logits are not numbers"):
        overflowing_llm.embed([PROMPT])
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    with pytest.raises(RequestError, match="logits are not numbers"):
        overflowing_llm.generate([PROMPT], params, use_tqdm=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of finite weights. One direction, which one token has, overflows in the MLP."""
    model = tiny_model(ARCH)
    layer = model.model.layers[0]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0
        model.model.embed_tokens.weight[BAD_TOKEN, 0] = 1
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.gate_proj.weight[:, 0] = 1e30
        layer.mlp.up_proj.weight[:, 0] = 1e30
    return save_checkpoint(model, tmp_path_factory.mktemp("overflows"))


@pytest.fixture(scope="module", params=ENGINES)
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    with make(folder, **request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[LLM]:
    with make(folder, tp=2, overlap=True) as llm:
        yield llm


def assert_says_no_numbers(llm: LLM, fields: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True, **fields)
    with pytest.raises(RequestError, match="the model's logits are not numbers") as caught:
        llm.generate(BAD_PROMPT, params, use_tqdm=False)
    error = caught.value
    assert (error.status, error.code, error.param) == (500, "no_numbers", None)
    answer = llm.generate(GOOD_PROMPT, SamplingParams(max_tokens=6, **NEVER_BAD), use_tqdm=False)
    assert answer[0].token_ids


WAYS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9},
    {"temperature": 0.0, "presence_penalty": 1.0},
    {"temperature": 1.0, "logprobs": 2},
]


@pytest.mark.parametrize("grammar", [None, WORDS], ids=["free", "in a grammar"])
@pytest.mark.parametrize("fields", WAYS, ids=str)
def test_a_request_whose_logits_are_nan_ends_with_an_error_that_says_so(
    llm: LLM, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    assert_says_no_numbers(llm, {**fields, "grammar": grammar})


@pytest.mark.parametrize("grammar", [None, WORDS], ids=["free", "in a grammar"])
@pytest.mark.parametrize("fields", WAYS, ids=str)
def test_ranks_agree_that_no_logit_is_a_number(
    ranks: LLM, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    assert_says_no_numbers(ranks, {**fields, "grammar": grammar})


@pytest.mark.parametrize("grammar", [None, WORDS], ids=["free", "in a grammar"])
def test_an_answer_that_has_begun_keeps_its_tokens(llm: LLM, grammar: Grammar | None) -> None:
    """Its logits become NaN when it has the bad token, here because a bias chooses it."""
    bias = {BAD_TOKEN: 100.0}
    allowed = None if grammar is None else Grammar("lark", f"start: <[{BAD_TOKEN}]> /[a-z]+/")
    params = SamplingParams(max_tokens=6, temperature=0.0, logit_bias=bias, grammar=allowed)
    told: list[int] = []
    with pytest.raises(RequestError, match="the model's logits are not numbers"):
        for output in llm.stream(GOOD_PROMPT, params):
            told += output.tokens
    assert told == [BAD_TOKEN]


def test_the_prefix_cache_keeps_nothing_of_such_a_request(
    checkpoint: Callable[[str], Path],
) -> None:
    """Here the numbers are wrong for a while. Whoever comes later is answered as ever."""
    prompt = [5, 17, 130, 44, 61, 8, 90, 33, 21, 70, 12, 13]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with make(checkpoint(ARCH), max_prefill_length=4) as llm:
        expected = llm.generate(prompt, params, use_tqdm=False)[0].token_ids
        assert isinstance(llm._ranks, LocalRank)
        scheduler = llm._ranks.scheduler
        scheduler.cache.flush()
        engine = scheduler._executor
        assert isinstance(engine, Engine)
        first_layer = next(iter(engine._model.model.layers))
        weight = first_layer.input_layernorm.weight_D
        right = weight.clone()
        weight.fill_(torch.nan)
        with pytest.raises(RequestError, match="not numbers"):
            llm.generate([prompt, [*prompt, 4], prompt], params, use_tqdm=False)
        weight.copy_(right)
        answer = llm.generate(prompt, params, use_tqdm=False)[0]
        assert (answer.token_ids, answer.num_cached) == (expected, 0)


@pytest.mark.parametrize("options", [{}, {"max_prefill_length": 7}, {"page_size": 16}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whatever_freed_pages_hold_harms_no_later_request(
    checkpoint: Callable[[str], Path], dtype: str, options: dict[str, Any]
) -> None:
    prompts = [[3 + i * 13 % 190 for i in range(length)] for length in (1, 5, 16, 17, 63, 64)]
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    with make(checkpoint(ARCH), dtype=dtype, **options) as llm:
        expected = [answer.token_ids for answer in llm.generate(prompts, params, use_tqdm=False)]
        assert isinstance(llm._ranks, LocalRank)
        scheduler = llm._ranks.scheduler
        scheduler.cache.flush()
        engine = scheduler._executor
        assert isinstance(engine, Engine)
        pool = engine.context.kv_pool
        for layer in range(pool.num_layers):
            pool.k_cache(layer).fill_(torch.nan)
            pool.v_cache(layer).fill_(torch.nan)
        answers = [answer.token_ids for answer in llm.generate(prompts, params, use_tqdm=False)]
        assert answers == expected


def test_the_other_requests_of_its_steps_get_the_answers_that_they_get_alone(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, **NEVER_BAD)
    alone = llm.generate(GOOD_PROMPT, params, use_tqdm=False)[0].token_ids
    bad = llm.stream(BAD_PROMPT, params)
    good = llm.stream(GOOD_PROMPT, params)
    first = next(good)
    with pytest.raises(RequestError, match="not numbers"):
        list(bad)
    rest = [token for output in good for token in output.tokens]
    tokens = [*first.tokens, *rest]
    assert tokens == alone
    assert all(0 <= token < VOCAB_SIZE for token in tokens)
