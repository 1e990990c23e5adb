"""Reasoning is told apart from content, however the text is cut; a grammar allows it first."""

from __future__ import annotations

import gc
import json
import re
import weakref

import llguidance
import llguidance.hf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from minisgl.core import Grammar, SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.sampling_params import MAX_GRAMMAR
from minisgl.server.parsing import Dialect
from minisgl.server.parsing.deltas import PlainTextParser
from minisgl.server.parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from minisgl.server.parsing.tool_formats import TOOL_FORMATS
from minisgl.server.requests.tools import Function, ToolUse
from tests.checkpoints import tiny_tokenizer
from tests.server.parsing.test_tool_formats import (
    MOST_LOOKS,
    batches,
    feed_pieces,
    num_characters_looked_at,
)

QWEN = REASONING_FORMATS["qwen3"]
DEEPSEEK = REASONING_FORMATS["deepseek_r1"]
USE = ToolUse([Function(name="get")], "required")
NO_TOOLS = ToolUse()
CALL = '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'
GRAMMARS = {
    "json": Grammar(
        "json_schema",
        json.dumps({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}),
    ),
    "regex": Grammar("regex", '\\{"a": 1\\}|x/y|x\\/z|\n'),
    "lark": Grammar("lark", 'start: TEXT GAP\nTEXT: "{\\"a\\": "\nGAP: "1}"'),
}


def parse(
    text: str, reasoning_format: ReasoningFormat, *, allows_reasoning: bool = True
) -> tuple[str, str]:
    """Reasoning and content, which do not depend on the pieces in which the text comes."""

    def parse_pieces(*pieces: str) -> tuple[str, str, list[tuple[str, str]]]:
        parser = reasoning_format.make_parser(PlainTextParser(), allows_reasoning=allows_reasoning)
        return feed_pieces(parser, *pieces)

    content, reasoning, calls = parse_pieces(text)
    for at in range(len(text)):
        assert parse_pieces(text[:at], text[at:]) == (content, reasoning, calls)
    assert parse_pieces(*text, "") == (content, reasoning, calls)
    return reasoning, content


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nHm, 1 < 2.\n\nSo?\n</think>\n\nYes. \n", "Hm, 1 < 2.\n\nSo?", "Yes. \n"),
        ("\n<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("<think>a</think>b</think><think>c", "a", "b</think><think>c"),
        ("<think>It goes on </thin", "It goes on </thin", ""),
        ("<think>", "", ""),
        ("", "", ""),
    ],
)
def test_a_thought_is_told_from_the_answer(text: str, reasoning: str, content: str) -> None:
    assert parse(text, QWEN) == parse(text, DEEPSEEK) == (reasoning, content)


@pytest.mark.parametrize("is_last", [False, True])
def test_a_parser_is_freed_without_the_collector(is_last: bool) -> None:
    parser = QWEN.make_parser(PlainTextParser(), allows_reasoning=True)
    parser.feed("<think>a</think>b", is_last=is_last)
    is_alive = weakref.ref(parser)
    gc.collect()
    gc.disable()
    try:
        del parser
        assert is_alive() is None
    finally:
        gc.enable()


def test_whether_a_thought_is_open_at_the_beginning_is_the_parsers_and_the_requests() -> None:
    text = "Hm.\n</think>\n\nYes."
    assert parse(text, DEEPSEEK) == ("Hm.", "Yes.")
    assert parse(text, QWEN) == ("", text)
    assert parse("Yes.", DEEPSEEK, allows_reasoning=False) == ("", "Yes.")


@pytest.mark.parametrize("text", ["No <think>thought</think>", " \n", "<thi", " <thin"])
def test_without_a_thought_all_is_content(text: str) -> None:
    assert parse(text, QWEN) == ("", text)


@settings(deadline=None)
@given(
    text=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "/", "think", " ", "\n", "a"]), max_size=9
    ).map("".join),
    is_open=st.booleans(),
)
def test_only_blanks_and_markers_are_lost(text: str, is_open: bool) -> None:
    reasoning, content = map(re.escape, parse(text, ReasoningFormat(is_open)))
    if content != re.escape(text):
        assert re.fullmatch(rf"\s*(<think>)?\s*{reasoning}\s*(</think>)?\s*{content}", text)


