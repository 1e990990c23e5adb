"""The words of the engine: what sampling parameters allow, and how far a request has come."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from minisgl.core import BatchPlan, Req, ReqSlice, SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.sampling_params import MAX_SEED, MIN_SEED, Grammar

PLAIN = SamplingParams()


def make_req(num_prompt: int = 3, max_length: int = 8, params: SamplingParams = PLAIN) -> Req:
    return Req(7, np.arange(num_prompt, dtype=np.int32), params, max_length, seed=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", 0),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("priority", 2**31),
        ("priority", -(2**31)),
        ("seed", MAX_SEED + 1),
        ("seed", MIN_SEED - 1),
    ],
)
def test_a_value_outside_its_bounds_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be .*, got {value}") as caught:
        SamplingParams(**{name: value})
    assert (caught.value.param, caught.value.status) == (name, 400)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", None),
        ("temperature", "hot"),
        ("temperature", np.int64),
        ("temperature", "\ud800"),
        ("seed", 1.5),
        ("stop", None),
        ("stop", (1,)),
        ("stop", b"ab"),
        ("stop_token_ids", 5),
        ("stop_token_ids", [5.5]),
        ("logit_bias", {"5": 1}),
        ("logit_bias", {5.5: 1}),
        ("logit_bias", {5: "x"}),
        ("logit_bias", None),
        ("logprobs", True),
        ("logprobs", 1.5),
        ("priority", None),
        ("grammar", "[a-z]+"),
        ("grammar", {"kind": "regex", "text": "a"}),
        ("grammar", np.array([1, 2])),
        ("cache_salt", b"x"),
        ("ignore_eos", "no"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    """Python would take it, and a step would fail at it: all requests of a step with one."""
    refusal = re.escape(f"{name} must be of the type ") + ".*" + re.escape(f", got {value!r}")
    with pytest.raises(InvalidRequest, match=refusal) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("number", [10**400, -(10**400), 10**5000], ids=int.bit_length)
@pytest.mark.parametrize(
    ("name", "value_of"),
    [
        ("temperature", int),
        ("top_k", int),
        ("seed", int),
        ("stop_token_ids", lambda number: (number,)),
        ("logit_bias", lambda number: {number: 1.0}),
        ("logit_bias", lambda number: {1: number}),
        ("stop", lambda number: (number,)),
    ],
)
def test_a_number_of_hundreds_of_digits_is_not_repeated(
    name: str, value_of: Callable[[int], Any], number: int
) -> None:
    """Python writes none of thousands."""
    with pytest.raises(InvalidRequest, match=f"an integer of {number.bit_length()} bits") as error:
        SamplingParams(**{name: value_of(number)})
    assert error.value.param == name
    assert len(str(error.value)) < 128


def test_one_stop_text_needs_no_tuple() -> None:
    assert SamplingParams(stop="END") == SamplingParams(stop=("END",))
    with pytest.raises(InvalidRequest, match="the length of a stop text must be"):
        SamplingParams(stop="")


def test_numbers_may_be_numpys_and_texts_in_a_list() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), seed=np.int64(3), top_p=np.float64(0.9), stop=["a"]
    )
    assert (params.temperature, params.seed, params.top_p) == (0.5, 3, 0.9)
    assert type(params.seed) is int
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams).stop == ("a",)


class Id:
    """An integer of no library that is known here."""

    def __index__(self) -> int:
        return 5


class Article(Id):
    """Has what a tensor has as a method."""

    item = "chair"


@pytest.mark.parametrize(
    "number",
    [5, np.int32(5), np.uint8(5), torch.tensor(5), Id(), Article()],
    ids=lambda number: type(number).__name__,
)
def test_integers_may_be_any_librarys_also_within_containers(number: Any) -> None:
    expected = SamplingParams(
        max_tokens=5, stop_token_ids=(5,), logit_bias={5: 0.5}, temperature=5, priority=5
    )
    for container in (list, tuple, set):
        params = SamplingParams(
            max_tokens=number,
            stop_token_ids=container([number]),
            logit_bias={number: np.float32(0.5)},
            temperature=number,
            priority=number,
        )
        sent = msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams)
        assert sent == expected
        assert {type(token) for token in (*params.stop_token_ids, *params.logit_bias)} == {int}


class BrokenId:
    def __index__(self) -> int:
        raise ValueError("no number")


@pytest.mark.parametrize("number", [BrokenId(), [BrokenId()]], ids=["alone", "in a list"])
def test_a_number_whose_own_code_fails_is_refused(number: Any) -> None:
    for name in ("max_tokens", "stop_token_ids"):
        with pytest.raises(InvalidRequest, match=f"{name} must be of the type"):
            SamplingParams(**{name: number})


def test_a_list_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for name in ("stop", "stop_token_ids", "logit_bias", "max_tokens"):
        with pytest.raises(InvalidRequest, match=f"{name} must be of the type"):
            SamplingParams(**{name: loop})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", np.float32(4)),
        ("max_tokens", np.bool_(True)),
        ("stop_token_ids", (True,)),
        ("stop_token_ids", (np.bool_(True),)),
        ("stop_token_ids", (np.float64(3),)),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {np.float32(3): 1.0}),
        ("logit_bias", {3: np.bool_(True)}),
        ("top_k", torch.tensor(True)),
        ("temperature", torch.tensor(True)),
        ("stop_token_ids", (torch.tensor(True),)),
        ("logit_bias", {torch.tensor(True): 1.0}),
        ("max_tokens", torch.tensor(4.0)),
    ],
)
def test_flags_and_fractions_are_no_integers_whosever_they_are(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be of the type"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "values",
    [{"stop": ("a", "\ud83d")}, {"cache_salt": "\ud83d"}, {"grammar": Grammar("regex", "\ud83d")}],
    ids=str,
)
def test_half_a_surrogate_pair_which_no_message_can_carry_is_refused(values: Any) -> None:
    (name,) = values
    with pytest.raises(InvalidRequest, match=f"{name} has half a surrogate pair") as caught:
        SamplingParams(**values)
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ebnf", "a"),
        ([], "a"),
        ("regex", 5),
        ("regex", None),
        ("x" * 10**5, "a"),
        ("regex", ["x" * 10**5]),
    ],
    ids=lambda value: str(value)[:32],
)
def test_what_is_no_grammar_is_refused(kind: Any, text: Any) -> None:
    with pytest.raises(InvalidRequest, match="of a grammar must be") as caught:
        Grammar(kind, text)
    assert caught.value.param == "grammar"
    assert len(str(caught.value)) < 256


@pytest.mark.parametrize("pattern", ["(?x)a\nb", "a\\"])
def test_a_regular_expression_that_would_be_misread_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="a regular expression") as caught:
        Grammar("regex", pattern)
    assert caught.value.param == "grammar"


@pytest.mark.parametrize("salt", ["", "x" * 257])
def test_a_cache_salt_outside_its_bounds_is_refused_by_name(salt: str) -> None:
    with pytest.raises(InvalidRequest, match=r"cache_salt must be in \[1, 256\], got") as caught:
        SamplingParams(cache_salt=salt)
    assert caught.value.param == "cache_salt"


@pytest.mark.parametrize("name", ["max_tokens", "top_k"])
def test_a_number_that_no_message_can_carry_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**{name: 2**64})


@pytest.mark.parametrize(
    "values",
    [
        {
            "max_tokens": 1,
            "temperature": 0,
            "top_k": 1,
            "top_p": 1.0,
            "min_p": 0.0,
            "seed": -(2**63),
        },
        {"temperature": 100, "top_p": 1e-9, "min_p": 1.0, "seed": 2**63 - 1},
        {"cache_salt": "x"},
        {"cache_salt": "é" * 256},
    ],
)
def test_the_bounds_themselves_are_allowed(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)

    assert all(getattr(params, name) == value for name, value in values.items())


def test_a_new_request_knows_its_prompt_and_has_computed_nothing() -> None:
    req = make_req(num_prompt=3, max_length=8)

    assert (req.num_prompt, req.num_known, req.num_tokens, req.num_computed) == (3, 3, 3, 0)
    assert (req.num_output, req.max_length, req.is_full) == (0, 8, False)


def test_a_request_copies_its_prompt() -> None:
    prompt = np.arange(3, dtype=np.int32)
    req = Req(7, prompt, SamplingParams(), 8, seed=0)
    prompt[:] = -1

    assert req.tokens[:3].tolist() == [0, 1, 2]


def test_tokens_are_taken_in_the_order_in_which_they_were_sampled() -> None:
    req = make_req(num_prompt=3, max_length=5)
    req.num_tokens = 5
    assert req.is_full

    req.append(50)
    req.append(60)
    assert req.tokens.tolist() == [0, 1, 2, 50, 60]
    assert req.num_output == 2


def test_a_token_that_was_not_sampled_is_not_taken() -> None:
    with pytest.raises(AssertionError):
        make_req().append(50)


def test_forced_tokens_are_known_at_once_and_still_to_be_computed() -> None:
    req = make_req(num_prompt=3, max_length=8)
    req.num_computed = 2
    req.append_forced([50, 60])

    assert req.tokens[:5].tolist() == [0, 1, 2, 50, 60]
    assert (req.num_known, req.num_tokens, req.num_computed) == (5, 5, 2)


def test_the_first_forced_token_takes_the_place_of_one_that_is_being_sampled() -> None:
    req = make_req(num_prompt=3, max_length=8)
    req.num_computed = 3
    req.num_tokens = 4
    req.append_forced([50, 60, 70])

    assert (req.num_known, req.num_tokens) == (6, 6)


def test_more_forced_tokens_than_there_is_room_for_are_not_taken() -> None:
    with pytest.raises(AssertionError):
        make_req(num_prompt=3, max_length=4).append_forced([50, 60])


@pytest.mark.parametrize(("start", "expected"), [(0, True), (3, True), (4, False), (5, False)])
def test_a_slice_scores_the_tokens_of_the_prompt_that_follow_its_own(
    start: int, expected: bool
) -> None:
    """Of a prompt of five tokens the last is scored by the one before it."""
    scored = make_req(num_prompt=5, params=SamplingParams(prompt_logprobs=0))
    plain = make_req(num_prompt=5)
    assert ReqSlice(scored, start, start + 1, samples=True).scores_prompt is expected
    assert not ReqSlice(plain, start, start + 1, samples=True).scores_prompt


def test_a_plan_counts_its_tokens_and_decodes_and_knows_what_samples() -> None:
    decodes = [ReqSlice(make_req(), 2, 3, samples=True), ReqSlice(make_req(), 0, 1, samples=True)]
    chunks = [ReqSlice(make_req(), 0, 2, samples=False), ReqSlice(make_req(), 1, 6, samples=True)]
    plan = BatchPlan(decodes + chunks)

    assert [len(chunk) for chunk in chunks] == [2, 5]
    assert (plan.num_tokens, plan.num_decodes) == (9, 2)
    assert plan.sampling_slices == [*decodes, chunks[1]]
