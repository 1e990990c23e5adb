"""A model whose logits are no numbers: the error says so, whatever the request asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.core import Grammar, SamplingParams
from minisgl.errors import NoNumbers, RequestError
from minisgl.llm import LLM
from tests.checkpoints import save_checkpoint, tiny_model
from tests.llm.test_llm import make

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


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All weights of this model are numbers. Its last layer's sums are beyond those of float32."""
    model = tiny_model("llama")
    model.model.norm.weight.data.fill_(3e38)
    return save_checkpoint(model, tmp_path_factory.mktemp("overflowing"))


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def llm(request: pytest.FixtureRequest, overflowing: Path) -> Iterator[LLM]:
    with make(overflowing, tp=request.param, overlap=True) as llm:
        yield llm


@pytest.mark.parametrize("sampling", SAMPLING)
def test_an_answer_of_no_numbers_ends_with_an_error_that_says_so(llm: LLM, sampling: str) -> None:
    params = SamplingParams(max_tokens=40, **SAMPLING[sampling])
    with pytest.raises(RequestError, match="logits are not numbers") as caught:
        llm.generate([PROMPT] * 3, params, use_tqdm=False)
    assert (caught.value.status, caught.value.code) == (500, NoNumbers.code)
    assert caught.value.param is None


def test_so_do_outputs_of_a_prompt(llm: LLM) -> None:
    with pytest.raises(RequestError, match="logits are not numbers"):
        llm.embed([PROMPT])
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    with pytest.raises(RequestError, match="logits are not numbers"):
        llm.generate([PROMPT], params, use_tqdm=False)
