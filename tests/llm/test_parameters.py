"""Each sampling parameter changes its own request's answer only; transformers gives the logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.core import SamplingParams
from minisgl.engine import sampler
from minisgl.errors import InvalidRequest, RequestError
from minisgl.llm import LLM
from tests.checkpoints import EOS_ID, VOCAB_SIZE, tiny_model
from tests.llm.test_llm import ARCH, ids_of, make, text_of

PROMPT = "The quick brown fox jumps"
NUM_TOKENS = 24


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


ENGINES = [
    pytest.param({"overlap": False}, id="in turn"),
    pytest.param({"overlap": True}, id="overlapping"),
    pytest.param({"device": "cuda", "attn": "torch"}, id="on a GPU", marks=ON_GPU),
]


@pytest.fixture(scope="module", params=ENGINES)
def llm(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    with make(checkpoint(ARCH), **request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def logits_after() -> Callable[[list[int]], Tensor]:
    model = tiny_model(ARCH)

    @torch.no_grad()
    def logits(ids: list[int]) -> Tensor:
        return model(torch.tensor([ids])).logits[0, -1].float()

    return logits


def params(num_tokens: int = NUM_TOKENS, **fields: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, **fields}
    )


def answer(llm: LLM, **fields: Any) -> list[int]:
    return llm.generate(PROMPT, params(**fields), use_tqdm=False)[0].token_ids


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.4},
        {"frequency_penalty": -1.5},
        {"repetition_penalty": 1.6},
        {"repetition_penalty": 0.7},
        {
            "presence_penalty": -0.5,
            "frequency_penalty": 0.8,
            "repetition_penalty": 1.2,
            "logit_bias": {7: 1.5, 9: -2},
        },
    ],
    ids=str,
)
def test_penalties_and_bias_follow_their_definition(
    llm: LLM, logits_after: Callable[[list[int]], Tensor], fields: dict[str, Any]
) -> None:
    prompt = ids_of(PROMPT)
    expected: list[int] = []
    for _ in range(NUM_TOKENS):
        logits = logits_after(prompt + expected)
        for token, bias in fields.get("logit_bias", {}).items():
            logits[token] += bias
        for token in {*prompt, *expected}:
            factor = fields.get("repetition_penalty", 1)
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token, count in Counter(expected).items():
            logits[token] -= fields.get("presence_penalty", 0) + count * fields.get(
                "frequency_penalty", 0
            )
        expected.append(int(logits.argmax()))
    assert answer(llm, **fields) == expected
    assert answer(llm) != expected


def test_a_biased_token_always_or_never_shows(llm: LLM) -> None:
    plain = answer(llm)
    assert plain[0] not in answer(llm, logit_bias={plain[0]: -100})
    assert set(answer(llm, logit_bias={5: 100})) == {5}


def test_top_k_of_one_is_greedy_whatever_changes_the_logits(llm: LLM) -> None:
    fields = {"logit_bias": {9: 4.0}, "frequency_penalty": 0.4, "repetition_penalty": 1.3}
    assert answer(llm, **fields, temperature=2.0, top_k=1) == answer(llm, **fields)


def test_log_probabilities_are_transformers(
    llm: LLM, logits_after: Callable[[list[int]], Tensor]
) -> None:
    fields = {"logprobs": 5, "temperature": 0.7, "seed": 3, "top_k": 9, "presence_penalty": 0.5}
    [out] = llm.generate(PROMPT, params(**fields), use_tqdm=False)
    assert out.logprobs is not None
    assert len(out.logprobs) == NUM_TOKENS
    ids = ids_of(PROMPT)
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        logprob_V = torch.log_softmax(logits_after(ids), dim=0)
        assert entry.logprob == pytest.approx(float(logprob_V[token]), abs=1e-3)
        top, top_ids = logprob_V.topk(5)
        assert [token for token, _ in entry.top] == top_ids.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(top.tolist(), abs=1e-3)
        ids.append(token)
    [none] = llm.generate(PROMPT, params(4, logprobs=0), use_tqdm=False)
    assert [entry.top for entry in none.logprobs or []] == [[]] * 4
    assert llm.generate(PROMPT, params(4), use_tqdm=False)[0].logprobs is None


@pytest.mark.parametrize("min_tokens", [0, 1, 5])
def test_no_end_before_the_least_number_of_tokens(llm: LLM, min_tokens: int) -> None:
    fields = {"ignore_eos": False, "logit_bias": {EOS_ID: 100}, "min_tokens": min_tokens}
    [out] = llm.generate(PROMPT, params(**fields), use_tqdm=False)
    assert (out.finish_reason, len(out.token_ids)) == ("stop", min_tokens + 1)
    assert EOS_ID not in out.token_ids[:-1]


def test_an_end_that_is_ignored_is_not_chosen_before_the_least_number_of_tokens(llm: LLM) -> None:
    tokens = answer(llm, logit_bias={EOS_ID: 100}, min_tokens=5)
    assert EOS_ID not in tokens[:5]
    assert set(tokens[5:]) == {EOS_ID}


def test_no_end_before_the_least_number_of_tokens_however_much_repetition_is_liked(
    llm: LLM,
) -> None:
    """A penalty far below 1 makes negative logits of the prompt's tokens nearly 0."""
    unlikely = {token: -100 for token in range(VOCAB_SIZE) if token != EOS_ID}
    fields = {"ignore_eos": False, "min_tokens": 3, "repetition_penalty": 1e-10}
    [out] = llm.generate([[EOS_ID]], params(3, **fields, logit_bias=unlikely), use_tqdm=False)
    assert len(out.token_ids) == 3
    assert EOS_ID not in out.token_ids