@settings(deadline=None, max_examples=50)
@given(
    text=st.lists(
        st.sampled_from(["<think>", "</think>", "a"])
        | st.integers(500, 3000).map(lambda size: " " * size),
        max_size=6,
    ).map("".join),
    size=st.integers(1, 5000),
    is_open=st.booleans(),
)
def test_long_blanks_change_nothing_however_the_text_is_cut(
    text: str, size: int, is_open: bool
) -> None:
    def parse_pieces(*pieces: str) -> tuple[str, str, list[tuple[str, str]]]:
        reasoning_format = ReasoningFormat(is_open)
        parser = reasoning_format.make_parser(PlainTextParser(), allows_reasoning=True)
        return feed_pieces(parser, *pieces)

    whole = parse_pieces(text)
    assert parse_pieces(*batches(text, size), "") == whole
    assert parse_pieces(*text, "") == whole


@pytest.mark.parametrize("begun", ["", "<think>", "<think>a", "<think>a</think>", "a"])
def test_blanks_are_looked_at_a_bounded_number_of_times(begun: str) -> None:
    parser = QWEN.make_parser(PlainTextParser(), allows_reasoning=True)
    assert num_characters_looked_at(parser, begun, " " * 8_000) < MOST_LOOKS * 8_000


def test_calls_are_read_behind_a_thought_and_not_in_it() -> None:
    dialect = Dialect(TOOL_FORMATS["hermes"](""), QWEN)
    text = f"<think>I could say {CALL}.</think>\n{CALL}"
    for eager in (False, True):
        parsed = feed_pieces(dialect.make_parser(USE, allows_reasoning=True, eager=eager), *text)
        assert parsed == ("", f"I could say {CALL}.", [("get", "{}")])


def test_a_forced_answer_is_a_thought_and_calls_wherever_it_is_cut() -> None:
    dialect = Dialect(TOOL_FORMATS["hermes"](""), QWEN)
    text = f"<think>\nHm.\n</think>\n\n{CALL}"
    for at in range(len(text) + 1):
        whole, streamed = (
            feed_pieces(
                dialect.make_parser(USE, allows_reasoning=True, eager=eager), *text[:at], ""
            )
            for eager in (False, True)
        )
        assert whole == streamed
        assert whole[0] == ""


TOKENIZER = tiny_tokenizer()
TOKENIZER.add_tokens(
    [
        AddedToken(text, special=False)
        for text in ("<think>", "</think>", "<tool_call>", "</tool_call>")
    ]
)
VOCABULARY = llguidance.hf.from_tokenizer(TOKENIZER)
MARKERS = TOKENIZER.get_added_vocab()


def matches(grammar: Grammar, ids: list[int]) -> bool:
    matcher = llguidance.LLMatcher(
        VOCABULARY, llguidance.grammar_from(grammar.kind, grammar.text), log_level=0
    )
    assert not matcher.get_error(), matcher.get_error()
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def tokens(text: str, *, spelled: bool = False) -> list[int]:
    """Ids of a text; with `spelled` no marker is one token."""
    parts = text if spelled else [text]
    return [index for part in parts for index in TOKENIZER.encode(part, add_special_tokens=False)]


@pytest.mark.parametrize("spelled", [False, True], ids=["tokens", "spelled"])
@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_grammar_lets_the_model_think_first(kind: str, spelled: bool) -> None:
    markers = {} if spelled else MARKERS
    may = QWEN.allow_before(GRAMMARS[kind], markers)
    must = DEEPSEEK.allow_before(GRAMMARS[kind], markers)

    def each(text: str) -> tuple[bool, bool]:
        return matches(may, tokens(text, spelled=spelled)), matches(
            must, tokens(text, spelled=spelled)
        )

    assert each('<think>\nHm {"a": 2}?\n</think>\n\n{"a": 1}') == (True, True)
    assert each('<think></think>{"a": 1}') == (True, True)
    assert each('Hm\n</think>\n\n{"a": 1}') == (False, True)
    assert each('{"a": 1}') == (True, False)
    for text in (
        '<think>Hm</think>{"a": 2}',
        "<think>Hm</think>",
        "<think>Hm",
        '<think>Hm</think>Hm{"a": 1}',
        "Hm",
    ):
        assert each(text) == (False, False)
    assert each('<think>Hm</think>Hm</think>{"a": 1}') == (False, False), (
        "a thought ends where it is read to end"
    )


