"""Which fields of a request are honoured, which are refused by name, and which change nothing."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from minisgl.core import SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.message import TokenIds, pack_ids
from minisgl.server.anthropic.messages_request import MessagesRequest
from minisgl.server.native.generate import GenerateRequest
from minisgl.server.openai.chat import ChatRequest
from minisgl.server.openai.completions import CompletionRequest
from minisgl.server.openai.embeddings import EmbeddingRequest
from minisgl.server.openai.responses_request import ResponsesRequest
from minisgl.server.requests.generation_request import ConversationRequest
from minisgl.server.requests.unsupported import UnsupportedConversationFields, UnsupportedFields
from minisgl.server.requests.validation import NeutralOnly, RequestBounds
from tests.server.openai.harness import BODIES, both, read, sampling

OF_CHAT: dict[str, list[Any]] = {
    "top_logprobs": [1],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "tools": [[{"type": "function", "function": {"name": "f"}}]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
}
NEUTRAL: dict[str, list[Any]] = {
    "n": [1],
    "best_of": [1],
    "stop": [[]],
    "presence_penalty": [0, 0.0],
    "frequency_penalty": [0, 0.0],
    "repetition_penalty": [1, 1.0],
    "logit_bias": [{}],
    "min_tokens": [0],
    "stop_token_ids": [[]],
    "skip_special_tokens": [True],
    "include_stop_str_in_output": [False],
    "response_format": [{"type": "text"}],
    "priority": [0],
    "user": ["somebody"],
    "metadata": [{"a": "b"}],
    "store": [True],
    "service_tier": ["auto"],
    "safety_identifier": ["x"],
    "prompt_cache_key": ["x"],
    "prompt_cache_retention": ["24h"],
}
NEUTRAL_OF_CHAT: dict[str, list[Any]] = {
    "top_logprobs": [0],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "parallel_tool_calls": [True],
    "functions": [[]],
    "function_call": ["none", "auto"],
    "modalities": [["text"]],
    "verbosity": ["medium"],
    "prompt_cache_options": [{}],
    "prediction": [{"type": "content", "content": "x"}],
}
NEUTRAL_OF_TEXT: dict[str, list[Any]] = {"echo": [False], "suffix": [""]}
HONOURED = [  # name, value, what the sampler gets
    ("stop", "x", ("x",)),
    ("stop", ["x", "y"], ("x", "y")),
    ("stop_token_ids", [1, 2], (1, 2)),
    ("min_tokens", 2, 2),
    ("presence_penalty", 0.5, 0.5),
    ("frequency_penalty", -2, -2),
    ("repetition_penalty", 1.1, 1.1),
    ("logit_bias", {"5": 100, "7": -0.5}, {5: 100, 7: -0.5}),
    ("include_stop_str_in_output", True, True),
    ("skip_special_tokens", False, False),
    ("ignore_eos", True, True),
    ("seed", 7, 7),
    ("priority", -3, -3),
]


def pairs(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}={value}")
        for name, values in table.items()
        for value in values
    ]


def effect(request: Any) -> Any:
    return (
        request.sampling({}),
        request.num_answers,
        request.prompts(),
        request.include_usage,
        request.stream,
    )


@both
@pytest.mark.parametrize(("name", "value"), pairs(NEUTRAL))
def test_a_value_that_changes_nothing_is_accepted(kind: Any, name: str, value: Any) -> None:
    assert effect(read(kind, **{name: value})) == effect(read(kind))


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        *((*pair.values, ChatRequest) for pair in pairs(NEUTRAL_OF_CHAT)),
        *((*pair.values, CompletionRequest) for pair in pairs(NEUTRAL_OF_TEXT)),
    ],
)
def test_a_value_that_changes_nothing_is_accepted_where_the_field_is(
    name: str, value: Any, kind: Any
) -> None:
    assert effect(read(kind, **{name: value})) == effect(read(kind))


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        (kind, entry.alias or name, mark)
        for kind in BODIES
        for name, entry in kind.model_fields.items()
        for mark in entry.metadata
        if isinstance(mark, NeutralOnly)
    ],
)
def test_a_field_that_is_not_supported_takes_what_changes_nothing(
    kind: Any, name: str, change: NeutralOnly
) -> None:
    for value in change.neutral:
        assert effect(read(kind, **{name: value})) == effect(read(kind))
    for value in ("x", 17, 0.5, {"x": 1}, ["x"], True, False):
        if value not in change.neutral:
            with pytest.raises(ValidationError) as error:
                read(kind, **{name: value})
            assert error.value.errors()[0]["loc"] == (name,)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in BODIES for name in kind.model_fields]
)
def test_null_is_the_same_as_absent(kind: Any, name: str) -> None:
    if name not in BODIES[kind]:
        assert effect(read(kind, **{name: None})) == effect(read(kind))


@both
@pytest.mark.parametrize(("name", "value", "expected"), HONOURED)
def test_a_field_goes_to_the_sampler_under_its_name(
    kind: Any, name: str, value: Any, expected: Any
) -> None:
    assert getattr(sampling(kind, **{name: value}), name) == expected
    assert getattr(sampling(kind), name) != expected


@pytest.mark.parametrize(("name", "value"), pairs({**OF_CHAT, "logprobs": [2]}))
def test_what_only_one_of_the_routes_has(name: str, value: Any) -> None:
    kind, other = (
        (CompletionRequest, ChatRequest) if name == "logprobs" else (ChatRequest, CompletionRequest)
    )
    read(kind, **{name: value})
    with pytest.raises((InvalidRequest, ValidationError)):
        read(other, **{name: value})


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        (ChatRequest, {}, None),
        (ChatRequest, {"logprobs": False}, None),
        (ChatRequest, {"logprobs": True}, 0),
        (ChatRequest, {"logprobs": True, "top_logprobs": 5}, 5),
        (CompletionRequest, {}, None),
        (CompletionRequest, {"logprobs": 0}, 0),
        (CompletionRequest, {"logprobs": 3}, 3),
    ],
)
def test_how_many_log_probabilities(
    kind: Any, fields: dict[str, Any], expected: int | None
) -> None:
    assert sampling(kind, **fields).logprobs == expected


@both
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 3}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5_0": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 30: 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
    ],
    ids=str,
)
def test_a_value_out_of_bounds_names_its_field(
    kind: Any, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        sampling(kind, **fields)
    assert refusal.value.param == param


def test_top_logprobs_need_logprobs() -> None:
    with pytest.raises(InvalidRequest, match="top_logprobs needs logprobs"):
        sampling(ChatRequest, top_logprobs=2)


@pytest.mark.parametrize(
    ("fields", "options", "variables"),
    [
        ({}, {}, {}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}, {}),
        (
            {"continue_final_message": True},
            {"continue_final_message": True, "add_generation_prompt": False},
            {},
        ),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {}, {"enable_thinking": False}),
    ],
)
def test_what_the_template_is_told(fields: dict[str, Any], options: Any, variables: Any) -> None:
    [conversation] = read(ChatRequest, **fields).prompts()
    assert (conversation.options, conversation.variables) == (options, variables)


@both
@pytest.mark.parametrize("name", ["temprature", "messages_", "Model", "", "stream_option"])
def test_an_unknown_field_is_ignored_or_an_error_that_names_it(kind: Any, name: str) -> None:
    assert effect(read(kind, **{name: 1})) == effect(read(kind))
    with pytest.raises(ValidationError) as error:
        kind.read({**BODIES[kind], name: 1}, RequestBounds(strict_fields=True))
    assert error.value.errors()[0]["loc"] == (name,)


@both
def test_a_refusal_says_what_to_send_instead(kind: Any) -> None:
    with pytest.raises(ValidationError, match="send max_tokens instead, or null"):
        read(kind, max_new_tokens=5)
    with pytest.raises(ValidationError, match="leave it out or send false or null"):
        read(kind, use_beam_search=True)


@both
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 1),
        ("model", None),
        ("max_tokens", "5"),
        ("max_tokens", 5.5),
        ("max_tokens", True),
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", [1.0]),
        ("top_p", "1"),
        ("top_k", 1.5),
        ("top_k", "all"),
        ("min_p", {}),
        ("seed", "7"),
        ("seed", 1.5),
        ("n", 1.5),
        ("stop_token_ids", [1.5]),
        ("ignore_eos", 1),
        ("ignore_eos", "true"),
        ("stream", 1),
        ("stream", "true"),
        ("stream_options", True),
        ("stream_options", {"include_usage": 1}),
    ],
)
def test_types_are_not_guessed(kind: Any, name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as error:
        read(kind, **{name: value})
    assert error.value.errors()[0]["loc"][0] == name


@both
def test_an_integer_may_be_written_as_a_float(kind: Any) -> None:
    integers: dict[str, Any] = {
        "max_tokens": 4,
        "top_k": 3,
        "seed": -5,
        "n": 2,
        "best_of": 2,
        "min_tokens": 1,
        "priority": 0,
        "stop_token_ids": [7],
    }
    if kind is ChatRequest:
        integers |= {"max_completion_tokens": 4, "logprobs": True, "top_logprobs": 2}
    else:
        integers |= {"logprobs": 2}
    floats = json.loads(re.sub(r"(\d+)", r"\1.0", json.dumps(integers)))
    assert floats["max_tokens"] == 4
    assert isinstance(floats["max_tokens"], float)
    assert effect(read(kind, **floats)) == effect(read(kind, **integers))
    assert sampling(kind, max_tokens=1e0).max_tokens == 1
    assert type(sampling(kind, max_tokens=4.0).max_tokens) is int


@pytest.mark.parametrize(
    ("request_type", "body", "name"),
    [
        (ResponsesRequest, {"model": "m", "input": "a"}, "max_output_tokens"),
        (EmbeddingRequest, {"model": "m", "input": "a"}, "dimensions"),
        (GenerateRequest, {"prompt": "a"}, "prompt_logprobs"),
    ],
)
def test_an_integer_of_another_endpoint_may_be_written_as_a_float(
    request_type: Any, body: dict[str, Any], name: str
) -> None:
    value = getattr(request_type.model_validate({**body, name: 4.0}), name)
    assert (value, type(value)) == (4, int)


@both
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_numbers_that_are_none_are_refused(kind: Any, name: str, value: str) -> None:
    body = json.loads(
        json.dumps({**BODIES[kind], name: 0}).replace(f'"{name}": 0', f'"{name}": {value}')
    )
    with pytest.raises(ValidationError) as error:
        kind.model_validate(body)
    assert error.value.errors()[0]["loc"] == (name,)


@both
@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("max_tokens", 0, "[1, 2147483647]"),
        ("max_tokens", -1, "[1, 2147483647]"),
        ("max_tokens", 10**30, "[1, 2147483647]"),
        ("min_tokens", -1, "in [0, "),
        ("temperature", -0.1, "[0, 100]"),
        ("temperature", 100.5, "[0, 100]"),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", 1.01, "(0, 1]"),
        ("top_k", -2, "[1, 2147483647]"),
        ("top_k", 10**30, "[1, 2147483647]"),
        ("min_p", -0.1, "[0, 1]"),
        ("min_p", 2.5, "[0, 1]"),
        ("seed", 2**63, f"[{-(2**63)}, {2**63 - 1}]"),
        ("seed", -(10**30), f"[{-(2**63)}, {2**63 - 1}]"),
        ("presence_penalty", 2.5, "[-2, 2]"),
        ("frequency_penalty", -2.5, "[-2, 2]"),
        ("repetition_penalty", 0.0, "(0, 10]"),
        ("repetition_penalty", 10.5, "(0, 10]"),
        ("priority", 2**31, "[-2147483647, 2147483647]"),
        ("priority", -(2**31), "[-2147483647, 2147483647]"),
        ("best_of", 2, "n (1)"),
    ],
)
def test_a_number_outside_its_bounds_is_refused_by_name(
    kind: Any, name: str, value: Any, bound: str
) -> None:
    """Also one that no message between processes could carry."""
    with pytest.raises(InvalidRequest, match=name) as refusal:
        sampling(kind, **{name: value})
    assert refusal.value.param == name
    assert bound in str(refusal.value)
    assert str(refusal.value).endswith(f", got {value}")


@both
@pytest.mark.parametrize("name", ["max_tokens", "top_k", "seed", "best_of"])
def test_a_number_of_hundreds_of_digits_is_not_repeated(kind: Any, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} .*, got an integer of 1329 bits"):
        sampling(kind, **{name: 10**400})


@both
@pytest.mark.parametrize(
    ("biases", "message"),
    [
        ({"5": 100.5}, "logit_bias of 5 must be in [-100, 100], got 100.5"),
        ({"2147483648": 1}, "a token id of logit_bias must be in [0, 2147483647], got 2147483648"),
        (
            {"9" * 5000: 1},
            f"a token id of logit_bias must be in [0, 2147483647], got {'9' * 40}",
        ),
        ({"05": 1}, "logit_bias maps token ids in decimal digits, got '05'"),
        ({"-5": 1}, "logit_bias maps token ids in decimal digits, got '-5'"),
    ],
    ids=["bias", "token", "many digits", "leading zero", "sign"],
)
def test_a_bias_outside_its_bounds_is_refused_with_them(
    kind: Any, biases: dict[str, float], message: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        sampling(kind, logit_bias=biases)
    assert (str(refusal.value), refusal.value.param) == (message, "logit_bias")


@both
def test_what_is_given_arrives(kind: Any) -> None:
    given = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "min_p": 0.125,
        "seed": -5,
    }
    assert sampling(kind, **given, ignore_eos=True) == SamplingParams(**given, ignore_eos=True)


def test_an_echo_may_be_all_and_has_the_log_probabilities_of_the_answer() -> None:
    asked = sampling(CompletionRequest, max_tokens=0, echo=True, logprobs=2)
    assert (asked.max_tokens, asked.logprobs, asked.prompt_logprobs) == (0, 2, 2)
    assert sampling(CompletionRequest, echo=True).prompt_logprobs is None
    assert sampling(CompletionRequest, logprobs=2).prompt_logprobs is None


@both
@pytest.mark.parametrize("spelled", [0, -1])
def test_the_other_spellings_of_all_overrule_the_models_top_k(kind: Any, spelled: int) -> None:
    request = read(kind, top_k=spelled)
    chosen = request.sampling({"top_k": 20, "top_p": 0.5})
    assert (chosen.top_k, chosen.top_p) == (None, 0.5)


@both
def test_what_is_left_open_comes_from_the_model_and_what_is_given_overrules_it(kind: Any) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1}
    request = read(kind, temperature=0.0, min_p=0, max_tokens=5)
    assert request.sampling(defaults) == SamplingParams(
        max_tokens=5, temperature=0.0, top_p=0.95, top_k=20, min_p=0.0
    )
    assert defaults == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1}, (
        "not written to"
    )


@both
def test_without_advice_of_the_model_sampling_is_plain(kind: Any) -> None:
    assert sampling(kind, max_tokens=4) == SamplingParams(max_tokens=4)


def test_max_completion_tokens_wins() -> None:
    assert read(ChatRequest, max_tokens=5, max_completion_tokens=3).token_limit == 3
    assert read(ChatRequest, max_tokens=5).token_limit == 5
    assert read(ChatRequest).token_limit is None


def test_a_text_completion_has_sixteen_tokens_unless_it_says_otherwise() -> None:
    assert read(CompletionRequest).token_limit == 16
    assert read(CompletionRequest, max_tokens=2).token_limit == 2


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"continue_final_message": True}, False),
    ],
)
def test_whether_the_model_may_think(fields: Any, allowed: bool) -> None:
    assert read(ChatRequest, **fields).allows_reasoning == allowed


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatRequest, {"reasoning_effort": "none"}),
        (ChatRequest, {"chat_template_kwargs": {"enable_thinking": False}}),
        (ResponsesRequest, {"reasoning": {"effort": "none"}}),
        (MessagesRequest, {"thinking": {"type": "disabled"}}),
    ],
)
@pytest.mark.parametrize("always_reasons", [False, True])
def test_only_a_template_that_can_be_told_is_told_not_to_reason(
    kind: type[ConversationRequest], fields: Any, always_reasons: bool
) -> None:
    question = [{"role": "user", "content": "hi"}]
    needed: dict[str, Any] = {"model": "m", kind.prompt_field: question}
    if kind is MessagesRequest:
        needed["max_tokens"] = 1
    bounds = RequestBounds(always_reasons=always_reasons)
    assert kind.read({**needed, **fields}, bounds).allows_reasoning == always_reasons


def test_an_answer_that_is_continued_is_not_reasoning_whatever_the_template_can_be_told() -> None:
    bounds = RequestBounds(always_reasons=True)
    body: dict[str, Any] = {**BODIES[ChatRequest]}
    body["continue_final_message"] = True
    assert not ChatRequest.read(body, bounds).allows_reasoning


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([0], [TokenIds(pack_ids([0]))]),
        ([5, 2**31 - 1], [TokenIds(pack_ids([5, 2**31 - 1]))]),
        ([[1], [2, 3]], [TokenIds(pack_ids([1])), TokenIds(pack_ids([2, 3]))]),
    ],
)
def test_a_prompt_is_text_or_ids_one_or_several(prompt: Any, expected: list[Any]) -> None:
    assert read(CompletionRequest, prompt=prompt).prompts() == expected


@pytest.mark.parametrize("prompt", ["", [], [""], ["a", ""], [[]], [[1], []]])
def test_an_empty_prompt_is_refused_by_name(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="empty") as refusal:
        read(CompletionRequest, prompt=prompt).prompts()
    assert refusal.value.param == "prompt"


@pytest.mark.parametrize(
    "prompt", [None, 5, 1.5, {}, [1, "a"], ["a", 1], [[1], "a"], [-1], [2**31], [True], [[[1]]]]
)
def test_a_prompt_of_another_shape_is_refused(prompt: Any) -> None:
    with pytest.raises(ValidationError) as error:
        read(CompletionRequest, prompt=prompt)
    assert error.value.errors()[0]["loc"][0] == "prompt"


@pytest.mark.parametrize(
    ("bad", "reason"), [("a\ud83d", "half a surrogate pair"), ("a\0", "null character")]
)
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (ChatRequest, lambda bad: {"messages": [{"role": "user", "content": bad}]}),
        (
            ChatRequest,
            lambda bad: {
                "messages": [{"role": "user", "content": [{"type": "text", "text": bad}]}]
            },
        ),
        (ChatRequest, lambda bad: {"messages": [{"role": "user", "content": "x", "name": bad}]}),
        (ChatRequest, lambda bad: {"chat_template_kwargs": {"a": [bad]}}),
        (CompletionRequest, lambda bad: {"prompt": bad}),
        (CompletionRequest, lambda bad: {"prompt": ["a", bad]}),
        (CompletionRequest, lambda bad: {"stop": bad}),
        (CompletionRequest, lambda bad: {"stop": ["a", bad]}),
        (CompletionRequest, lambda bad: {"guided_regex": bad}),
        (CompletionRequest, lambda bad: {"guided_grammar": bad}),
        (CompletionRequest, lambda bad: {"guided_choice": ["a", bad]}),
        (CompletionRequest, lambda bad: {"guided_json": {"enum": [bad]}}),
        (CompletionRequest, lambda bad: {"guided_json": {"properties": {bad: {}}}}),
        (CompletionRequest, lambda bad: {"guided_json": json.dumps({"enum": [bad]})}),
    ],
)
def test_texts_that_are_none_are_refused_by_name(
    kind: Any, make: Any, bad: str, reason: str
) -> None:
    """JSON can spell them.

    No message between processes carries half a pair, and no one means a null character.
    """
    with pytest.raises(ValidationError) as error:
        read(kind, **make(bad))
    faults = error.value.errors()
    assert {fault["loc"][0] for fault in faults} == make(bad).keys()
    assert any(
        reason in fault["msg"] or "surrogates not allowed" in fault["msg"] for fault in faults
    )


@pytest.mark.parametrize("text", ["\\u0000", "\\0", "\x01"])
def test_what_only_looks_like_a_null_character_is_a_text(text: str) -> None:
    assert sampling(
        CompletionRequest, guided_json={"enum": [text]}, prompt=text, stop=text
    ).stop == (text,)


@pytest.mark.parametrize(
    ("request_class", "taken"),
    [
        (GenerateRequest, set()),
        (ChatRequest, set()),
        (CompletionRequest, {"echo"}),
        (ResponsesRequest, set()),
        (MessagesRequest, {"stop_sequences", "system", "thinking"}),
    ],
)
def test_a_field_that_is_refused_elsewhere_is_taken_where_it_is_declared_anew(
    request_class: type[UnsupportedFields], taken: set[str]
) -> None:
    """A declaration takes the place of the refusal, so a new parameter has to remove that."""
    refused = {
        name: field
        for base in (UnsupportedFields, UnsupportedConversationFields)
        if issubclass(request_class, base)
        for name, field in base.model_fields.items()
    }
    fields = request_class.model_fields
    assert {name for name, field in refused.items() if repr(fields[name]) != repr(field)} == taken