def test_the_least_penalties_still_choose_the_likeliest_token(llm: LLM) -> None:
    """Both leave the positive logits of known tokens far above all others."""
    assert answer(llm, repetition_penalty=1e-42) == answer(llm, repetition_penalty=1e-20)


def test_a_stop_token_ends_the_answer_and_is_not_in_its_text(llm: LLM) -> None:
    plain = answer(llm)
    end = next(i for i in range(3, len(plain)) if plain[i] not in plain[:i])
    stop = plain[end]
    [out] = llm.generate(PROMPT, params(stop_token_ids=(stop, VOCAB_SIZE - 1)), use_tqdm=False)
    assert (out.token_ids, out.finish_reason) == (plain[: end + 1], "stop")
    assert out.text == text_of(plain[:end])
    late = answer(llm, stop_token_ids=(stop,), min_tokens=end + 2)
    assert late[:end] == plain[:end]
    assert stop not in late[: end + 2]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_text_ends_the_answer_wherever_the_tokens_begin(llm: LLM, include: bool) -> None:
    text = text_of(answer(llm))
    stops = {text[at : at + size] for at in range(0, len(text) - 5, 3) for size in (1, 2, 5)}
    several = [
        params(stop=("never there", stop), include_stop_str_in_output=include)
        for stop in sorted(stops)
    ]
    outs = llm.generate([PROMPT] * len(several), several, use_tqdm=False)
    streamed = [""] * len(several)
    for output in llm.stream([PROMPT] * len(several), several):
        streamed[output.index] += output.text
    for out, stream, one in zip(outs, streamed, several, strict=True):
        stop = one.stop[1]
        assert out.text == stream == text[: text.index(stop) + include * len(stop)]
        assert out.finish_reason == "stop"
        assert len(out.token_ids) <= NUM_TOKENS
    assert llm._ranks.scheduler.is_idle
    llm._ranks.scheduler.check_integrity()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_token_may_belong_to_the_text(llm: LLM, streamed: bool) -> None:
    plain = answer(llm)
    stop = next(plain[i] for i in range(3, len(plain)) if plain[i] not in plain[:i])
    for include in (False, True):
        one = params(stop_token_ids=(stop,), include_stop_str_in_output=include)
        if streamed:
            text = "".join(output.text for output in llm.stream(PROMPT, one))
        else:
            text = llm.generate(PROMPT, one, use_tqdm=False)[0].text
        assert text == text_of(plain[: plain.index(stop) + include])


