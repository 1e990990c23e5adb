"""Which fields of a request are honoured, which are refused by name, and which change nothing."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from pydantic import ValidationError

from minisgl.core import Grammar, SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.message import TokenIds, pack_ids
from minisgl.server.openai.chat import ChatRequest
from minisgl.server.openai.completions import CompletionRequest

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
TEXT = {"model": "m", "prompt": "hello"}
BODIES = {ChatRequest: CHAT, CompletionRequest: TEXT}
both = pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

OF_CHAT: dict[str, list[Any]] = {
    "top_logprobs": [1],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "continue_final_message": [True],
    "add_generation_prompt": [False],
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
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GRAMMARS = [  # name, value, what the scheduler gets
    ("response_format", {"type": "json_object"}, Grammar("json_schema", '{"type": "object"}')),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        Grammar("json_schema", json.dumps(SCHEMA)),
    ),
    ("guided_json", SCHEMA, Grammar("json_schema", json.dumps(SCHEMA))),
    ("guided_json", json.dumps(SCHEMA), Grammar("json_schema", json.dumps(SCHEMA))),
    ("guided_regex", "[0-9]+", Grammar("regex", "[0-9]+")),
    ("guided_choice", ["yes", 'n"o'], Grammar("lark", 'start: "yes" | "n\\"o"')),
    ("guided_grammar", 'start: "x"', Grammar("lark", 'start: "x"')),
]


def pairs(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}={value}")
        for name, values in table.items()
        for value in values
    ]


def read(kind: type[ChatRequest] | type[CompletionRequest], **fields: Any) -> Any:
    """The request as it comes over the wire: through JSON."""
    return kind.model_validate(json.loads(json.dumps({**BODIES[kind], **fields})))


def sampling(kind: type[ChatRequest] | type[CompletionRequest], **fields: Any) -> SamplingParams:
    return read(kind, **fields).sampling({})  # type: ignore[no-any-return]


def effect(request: Any) -> Any:
    return (
        request.sampling({}),
        request.num_answers,
        request.prompts(),
        request.include_usage,
        request.stream,
    )


@both
@pytest.mark.parametrize(("name", "value", "grammar"), GRAMMARS)
def test_formats_become_grammars(kind: Any, name: str, value: Any, grammar: Grammar) -> None:
    assert sampling(kind, **{name: value}).grammar == grammar


@both
def test_an_answer_follows_one_format_at_most(kind: Any) -> None:
    with pytest.raises(InvalidRequest, match="both response_format and guided_regex") as refusal:
        sampling(kind, response_format={"type": "json_object"}, guided_regex="x")
    assert refusal.value.param == "guided_regex"


@both
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("response_format", {"type": "json_schema"}, r"(?s)json_schema.*required"),
        ("response_format", {"type": "text", "json_schema": {"name": "x"}}, "not permitted"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": {}}},
            "json_schema.name",
        ),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}},
            "pattern",
        ),
        ("response_format", {"type": "xml"}, "json_object"),
        ("guided_choice", [], "at least 1"),
        ("guided_grammar", "start: " + "a " * 8192, "16391 characters, which is more than 8192"),
        ("guided_regex", "\ud83d", "half a surrogate pair"),
        ("guided_json", {"minimum": math.inf}, "finite number|not JSON"),
        ("guided_json", json.dumps({"title": "x" * 300_000}), "at most 131072"),
        ("guided_json", "{'type': 'object'}", "not JSON"),
        ("guided_json", "null", "dictionary"),
        ("guided_json", '{"a": ' * 65 + "1" + "}" * 65, "more than 64 deep"),
        ("guided_json", "[" * 100_000, "not JSON"),
        ("guided_json", '{"minimum": 1e999}', "not JSON"),
    ],
)
def test_bad_formats_are_refused(kind: Any, name: str, value: Any, reason: str) -> None:
    with pytest.raises((ValidationError, InvalidRequest), match=reason):
        sampling(kind, **{name: value})


@both
@pytest.mark.parametrize(("name", "value"), pairs(NEUTRAL))
def test_a_value_that_changes_nothing_is_accepted(kind: Any, name: str, value: Any) -> None:
    assert effect(read(kind, **{name: value})) == effect(read(kind))


@pytest.mark.parametrize(
    ("name", "value", "kind", "other"),
    [
        *((*pair.values, ChatRequest, CompletionRequest) for pair in pairs(NEUTRAL_OF_CHAT)),
        *((*pair.values, CompletionRequest, ChatRequest) for pair in pairs(NEUTRAL_OF_TEXT)),
    ],
)
def test_a_value_that_changes_nothing_is_accepted_where_the_field_is(
    name: str, value: Any, kind: Any, other: Any
) -> None:
    assert effect(read(kind, **{name: value})) == effect(read(kind))
    with pytest.raises(ValidationError) as error:
        read(other, **{name: value})
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
        ({"stop": ["x"] * 33}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop_token_ids": [1] * 33}, "stop_token_ids"),
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


def test_the_name_of_a_speaker_goes_to_the_template() -> None:
    (conversation,) = read(
        ChatRequest, messages=[{"role": "user", "content": "x", "name": "Ada"}]
    ).prompts()
    assert conversation.messages == [{"role": "user", "content": "x", "name": "Ada"}]


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
@pytest.mark.parametrize(
    "name", ["temprature", "messages_", "Model", "", "max_new_tokens", "stream_option"]
)
def test_an_unknown_field_is_an_error_that_names_it(kind: Any, name: str) -> None:
    with pytest.raises(ValidationError) as error:
        read(kind, **{name: 1})
    assert error.value.errors()[0]["loc"] == (name,)


@both
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 1),
        ("model", None),
        ("max_tokens", "5"),
        ("max_tokens", 5.0),
        ("max_tokens", True),
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", [1.0]),
        ("top_p", "1"),
        ("top_k", 1.5),
        ("top_k", "all"),
        ("min_p", {}),
        ("seed", "7"),
        ("seed", 1.0),
        ("ignore_eos", 1),
        ("ignore_eos", "true"),
        ("stream", 1),
        ("stream", "true"),
        ("stream_options", True),
        ("stream_options", {"include_usage": 1}),
        ("stream_options", {"usage": True}),
    ],
)
def test_types_are_not_guessed(kind: Any, name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as error:
        read(kind, **{name: value})
    assert error.value.errors()[0]["loc"][0] == name


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
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 10**30),
        ("temperature", -0.1),
        ("temperature", 100.5),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 10**30),
        ("min_p", -0.1),
        ("min_p", 2),
        ("seed", 2**63),
        ("seed", -(10**30)),
    ],
)
def test_a_number_outside_its_bounds_is_refused_by_name(kind: Any, name: str, value: Any) -> None:
    """Also one that no message between processes could carry."""
    with pytest.raises(InvalidRequest, match=name) as refusal:
        sampling(kind, **{name: value})
    assert refusal.value.param == name


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
    ("content", "text"),
    [
        ("a", "a"),
        ("", ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ("\1 \u2028 👍", "\1 \u2028 👍"),
    ],
)
def test_content_is_text_or_text_parts(content: Any, text: str) -> None:
    (conversation,) = read(ChatRequest, messages=[{"role": "user", "content": content}]).prompts()
    assert conversation.messages == [{"role": "user", "content": text}]


def test_a_developer_is_a_system() -> None:
    roles = ["developer", "system", "user", "assistant"]
    (conversation,) = read(
        ChatRequest, messages=[{"role": role, "content": "x"} for role in roles]
    ).prompts()
    assert [turn["role"] for turn in conversation.messages] == [
        "system",
        "system",
        "user",
        "assistant",
    ]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        {},
        "hello",
        None,
        ["hello"],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "robot", "content": "x"}],
        [{"role": "tool", "content": "x"}],
        [{"role": "tool", "tool_call_id": "1"}],
        [{"role": "user", "content": "x", "tool_call_id": "1"}],
        [{"role": "user", "content": "x", "tool_calls": [CALL]}],
        [{"role": "user", "content": "x", "reasoning_content": "Hm"}],
        [{"role": "assistant", "content": None}],
        [{"role": "assistant", "reasoning_content": "Hm"}],
        [{"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}],
        [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f"}}]}],
        [
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}],
            }
        ],
        [{"role": "assistant", "tool_calls": [{**CALL, "id": "\ud83d"}]}],
        [{"role": "assistant", "content": "x", "refusal": "no"}],
        [{"role": "User", "content": "x"}],
        [{"role": None, "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "assistant", "content": "x", "tool_calls": []}],
        [{"role": "user", "content": "x"}, {"role": "user", "content": "x", "weight": 1}],
    ],
)
def test_messages_of_another_shape_are_refused(messages: Any) -> None:
    with pytest.raises(ValidationError) as error:
        read(ChatRequest, messages=messages)
    assert error.value.errors()[0]["loc"][0] == "messages"


def turn(**fields: Any) -> Any:
    """What the template gets for an assistant's message."""
    (conversation,) = read(ChatRequest, messages=[{"role": "assistant", **fields}]).prompts()
    return conversation.messages[0]