def test_a_thought_that_seems_to_be_closed_would_be_read_as_closed_and_is_not_written() -> None:
    grammar = QWEN.allow_before(GRAMMARS["json"], MARKERS)
    end = tokens('</think>{"a": 1}')
    assert matches(grammar, [*tokens("<think>"), *tokens("Hm</think", spelled=True), *end])
    assert not matches(grammar, [*tokens("<think>"), *tokens("Hm</think>Hm", spelled=True), *end])


@pytest.mark.parametrize("text", ["x/y", "x/z", "\n"])
def test_a_regular_expression_keeps_its_slashes_and_ends_of_lines(text: str) -> None:
    grammar = QWEN.allow_before(GRAMMARS["regex"], MARKERS)
    assert matches(grammar, tokens(f"<think>Hm</think>{text}"))
    assert not matches(grammar, tokens("<think>Hm</think>x"))


def test_a_dialect_makes_parameters_of_tools_and_thoughts() -> None:
    dialect = Dialect(TOOL_FORMATS["hermes"](""), QWEN, MARKERS)
    plain = SamplingParams(seed=1)
    with_reasoning, without = (
        dialect.constrain(plain, USE, allows_reasoning=thinks) for thinks in (True, False)
    )
    assert with_reasoning.grammar
    assert without.grammar
    assert with_reasoning.seed == 1
    assert matches(with_reasoning.grammar, tokens(f"<think>Hm</think>\n{CALL}"))
    assert matches(with_reasoning.grammar, tokens(CALL))
    assert matches(without.grammar, tokens(CALL))
    assert not matches(without.grammar, tokens(f"<think>Hm</think>{CALL}"))
    assert not with_reasoning.skip_special_tokens, "the markers are to be read"
    given = SamplingParams(grammar=GRAMMARS["json"])
    wrapped = dialect.constrain(given, NO_TOOLS, allows_reasoning=True).grammar
    assert wrapped
    assert matches(wrapped, tokens('<think>Hm</think>{"a": 1}'))
    assert dialect.constrain(given, NO_TOOLS, allows_reasoning=False).grammar == given.grammar
    assert dialect.constrain(plain, ToolUse(USE.tools), allows_reasoning=True).grammar is None


def test_an_answer_beside_tools_that_it_may_call_is_a_call_or_what_was_asked_for() -> None:
    dialect = Dialect(TOOL_FORMATS["hermes"](""), added_tokens=MARKERS)
    given = SamplingParams(grammar=GRAMMARS["json"])
    grammar = dialect.constrain(given, ToolUse(USE.tools), allows_reasoning=False).grammar
    assert grammar
    assert matches(grammar, tokens('{"a": 1}'))
    assert matches(grammar, tokens(CALL))
    assert not matches(grammar, tokens("text"))
    assert not matches(grammar, tokens(f'{{"a": 1}}{CALL}'))


def test_without_tools_and_thoughts_nothing_changes() -> None:
    sampling = SamplingParams(seed=1)
    assert Dialect().constrain(sampling, NO_TOOLS, allows_reasoning=True) is sampling
    assert (
        Dialect().constrain(sampling, ToolUse(USE.tools, "none"), allows_reasoning=True) is sampling
    )
    assert isinstance(
        Dialect().make_parser(NO_TOOLS, allows_reasoning=True, eager=True), PlainTextParser
    )


def test_tools_that_cannot_be_offered_are_refused() -> None:
    big = ToolUse([Function(name="f", parameters={"enum": ["x" * MAX_GRAMMAR]})], "required")
    for dialect, use, message in (
        (Dialect(), USE, "no chat template"),
        (Dialect(TOOL_FORMATS["hermes"]("")), big, f"more than {MAX_GRAMMAR} characters"),
    ):
        with pytest.raises(InvalidRequest, match=message) as refusal:
            dialect.constrain(SamplingParams(), use, allows_reasoning=True)
            dialect.make_parser(use, allows_reasoning=True, eager=True)
        assert refusal.value.param == "tools"