def test_special_tokens_are_shown_if_asked_for(llm: LLM) -> None:
    for skip, expected in ((True, ""), (False, "</s>" * 3)):
        fields = {"logit_bias": {EOS_ID: 100}, "skip_special_tokens": skip}
        assert llm.generate(PROMPT, params(3, **fields), use_tqdm=False)[0].text == expected


def test_parameters_are_a_requests_own(llm: LLM) -> None:
    """The same answers in a crowd of all kinds as alone."""
    kinds = [
        params(),
        params(presence_penalty=2.0),
        params(logprobs=2, temperature=1.0, seed=1),
        params(logit_bias={3: 4.0}, temperature=0.5, seed=2, top_p=0.9),
        params(stop=("e",)),
        params(repetition_penalty=1.3, min_tokens=4, ignore_eos=False),
    ]
    alone = [llm.generate(PROMPT, kind, use_tqdm=False)[0] for kind in kinds]
    crowd = llm.generate([PROMPT] * len(kinds), kinds, use_tqdm=False)
    for one, other in zip(alone, crowd, strict=True):
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
        if one.finish_reason == "length":
            assert one.token_ids == other.token_ids


def test_more_rows_than_are_changed_at_a_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [
        params(8, logit_bias={10 + i: 100}, presence_penalty=1.0, logprobs=1) for i in range(4)
    ]
    together = llm.generate([PROMPT] * 4, kinds, use_tqdm=False)
    monkeypatch.setattr(sampler, "_MAX_PROCESSED_ROWS", 3)
    apart = llm.generate([PROMPT] * 4, kinds, use_tqdm=False)
    assert [out.token_ids for out in apart] == [out.token_ids for out in together]
    assert [set(out.token_ids) for out in together] == [{10}, {11}, {12}, {13}]


def test_a_bias_for_a_token_that_is_not_there_is_refused(llm: LLM) -> None:
    with pytest.raises(
        RequestError, match=rf"token id {VOCAB_SIZE} is outside \[0, {VOCAB_SIZE}\)"
    ) as refusal:
        answer(llm, logit_bias={VOCAB_SIZE: 1.0})
    assert refusal.value.param == "logit_bias"


@pytest.mark.parametrize(
    "fields", [{"logit_bias": {2**70: 1.0}}, {"logit_bias": {-1: 1.0}}, {"stop_token_ids": (-5,)}]
)
def test_what_can_be_no_token_id_is_refused_at_once(fields: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidRequest, match=r"a token id of .* must be in \[0, 2147483647\]"
    ) as refusal:
        params(**fields)
    assert refusal.value.param in fields


@pytest.mark.parametrize("token", [VOCAB_SIZE, 2_000_000_000])
def test_a_token_to_stop_at_that_there_is_not_is_refused(llm: LLM, token: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=1, stop_token_ids=(token,))
    with pytest.raises(
        RequestError, match=rf"token id {token} is outside \[0, {VOCAB_SIZE}\)"
    ) as caught:
        llm.generate(PROMPT, params, use_tqdm=False)
    assert caught.value.param == "stop_token_ids"


def test_what_the_caller_changes_afterwards_changes_nothing(llm: LLM) -> None:
    bias: dict[int, float] = {}
    params = []
    for token in (70, 95, 40):
        bias.clear()
        bias[token] = 100.0
        params.append(SamplingParams(max_tokens=1, temperature=0, logit_bias=bias))
    stops: Any = [70]
    stopping = SamplingParams(max_tokens=1, temperature=0, stop_token_ids=stops, logit_bias={70: 9})
    bias[-1] = float("nan")
    stops.append("no id")

    answers = llm.generate([PROMPT] * 4, [*params, stopping], use_tqdm=False)

    assert [answer.token_ids for answer in answers[:3]] == [[70], [95], [40]]
    assert stopping.stop_token_ids == [70]