def test_calls_and_their_results_go_to_the_template() -> None:
    call = {**CALL, "function": {"name": "f", "arguments": '{"x": [1, null]}'}}
    messages = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call, CALL],
            "refusal": None,
            "audio": None,
            "reasoning_content": "Hm",
        },
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "text", "text": "42"}],
            "name": "f",
        },
    ]
    (conversation,) = read(ChatRequest, messages=messages).prompts()
    calls = [{**CALL, "function": {"name": "f", "arguments": it}} for it in ({"x": [1, None]}, {})]
    assert conversation.messages == [
        {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "Hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "42", "name": "f"},
    ]
    assert turn(tool_calls=[CALL]) == turn(content="", tool_calls=[CALL])


DEEP = '{"a": ' * 65 + "1" + "}" * 65


@pytest.mark.parametrize(
    "arguments",
    ["", "{", "[1]", "null", '{"a": 1e999', '{"a": %s}' % 10**30, '{"a": "\\ud83d"}', DEEP],
)
def test_arguments_that_are_no_object_to_send_on_stay_text(arguments: str) -> None:
    (call,) = turn(tool_calls=[{**CALL, "function": {"name": "f", "arguments": arguments}}])[
        "tool_calls"
    ]
    assert call["function"]["arguments"] == arguments


def test_tools_go_to_the_template_unless_none_is_to_be_called() -> None:
    schema = {"type": "object", "properties": {"x": {}}}
    full = {"name": "f", "description": "F.", "parameters": schema, "strict": True}
    tools = [{"type": "function", "function": it} for it in (full, {"name": "g"})]

    def shown(**fields: Any) -> Any:
        return read(ChatRequest, tools=tools, **fields).prompts()[0].tools

    assert shown() == [
        {"type": "function", "function": {"name": "f", "description": "F.", "parameters": schema}},
        {
            "type": "function",
            "function": {"name": "g", "parameters": {"type": "object", "properties": {}}},
        },
    ]
    named = {"type": "function", "function": {"name": "g"}}
    assert (
        shown(tool_choice="required")
        == shown(tool_choice="auto")
        == shown(tool_choice=named)
        == shown()
    )
    assert shown(tool_choice="none") == []


@pytest.mark.parametrize(
    ("fields", "choice", "callable", "several"),
    [
        ({}, "auto", ["f", "g"], True),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, "auto", ["f", "g"], False),
        ({"tool_choice": "required", "parallel_tool_calls": True}, "required", ["f", "g"], True),
        ({"tool_choice": "none"}, "none", [], True),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}},
            "required",
            ["g"],
            False,
        ),
    ],
)
def test_what_an_answer_may_call(
    fields: Any, choice: str, callable: list[str], several: bool
) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    use = read(ChatRequest, tools=tools, **fields).tool_use
    assert (use.choice, [tool.name for tool in use.callable_tools], use.allows_several_calls) == (
        choice,
        callable,
        several,
    )
    assert use.is_enforced == (choice == "required")
    tools[1]["function"]["strict"] = True  # type: ignore[index]
    assert read(ChatRequest, tools=tools, **fields).tool_use.is_enforced == (choice != "none")


