"""Formats of tool calls: parsed whatever their pieces; the grammar allows nothing else."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import llguidance
import llguidance.hf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from minisgl.core import Grammar
from minisgl.server.parsing.deltas import (
    OutputParser,
    ParsedOutput,
    ToolCallArguments,
    ToolCallStart,
)
from minisgl.server.parsing.incremental import IncrementalParser
from minisgl.server.parsing.tool_calls import MAX_DEPTH, is_object
from minisgl.server.parsing.tool_formats import TOOL_FORMATS, ToolFormat
from minisgl.server.requests.tools import Function, ToolUse
from tests.checkpoints import tiny_tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    Function(name="get_weather", parameters=CITY),
    Function(name="get"),
    Function(name="a.b-c_1"),
]
USE = ToolUse(TOOLS)
HERMES = TOOL_FORMATS["hermes"]("")
LLAMA = TOOL_FORMATS["llama3_json"]("")
MISTRAL = TOOL_FORMATS["mistral"]("")
NEW_MISTRAL = TOOL_FORMATS["mistral"]("[TOOL_CALLS] [ARGS]")


def calls(*items: tuple[str, str], style: ToolFormat) -> str:
    """Some calls as a model writes them."""
    if style is NEW_MISTRAL:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in items)
    key = "parameters" if style is LLAMA else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in items]
    if style is HERMES:
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in objects)
    return f"[TOOL_CALLS] [{', '.join(objects)}]" if style is MISTRAL else "; ".join(objects)


def feed_pieces(parser: OutputParser, *pieces: str) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and calls.

    Every delta says something and where in the answer that is, one behind the other. Arguments come
    after their call has begun.
    """
    answer = "".join(pieces)
    end = 0  # of the last delta, in the answer
    output = ParsedOutput()
    for number, piece in enumerate(pieces, start=1):
        for delta in parser.feed(piece, is_last=number == len(pieces)):
            if not isinstance(delta, ToolCallStart):
                assert delta.text
                assert delta.start >= end
                end = delta.start + len(delta.text)
                assert answer[delta.start : end] == delta.text
            if isinstance(delta, ToolCallStart | ToolCallArguments):
                assert delta.index <= len(output.calls)
            output.add(delta)
    assert len({call.id for call in output.calls}) == len(output.calls)
    return (
        output.content,
        output.reasoning,
        [(call.name, call.arguments) for call in output.calls],
    )


