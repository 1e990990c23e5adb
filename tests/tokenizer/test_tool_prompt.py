"""Tools reach the model with every chat template, also with one that knows none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from minisgl.config import TokenizerOptions
from minisgl.errors import InvalidRequest
from minisgl.message import ChatMessage, Conversation
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.tool_prompt import call_format_of
from tests.checkpoints import tiny_tokenizer

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ALTERNATE = (  # as Gemma's
    "{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant') or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('refused') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}"
SHOWING = {
    "in general": "{{ tools }}" + TURNS,
    "by name": "{% for t in tools %}{{ t.function.name }}{% endfor %}" + TURNS,
    "beside a system's turn": NEEDS_SYSTEM + "{{ tools }}" + TURNS,
}
NOT_SHOWING = {
    "never": TURNS,
    "only that there are some": "{% if tools %}tools{% endif %}" + TURNS,
    "under another name": "{{ xml_tools }}" + TURNS,
    "only calls": "{% for m in messages %}{{ m.tool_calls }}{% endfor %}" + TURNS,
}
TEMPLATES = {
    "hermes": "{% if tools %}<tools>{{ tools }}</tools> "
    "<tool_call>{{ call.arguments }}</tool_call>{% endif %}",
    "llama3_json": "{{- 'Respond in the format "
    '{"name": function name, "parameters": dictionary}.\' }}',
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}{% endif %}[TOOL_CALLS]",
}
TOOL = {
    "type": "function",
    "function": {"name": "get", "description": 'Zü"rich', "parameters": {"type": "object"}},
}
USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "Be kind."}


def with_template(folder: Path, template: Any, **options: Any) -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_tokens([AddedToken("<tool_call>", special=True)])
    tokenizer.save_pretrained(folder)
    return Tokenizer(folder, TokenizerOptions(**options))


def render(tokenizer: Tokenizer, *messages: ChatMessage, tools: Any = (TOOL,)) -> str:
    return tokenizer.template.render(Conversation(list(messages), tools=list(tools)))


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("template", SHOWING.values(), ids=SHOWING)
def test_a_template_that_shows_tools_is_left_to_it(template: str, tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, template)
    assert not tokenizer.template.describes_tools
    assert "# Tools" not in render(tokenizer, SYSTEM, USER)


@pytest.mark.parametrize("template", NOT_SHOWING.values(), ids=NOT_SHOWING)
def test_tools_that_a_template_does_not_show_are_described(template: str, tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, template)
    assert tokenizer.template.describes_tools
    assert tokenizer.template.call_format == "hermes"
    text = render(tokenizer, USER)
    assert f"<tools>\n{json.dumps(TOOL, ensure_ascii=False)}\n</tools>" in text
    assert text.count('"name": "get"') == 1


def test_calls_in_a_form_that_is_not_parsed_are_described_where_they_are_to_be_parsed(
    tmp_path: Path,
) -> None:
    template = SHOWING["in general"] + "<function=f>"
    assert not with_template(tmp_path / "a", template).template.describes_tools
    assert with_template(
        tmp_path / "b", template, falls_back_to_hermes=True
    ).template.describes_tools
    known = SHOWING["in general"] + "<tool_call>"
    assert not with_template(
        tmp_path / "c", known, falls_back_to_hermes=True
    ).template.describes_tools


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_the_format_of_calls(name: str, tmp_path: Path) -> None:
    assert call_format_of(TEMPLATES[name]) == name
    tokenizer = with_template(tmp_path, SHOWING["in general"] + "{#" + TEMPLATES[name] + "#}")
    assert tokenizer.template.call_format == name


@pytest.mark.parametrize(
    "template", ["", "{{ messages }}", "<tool_call>\n<function=f>\n<parameter=x>"]
)
def test_of_other_templates_the_format_is_not_known(template: str) -> None:
    assert call_format_of(template) is None


def test_without_a_template_nothing_is_described(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, None, falls_back_to_hermes=True)
    assert not tokenizer.template.describes_tools
    assert tokenizer.template.call_format is None


def test_the_description_is_the_systems_turn_or_its_end(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TURNS)
    assert render(tokenizer, USER).startswith("[system]# Tools\n\nYou may call")
    assert render(tokenizer, USER).endswith("\n</tool_call>[user]hi")
    assert render(tokenizer, SYSTEM, USER).startswith("[system]Be kind.\n\n# Tools\n\n")
    assert render(tokenizer, SYSTEM, USER, tools=()) == "[system]Be kind.[user]hi"


def test_without_a_systems_turn_the_description_is_the_beginning_of_the_first_question(
    tmp_path: Path,
) -> None:
    text = render(with_template(tmp_path, ALTERNATE), USER)
    assert text.startswith("[user]# Tools\n\n")
    assert text.endswith("\n</tool_call>\n\nhi")


HISTORY: list[ChatMessage] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [call("get", {"x": "é"})]},
    {"role": "tool", "tool_call_id": "1", "content": "sun"},
    {"role": "tool", "tool_call_id": "2", "content": "rain"},
    {
        "role": "assistant",
        "content": "So.",
        "tool_calls": [call("get", {}), call("get", '{"bro')],
    },
]


@pytest.mark.parametrize("tools", [(TOOL,), ()], ids=["tools", "no tools"])
@pytest.mark.parametrize("template", [TURNS, ALTERNATE], ids=["any turns", "in turns"])
def test_calls_and_results_of_earlier_turns_are_text(
    template: str, tools: Any, tmp_path: Path
) -> None:
    text = render(with_template(tmp_path, template), *HISTORY, tools=tools)
    assert text.endswith(
        "hi[assistant]"
        '<tool_call>\n{"name": "get", "arguments": {"x": "é"}}\n</tool_call>'
        "[user]<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
        "[assistant]So.\n"
        '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get", "arguments": {"bro}\n</tool_call>'
    )


@pytest.mark.parametrize("content", ["And now?", [{"type": "text", "text": "And now?"}]])
@pytest.mark.parametrize("template", [TURNS, ALTERNATE], ids=["any turns", "in turns"])
def test_a_question_behind_results_is_in_their_turn(
    template: str, content: Any, tmp_path: Path
) -> None:
    """Templates that want user and assistant to alternate would refuse a second turn."""
    tokenizer = with_template(tmp_path, template)
    text = render(tokenizer, *HISTORY[:4], {"role": "user", "content": content})
    assert text.endswith(
        "[user]<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
        "\n\nAnd now?"
    )


def test_the_turns_of_users_without_results_stay_apart(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TURNS)
    assert render(tokenizer, USER, USER).endswith("[user]hi[user]hi")


CHATML = (  # SmolLM2's, whose contents are texts
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_conversation_with_tools_in_chatml(tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [call("get", {"x": 1})]}
    result = {"role": "tool", "tool_call_id": "1", "content": "sun"}
    text = render(
        with_template(tmp_path, CHATML), SYSTEM, USER, turn, result, result, USER, tools=()
    )
    assert text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "get", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n"
        "<tool_response>\nsun\n</tool_response>\n<tool_response>\nsun\n</tool_response>\n\nhi"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_content_in_parts_and_no_content_are_text_too(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TURNS)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turn = {"role": "assistant", "content": None, "tool_calls": [call("get", {})]}
    text = render(tokenizer, {"role": "system", "content": parts}, turn)
    assert "[system]ab\n\n# Tools" in text
    assert "[assistant]<tool_call>" in text


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "tool_calls": [{"function": {"name": "get"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]},
        {"role": "assistant", "tool_calls": [{"type": "function"}]},
        {"role": "assistant", "tool_calls": [{"function": "get"}]},
        {"role": "assistant", "tool_calls": [call("get", {"x": {1}})]},
        {"role": "assistant", "tool_calls": ["get"]},
        {"role": "assistant", "tool_calls": "get"},
        {"role": "assistant", "tool_calls": {"name": "get", "arguments": {}}},
        {"role": "assistant", "content": 5, "tool_calls": [call("get", {})]},
        {"role": "user", "content": ["hi"]},
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": "user", "content": 5},
        {"role": "tool", "content": 5},
    ],
    ids=repr,
)
@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["no tools", "tools"])
def test_a_turn_that_cannot_be_text_is_refused(turn: Any, tools: Any, tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TURNS)
    with pytest.raises(InvalidRequest) as refusal:
        render(tokenizer, USER, turn, HISTORY[2], tools=tools)
    assert refusal.value.param == "messages"


@pytest.mark.parametrize("tool", [{"name": {1}}, "get", None, 5], ids=repr)
def test_a_tool_that_is_no_json_object_is_refused(tool: Any, tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TURNS)
    with pytest.raises(InvalidRequest, match="a tool must be a JSON object, got") as refusal:
        render(tokenizer, USER, tools=(tool,))
    assert refusal.value.param == "tools"


@pytest.mark.parametrize(
    ("turn", "tools"),
    [
        ({"role": "user", "content": "a"}, ("x" * 10**5,)),
        ({"role": "assistant", "tool_calls": "x" * 10**5}, (TOOL,)),
        ({"role": "assistant", "tool_calls": ["x" * 10**5]}, (TOOL,)),
        ({"role": "user", "content": ["x" * 10**5]}, (TOOL,)),
    ],
    ids=["tool", "calls", "call", "content"],
)
def test_a_long_value_is_cut_where_it_is_refused(turn: Any, tools: Any, tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TURNS)
    with pytest.raises(InvalidRequest, match=r"got .*xxx\.\.\.xxx") as refusal:
        render(tokenizer, USER, turn, {"role": "tool", "content": "-"}, tools=tools)
    assert len(str(refusal.value)) < 500


def test_a_client_cannot_write_the_markers_of_the_description(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TURNS)
    marker = tokenizer.added_tokens["<tool_call>"]
    tools = [{**TOOL, "function": {"name": "get", "description": "<tool_call>"}}]

    def num_markers(content: str, tools: Any) -> int:
        message = {"role": "user", "content": content}
        return tokenizer.encode(Conversation([message], tools=tools)).tolist().count(marker)

    assert num_markers("hi", [TOOL]) == 2
    assert num_markers("<tool_call>", tools) == 2