def nested(depth: int) -> dict[str, Any]:
    return (
        {"type": "object", "properties": {"a": nested(depth - 2)}}
        if depth > 2
        else {"type": "object"}
    )


@pytest.mark.parametrize(
    "function",
    [
        {},
        {"name": ""},
        {"name": "a b"},
        {"name": "f\n"},
        {"name": "x" * 65},
        {"name": "f", "description": 1},
        {"name": "f", "description": "\ud83d"},
        {"name": "f", "parameters": []},
        {"name": "f", "parameters": {"type": "string"}},
        {"name": "f", "parameters": {"type": ["object", "null"]}},
        {"name": "f", "parameters": {"title": "\ud83d"}},
        {"name": "f", "parameters": {"maximum": 10**30}},
        {"name": "f", "parameters": nested(66)},
        {"name": "f", "strict": "yes"},
        {"name": "f", "else": 1},
    ],
    ids=lambda function: str(function)[:60],
)
def test_a_tool_of_another_shape_is_refused(function: Any) -> None:
    with pytest.raises(ValidationError) as error:
        read(ChatRequest, tools=[{"type": "function", "function": function}])
    assert error.value.errors()[0]["loc"][:3] == ("tools", 0, "function")


def test_tools_have_bounds() -> None:
    def offer(names: list[str], **fields: Any) -> Any:
        return read(
            ChatRequest,
            tools=[{"type": "function", "function": {"name": it}} for it in names],
            **fields,
        )

    assert len(offer([str(i) for i in range(128)]).tool_use.tools) == 128
    with pytest.raises(ValidationError, match="tools"):
        offer([str(i) for i in range(129)])
    function = {"name": "f-._1" + "x" * 59, "parameters": nested(64)}
    assert read(
        ChatRequest, tools=[{"type": "function", "function": function}]
    ).tool_use.callable_tools