def read(
    text: str, style: ToolFormat, use: ToolUse = USE, *, eager: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, the same in one piece, in two, and character by character."""
    content, _, parsed_calls = whole = feed_pieces(style.make_parser(use, eager=eager), text)
    for at in range(len(text)):
        assert feed_pieces(style.make_parser(use, eager=eager), text[:at], text[at:]) == whole
    assert feed_pieces(style.make_parser(use, eager=eager), *text, "") == whole
    return content, parsed_calls


styles = pytest.mark.parametrize(
    "style",
    [HERMES, LLAMA, MISTRAL, NEW_MISTRAL],
    ids=["hermes", "llama", "mistral", "new mistral"],
)
marked = pytest.mark.parametrize(
    "style", [HERMES, MISTRAL, NEW_MISTRAL], ids=["hermes", "mistral", "new mistral"]
)
eagerness = pytest.mark.parametrize("eager", [False, True], ids=["careful", "eager"])
ODD = (
    r'{"city": "Zü\"rich {} ]}; </tool_call> 語\\", "more": [{"a": {}}, [1.5e3, null]],   '
    r'"😀": "\ud83d\ude00"}'
)


@styles
@eagerness
def test_a_call_is_read_as_it_was_written(style: ToolFormat, eager: bool) -> None:
    assert read(calls(("get_weather", ODD), style=style), style, eager=eager) == (
        "",
        [("get_weather", ODD)],
    )


@styles
@pytest.mark.parametrize("name", ["m" * 128, "n" * 128 + "." + "f" * 128], ids=["alone", "in n"])
def test_a_name_of_the_greatest_length_is_read_also_with_its_namespace(
    style: ToolFormat, name: str
) -> None:
    use = ToolUse([Function(name="get").model_copy(update={"name": name})])
    assert read(calls((name, "{}"), style=style), style, use) == ("", [(name, "{}")])


@styles
@eagerness
def test_several_calls_are_read_in_order(style: ToolFormat, eager: bool) -> None:
    expected_calls = [
        ("get_weather", '{"city": "Ulm"}'),
        ("get", "{}"),
        ("get_weather", '{"city":"Bonn"}'),
        ("a.b-c_1", "{}"),
    ]
    assert read(calls(*expected_calls, style=style) + "\n", style, eager=eager) == (
        "",
        expected_calls,
    )


@marked
@eagerness
def test_text_around_calls_is_content_without_the_blanks_between(
    style: ToolFormat, eager: bool
) -> None:
    text = f" Let me  see.\n\n{calls(('get', '{}'), style=style)} \nDone. "
    assert read(text, style, eager=eager) == (" Let me  see.Done. ", [("get", "{}")])


def test_text_before_a_python_tag_is_content() -> None:
    text = 'Well:\n<|python_tag|>{"name": "get", "parameters": {}}'
    assert read(text, LLAMA) == ("Well:", [("get", "{}")])


@pytest.mark.parametrize(
    ("text", "style"),
    [
        ('<tool_call>{"arguments": {"x": 1}, "name": "get"}</tool_call>', HERMES),
        ('<tool_call>\n{"name":"get" ,\n"arguments" : {"x": 1} }', HERMES),
        ('{"type": "function", "name": "get", "parameters": {"x": 1}}', LLAMA),
        ('<|python_tag|>{"name": "get", "parameters": {"x": 1}}', LLAMA),
        ('\n\n{"name": "get", "parameters": {"x": 1}}', LLAMA),
        ('[TOOL_CALLS][{"name": "get", "arguments": {"x": 1}, "id": "123456789"}]', MISTRAL),
        ('[TOOL_CALLS]get{"x": 1}', MISTRAL),
        ('[TOOL_CALLS]get[CALL_ID]123456789[ARGS]{"x": 1}', MISTRAL),
    ],
)
@eagerness
def test_other_spellings_of_a_call(text: str, style: ToolFormat, eager: bool) -> None:
    assert read(text, style, eager=eager) == ("", [("get", '{"x": 1}')])


@pytest.mark.parametrize(
    ("text", "style"),
    [
        ('<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>', HERMES),
        ('<tool_call>\n{"name": "get", "arguments": "{}"}\n</tool_call>', HERMES),
        ('<tool_call>\n{"name": "get"}\n</tool_call>', HERMES),
        ("<tool_call>\nI call get.\n</tool_call> <tool_cal", HERMES),
        ('{"city": "Ulm"}', LLAMA),
        ('{"name": "unknown", "parameters": {}}', LLAMA),
        (
            '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"name": "got", "arg',
            HERMES,
        ),
        ('<tool_call>{"arguments": {}, "name": "unknown"}</tool_call>', HERMES),
        ("<|python_tag|>print(1)", LLAMA),
        ('I say: {"name": "get", "parameters": {}}', LLAMA),
        ("  two blanks", LLAMA),
        ("[TOOL_CALLS] [1, 2]", MISTRAL),
        ("[TOOL_CALLS]unknown[ARGS]{}", MISTRAL),
        ("a [TOOL_CA", MISTRAL),
        *(
            (text, style)
            for style in (HERMES, LLAMA, MISTRAL)
            for text in ("", " ", "hi \n", "{", "[", "<", "a\n\n b<|")
        ),
    ],
)
@eagerness
def test_what_is_no_call_of_an_offered_tool_stays_content(
    text: str, style: ToolFormat, eager: bool
) -> None:
    assert read(text, style, eager=eager) == (text, [])


@styles
@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": }',
        '{"a": {"b": 1',
        '{"a": [1}',
        '{"a": 1,}',
        "{'a': 1}",
        '{"a": "',
        "[" * 9,
        '{"a": NaN}',
        '{"a": -Infinity}',
        r'{"a": "\ud800"}',
        '{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}",
    ],
)
def test_a_whole_answer_has_no_broken_arguments(style: ToolFormat, arguments: str) -> None:
    text = calls(("get", arguments), style=style)
    assert read(text, style) == (text, [])


@marked
def test_behind_a_broken_call_a_good_one_is_read(style: ToolFormat) -> None:
    broken = calls(("get", '{"a": }'), style=style)
    assert read(f"{broken} {calls(('get', '{}'), style=style)}", style) == (broken, [("get", "{}")])


@styles
def test_a_stream_has_the_name_first_and_then_the_arguments_as_they_come(style: ToolFormat) -> None:
    text = calls(("get_weather", '{"city": "Ulm"}'), style=style)
    parser = style.make_parser(USE, eager=True)
    deltas = [delta for char in text for delta in parser.feed(char, is_last=False)]
    assert isinstance(deltas[0], ToolCallStart)
    assert deltas[0].name == "get_weather"
    assert [delta.text for delta in deltas[1:]] == list('{"city": "Ulm"}')  # type: ignore[union-attr]


@styles
def test_content_is_not_held_back_once_it_cannot_be_a_marker(style: ToolFormat) -> None:
    parser = style.make_parser(USE, eager=True)
    for text in ("Hello", " world,", " <toast>", " [TOOTHS]", "."):
        assert "".join(delta.text for delta in parser.feed(text, is_last=False)) == text  # type: ignore[union-attr]


@styles
@eagerness
def test_without_parallel_calls_the_first_is_the_only_one(style: ToolFormat, eager: bool) -> None:
    text = calls(("get", '{"n": 1}'), ("get", '{"n": 2}'), style=style)
    for use in (ToolUse(TOOLS, is_parallel=False), ToolUse(TOOLS, "required", "get")):
        assert read(text, style, use, eager=eager) == ("", [("get", '{"n": 1}')])


@styles
@pytest.mark.parametrize("second", ['{"n": {"m": 2', '{"n": 2]}', '{"n": NaN}'])
def test_without_parallel_calls_a_second_that_is_none_is_content(
    style: ToolFormat, second: str
) -> None:
    """In a stream, too: a call that is not sent is read with care."""
    text = calls(("get", '{"n": 1}'), ("get", second), style=style)
    use = ToolUse(TOOLS, is_parallel=False)
    content, parsed_calls = read(text, style, use)
    assert second in content
    assert parsed_calls == [("get", '{"n": 1}')]
    assert read(text, style, use, eager=True) == (content, parsed_calls)


def test_a_named_choice_reads_no_call_of_another_tool() -> None:
    text = calls(("get", "{}"), style=HERMES)
    assert read(text, HERMES, ToolUse(TOOLS, "required", "get_weather")) == ("", [])


def parsed_so_far(text: str, expected_calls: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The calls in the beginning of an answer: a name once text follows it, then arguments."""
    found = []
    for name, arguments in expected_calls:
        text = text.partition(name)[2]
        if not text:
            break
        text = text[text.index("{") :] if "{" in text else ""
        found.append((name, text[: len(arguments)]))
        text = text[len(arguments) :]
    return found


@styles
@pytest.mark.parametrize("named", [None, "get_weather"])
def test_a_forced_answer_is_calls_wherever_it_is_cut(style: ToolFormat, named: str | None) -> None:
    expected_calls = [("get_weather", ODD), ("get", "{}"), ("a.b-c_1", '{"a": {"b": 1}}')][
        : 1 if named else None
    ]
    text = calls(*expected_calls, style=style)
    use = ToolUse(TOOLS, "required", named)
    for at in range(len(text) + 1):
        for eager in (False, True):
            assert feed_pieces(style.make_parser(use, eager=eager), text[:at]) == (
                "",
                "",
                parsed_so_far(text[:at], expected_calls),
            )
            assert feed_pieces(style.make_parser(use, eager=eager), *text[:at], "") == (
                "",
                "",
                parsed_so_far(text[:at], expected_calls),
            )


@styles
def test_with_a_free_choice_a_call_that_is_cut_is_content_but_its_closing_marker_is_not(
    style: ToolFormat,
) -> None:
    text = calls(("get", '{"a": 1}'), style=style)
    is_whole = []
    for at in range(len(text) + 1):
        content, parsed_calls = read(text[:at], style)
        assert (content, parsed_calls) in ((text[:at], []), ("", [("get", '{"a": 1}')]))
        is_whole.append(bool(parsed_calls))
    assert is_whole == sorted(is_whole), "once a call is whole it stays so"
    assert is_whole.index(True) == text.index("1}") + 2


@styles
def test_a_stream_has_nothing_but_the_call_wherever_it_is_cut_behind_its_arguments(
    style: ToolFormat,
) -> None:
    text = calls(("get", '{"a": 1}'), style=style).replace("1}}", '1}, "id": "x"}')
    for at in range(text.index("1}") + 2, len(text) + 1):
        assert read(text[:at], style, eager=True) == ("", [("get", '{"a": 1}')])


@styles
def test_ids_are_as_the_templates_want_them(style: ToolFormat) -> None:
    wanted = r"[a-zA-Z0-9]{9}" if style in (MISTRAL, NEW_MISTRAL) else r"call_[0-9a-f]{24}"
    assert re.fullmatch(wanted, style.new_id())


MARKS = (
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "; ",
    ", ",
    "[",
    "]",
    "\n",
    " ",
)
PARTS = (
    '{"name": "get", ',
    '"arguments": ',
    '"parameters": ',
    "{}",
    '{"a": "}"}',
    "}",
    "{",
    '"',
    "\\",
    "text",
    "get",
)
WHOLE = (
    '{"name": "get", "arguments": {"a": "}"}}',
    '{"name": "get", "parameters": {}}',
    'get[ARGS]{"a": [{}]}',
    '{"x": 1}',
)
WORDS = st.lists(
    st.sampled_from(MARKS) | st.sampled_from(PARTS) | st.sampled_from(WHOLE), max_size=12
).map("".join)


@styles
@eagerness
@settings(deadline=None)
@given(
    text=WORDS,
    cuts=st.lists(st.integers(0, 80), max_size=6),
    choice=st.sampled_from(["auto", "required"]),
)
def test_how_the_text_is_cut_changes_nothing(
    style: ToolFormat, eager: bool, text: str, cuts: list[int], choice: Any
) -> None:
    use = ToolUse(TOOLS, choice)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    whole = feed_pieces(style.make_parser(use, eager=eager), text)
    assert feed_pieces(style.make_parser(use, eager=eager), *pieces) == whole
    assert feed_pieces(style.make_parser(use, eager=eager), *text, "") == whole


GAPS = st.integers(0, 9) | st.integers(500, 3000)
GAPPED_WORDS = st.lists(
    st.sampled_from(MARKS) | st.sampled_from(PARTS) | GAPS.map(lambda size: " " * size), max_size=9
).map("".join)


@styles
@eagerness
@settings(deadline=None, max_examples=50)
@given(
    text=GAPPED_WORDS,
    size=st.integers(1, 5000),
    choice=st.sampled_from(["auto", "required"]),
)
def test_long_blanks_change_nothing_however_the_text_is_cut(
    style: ToolFormat, eager: bool, text: str, size: int, choice: Any
) -> None:
    use = ToolUse(TOOLS, choice)
    whole = feed_pieces(style.make_parser(use, eager=eager), text)
    assert feed_pieces(style.make_parser(use, eager=eager), *batches(text, size), "") == whole
    assert feed_pieces(style.make_parser(use, eager=eager), *text, "") == whole


def batches(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


NUM_HELD = 3_000  # characters
MOST_LOOKS = 700  # at a character; to look at all that is held each time would be 1,500
BEGUN = {
    "text": "a",
    "hermes marker": "<tool_call>",
    "hermes object": '<tool_call>{"name"',
    "hermes end": '<tool_call>{"name": "get", "arguments": {}}',
    "mistral marker": "[TOOL_CALLS]",
    "mistral object": '[TOOL_CALLS][{"name":',
    "llama object": '{"name": "get", ',
    "no call": "",
}


@styles
@eagerness
@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN)
@pytest.mark.parametrize("filler", [" ", ";", "\n,"])
def test_what_is_held_back_is_looked_at_a_bounded_number_of_times(
    style: ToolFormat, eager: bool, begun: str, filler: str
) -> None:
    parser = style.make_parser(USE, eager=eager)
    assert num_characters_looked_at(parser, begun, filler * NUM_HELD) < MOST_LOOKS * NUM_HELD


@pytest.mark.parametrize("key", ["id", "type"])
def test_so_is_a_long_field_behind_the_arguments(key: str) -> None:
    begun = f'<tool_call>{{"name": "get", "arguments": {{}}, "{key}": "'
    parser = HERMES.make_parser(USE, eager=False)
    assert num_characters_looked_at(parser, begun, "a" * NUM_HELD) < MOST_LOOKS * NUM_HELD


@styles
@eagerness
def test_many_calls_that_come_at_once_are_not_copied_once_a_call(
    style: ToolFormat, eager: bool
) -> None:
    few, many = (
        num_characters_looked_at(
            style.make_parser(USE, eager=eager), calls(*[("get", "{}")] * count, style=style)
        )
        for count in (500, 2_000)
    )
    assert many < 6 * few


def num_characters_looked_at(parser: OutputParser, begun: str, rest: str = "") -> int:
    """The held text of all states that run, while the rest comes character by character."""
    assert isinstance(parser, IncrementalParser)
    num_characters = 0
    run_state = parser._run_state

    def counted(is_last: bool) -> bool:
        nonlocal num_characters
        num_characters += len(parser._held)
        return run_state(is_last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parser, "_run_state", counted)
        feed_pieces(parser, begun, *rest, "")
    return num_characters


@styles
@settings(deadline=None)
@given(text=WORDS)
def test_a_careful_reader_loses_nothing_but_calls_and_breaks_no_json(
    style: ToolFormat, text: str
) -> None:
    content, _, parsed_calls = feed_pieces(style.make_parser(USE, eager=False), text)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in parsed_calls)
    if not parsed_calls:
        assert content == text


TOKENIZER = tiny_tokenizer()
TOKENIZER.add_tokens([AddedToken(text, special=False) for text in ("<tool_call>", "</tool_call>")])
TOKENIZER.add_special_tokens(
    {"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]}
)
VOCABULARY = llguidance.hf.from_tokenizer(TOKENIZER)
MARKERS = TOKENIZER.get_added_vocab()


def spell(text: str) -> list[int]:
    """Ids of a text in which no marker is one token."""
    return [index for char in text for index in TOKENIZER.encode(char, add_special_tokens=False)]


def matches(grammar: Grammar, text: str) -> bool:
    """Whether a text is all that the grammar asks for."""
    return matches_ids(grammar, TOKENIZER.encode(text, add_special_tokens=False))


def matches_ids(grammar: Grammar, ids: list[int]) -> bool:
    spec = llguidance.grammar_from(grammar.kind, grammar.text)
    matcher = llguidance.LLMatcher(VOCABULARY, spec, log_level=0)
    assert not matcher.get_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


GOOD = [
    ("get_weather", '{"city": "Ulm", "days": 2}'),
    ("get", '{"any": [1, {"x": null}]}'),
    ("get", "{}"),
]
BAD = [
    ("get_weather", '{"city": 1}'),
    ("get_weather", "{}"),
    ("got", "{}"),
    ("get", "[]"),
    ("get", '{"a": }'),
]
REQUIRED = ToolUse(TOOLS, "required")


@styles
def test_a_grammar_of_calls_has_them_and_nothing_else(style: ToolFormat) -> None:
    grammar = style.grammar(REQUIRED, MARKERS)
    for expected_calls in ([GOOD[0]], [GOOD[1]], GOOD):
        text = calls(*expected_calls, style=style)
        assert matches(grammar, text)
        assert read(text, style) == ("", expected_calls), (
            "and the parser reads what the grammar writes"
        )
    assert not any(matches(grammar, calls(bad, style=style)) for bad in BAD)
    assert not any(
        matches(grammar, text) for text in ("", "text", "text " + calls(GOOD[2], style=style), "{}")
    )


@styles
def test_keywords_that_change_nothing_are_in_no_grammar_of_calls(style: ToolFormat) -> None:
    """llguidance refuses them."""
    texts = {"type": "array", "items": {"type": "string"}, "uniqueItems": False}
    parameters = {"type": "object", "properties": {"a": texts}, "propertyNames": {}}
    tools = [Function(name="get", parameters=parameters)]
    grammar = style.grammar(ToolUse(tools, "required"), MARKERS)
    assert matches(grammar, calls(("get", '{"a": ["b"]}'), style=style))


@styles
def test_a_grammar_of_one_call_has_no_second(style: ToolFormat) -> None:
    for use in (
        ToolUse(TOOLS, "required", is_parallel=False),
        ToolUse(TOOLS, "required", "get_weather"),
    ):
        grammar = style.grammar(use, MARKERS)
        assert matches(grammar, calls(GOOD[0], style=style))
        assert not matches(grammar, calls(GOOD[0], GOOD[0], style=style))
    assert not matches(grammar, calls(GOOD[1], style=style)), (
        "another tool than the one that was named"
    )


@styles
def test_strict_tools_leave_a_choice_but_not_of_their_arguments(style: ToolFormat) -> None:
    grammar = style.grammar(USE, MARKERS)
    before = "" if style is LLAMA else "Let me see [<to. "
    assert matches(grammar, "just text")
    assert matches(grammar, "")
    assert matches(grammar, before + calls(*GOOD, style=style))
    assert not any(matches(grammar, before + calls(bad, style=style)) for bad in BAD)


@pytest.mark.parametrize("style", [HERMES, MISTRAL], ids=["hermes", "mistral"])
def test_a_marker_that_is_no_token_is_spelled_out(style: ToolFormat) -> None:
    grammar = style.grammar(REQUIRED, {})
    ids = spell(calls(GOOD[1], style=style))
    assert matches_ids(grammar, ids)


@pytest.mark.parametrize(
    ("markers", "spelled"),
    [(MARKERS, False), (MARKERS, True), ({}, True)],
    ids=["a token", "a token that is spelled", "no token"],
)
@marked
def test_strict_tools_need_no_marker_token(
    style: ToolFormat, markers: dict[str, int], spelled: bool
) -> None:
    grammar = style.grammar(USE, markers)

    def matches_either(text: str) -> bool:
        if not spelled:
            return matches(grammar, text)
        return matches_ids(grammar, spell(text))

    for before in ("", "Let me see [<to. ", "<tool_cal", "[TOOL_"):
        assert matches_either(before)
        assert matches_either(before + calls(*GOOD, style=style))
        assert not any(matches_either(before + calls(bad, style=style)) for bad in BAD)


def test_references_in_a_schema_are_to_the_schema() -> None:
    city = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/x"}},
        "$defs": {"x": {"enum": ["a", "b"]}},
    }
    grammar = HERMES.grammar(ToolUse([Function(name="f", parameters=city)], "required"), MARKERS)
    assert matches(grammar, calls(("f", '{"x": "b"}'), style=HERMES))
    assert not matches(grammar, calls(("f", '{"x": "c"}'), style=HERMES))