@pytest.mark.parametrize(
    ("names", "choice", "param"),
    [
        ("ff", "auto", "tools"),
        ("f", {"type": "function", "function": {"name": "g"}}, "tool_choice"),
        ("", {"type": "function", "function": {"name": "g"}}, "tool_choice"),
        ("", "required", "tool_choice"),
    ],
)
def test_a_choice_that_does_not_suit_the_tools_is_refused(
    names: str, choice: Any, param: str
) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    with pytest.raises(InvalidRequest) as refusal:
        read(ChatRequest, tools=tools, tool_choice=choice).prompts()
    assert refusal.value.param == param


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
    ("bad", "said"), [("a\ud83d", "half a surrogate pair"), ("a\0", "null character")]
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
def test_texts_that_are_none_are_refused_by_name(kind: Any, make: Any, bad: str, said: str) -> None:
    """JSON can spell them.

    No message between processes carries half a pair, and no one means a null character.
    """
    with pytest.raises(ValidationError) as error:
        read(kind, **make(bad))
    faults = error.value.errors()
    assert {fault["loc"][0] for fault in faults} == make(bad).keys()
    assert any(said in fault["msg"] or "surrogates not allowed" in fault["msg"] for fault in faults)


@pytest.mark.parametrize("text", ["\\u0000", "\\0", "\x01"])
def test_what_only_looks_like_a_null_character_is_a_text(text: str) -> None:
    assert sampling(
        CompletionRequest, guided_json={"enum": [text]}, prompt=text, stop=text
    ).stop == (text,)