SAID = st.lists(
    st.sampled_from([*GOOD, *BAD, ("get", '{"a": [{}]}'), ("get", '{"a": NaN}')]), max_size=3
)
EDITS = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 4), st.sampled_from(["", *MARKS, *PARTS])),
    max_size=2,
)


@styles
@settings(deadline=None, max_examples=300)
@given(
    said=SAID,
    edits=EDITS,
    before=st.sampled_from(["", "Hi. "]),
    choice=st.sampled_from(["auto", "required"]),
    is_parallel=st.booleans(),
)
def test_a_stream_says_what_a_whole_answer_says_unless_arguments_are_broken(
    style: ToolFormat,
    said: list[tuple[str, str]],
    edits: list[tuple[int, int, str]],
    before: str,
    choice: Any,
    is_parallel: bool,
) -> None:
    text = before + calls(*said, style=style)
    for at, num_dropped, inserted in edits:
        text = text[:at] + inserted + text[at + num_dropped :]
    use = ToolUse(TOOLS, choice, is_parallel=is_parallel)
    streamed = feed_pieces(style.make_parser(use, eager=True), text)
    if choice == "required" or all(is_object(arguments) for _, arguments in streamed[2]):
        assert streamed == feed_pieces(style.make_parser(use, eager=False), text)


@pytest.mark.parametrize(
    ("text", "style"),
    [
        ('<tool_call>\n{"name": "get", "arguments": {"x": 1}\n</tool_call>', HERMES),
        ('[TOOL_CALLS] [{"name": "get", "arguments": {"x": 1}]', MISTRAL),
        ('{"name": "get", "parameters": {"x": 1}', LLAMA),
    ],
)
@eagerness
def test_the_brace_behind_the_arguments_may_be_missing(
    text: str, style: ToolFormat, eager: bool
) -> None:
    assert read(text, style, eager=eager) == ("", [("get", '{"x": 1}')])
