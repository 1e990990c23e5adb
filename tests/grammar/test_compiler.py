"""What a mask may cost: ambiguous grammars are ended, large ordinary ones are followed.

And what compiling costs is equal in all processes, so that ranks accept the same grammars.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import Mock

import llguidance.numpy
import numpy as np
import pytest
from llguidance import LLMatcher

from minisgl.core import Grammar, SamplingParams
from minisgl.errors import InvalidRequest, Unavailable
from minisgl.grammar import GrammarCompiler, GrammarModel
from minisgl.grammar import compiler as compiler_module
from minisgl.server.parsing import Dialect
from minisgl.server.parsing.reasoning import REASONING_FORMATS
from minisgl.server.parsing.tool_formats import TOOL_FORMATS
from minisgl.server.requests.tools import Function, ToolUse
from tests.checkpoints import EOS_ID, VOCAB_SIZE
from tests.grammar.least_work import MAX_WORK, least_work

AMBIGUOUS = Grammar("lark", 'start: s\ns: "a" | "b" | " " | s s | s s s | s s s s\n')
QUERY = r"""start: "SELECT" columns "FROM" NAME ("WHERE" condition)?
columns: "*" | column ("," column)*
column: NAME | NAME "." NAME | NAME "(" columns ")"
condition: value ("=" | "<") value | condition "AND" condition | "(" condition ")"
value: column | NUMBER
NAME: /[a-z]+/
NUMBER: /[0-9]+/
%ignore " "
"""


@pytest.fixture(scope="module")
def compiler(checkpoint: Callable[[str], Path]) -> GrammarCompiler:
    return GrammarCompiler(GrammarModel(str(checkpoint("qwen2")), VOCAB_SIZE, [EOS_ID]))


def follow(compiler: GrammarCompiler, matcher: LLMatcher, text: str) -> str:
    """Make the mask before each character of a text; return the error that ends this, or ""."""
    mask_1W = np.empty(llguidance.numpy.get_bitmask_shape(1, VOCAB_SIZE), dtype=np.int32)
    for token in compiler.tokenizer.tokenize_str(text):
        llguidance.numpy.fill_next_token_bitmask(matcher, mask_1W)
        if matcher.is_error():
            break
        assert matcher.consume_token(token)
    return matcher.get_error()


def test_an_ambiguous_grammar_ends_before_its_masks_take_seconds(compiler: GrammarCompiler) -> None:
    """Each mask of it takes more items than the one before; 50,000 are seconds."""
    try:
        error = follow(compiler, compiler.compile(AMBIGUOUS), "ab " * 100)
    except InvalidRequest as refusal:
        error = str(refusal)
    assert "Too many items (limit 3000" in error


@pytest.mark.parametrize(
    ("grammar", "begin"),
    [
        (Grammar("regex", "(a"), 'invalid regex "(a"'),
        (Grammar("regex", "(a // the tool 'f'"), 'invalid regex "(a '),
        (
            Grammar("lark", 'start: tool\ntool: %json {"type": "string", "pattern": "(a"}'),
            "failed to compile JSON schema: ",
        ),
        (Grammar("lark", "start: rest\nrest: missing"), "at 2(7): unknown name"),
    ],
)
def test_a_refusal_has_no_place_in_what_was_made_of_a_pattern_or_a_schema(
    compiler: GrammarCompiler, grammar: Grammar, begin: str
) -> None:
    """The client has not written that grammar. It has written Lark, whose lines are named."""
    with pytest.raises(InvalidRequest) as refusal:
        compiler.compile(grammar)
    assert str(refusal.value).startswith(f"the grammar is refused: {begin}")
    assert refusal.value.param == "grammar"


@pytest.mark.parametrize("shortage", [OSError(errno.EMFILE, "no file"), MemoryError()], ids=repr)
def test_a_shortage_while_the_tokenizer_is_read_is_not_the_grammars_fault_and_passes(
    shortage: Exception, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(GrammarModel(str(checkpoint("qwen2")), VOCAB_SIZE, [EOS_ID]))
    with monkeypatch.context() as patches:
        patches.setattr(compiler_module, "_read_json", Mock(side_effect=shortage))
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"tokenizer cannot be read for grammars: .*"):
                compiler.compile(AMBIGUOUS)
    compiler.compile(AMBIGUOUS)


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
UNFOLLOWED = 'failed to compile JSON schema: Unimplemented keys: ["uniqueItems"]'


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("template", ["hermes", "llama3_json", "mistral", "mistral [ARGS]"])
def test_a_refused_schema_is_that_of_the_tool_or_of_the_format_beside_it(
    template: str, thinks: bool, compiler: GrammarCompiler
) -> None:
    tool_format = TOOL_FORMATS[template.split()[0]](template)
    dialect = Dialect(tool_format, REASONING_FORMATS["qwen3"])
    for arguments, answer, param, reason in (
        (UNIQUE, SCHEMA, "tools", f"the tool 'b.1-c': {UNFOLLOWED}"),
        (SCHEMA, UNIQUE, "grammar", UNFOLLOWED),
    ):
        tools = ToolUse([Function(name="a"), Function(name="b.1-c", parameters=arguments)])
        sampling = SamplingParams(grammar=Grammar("json_schema", json.dumps(answer)))
        grammar = dialect.constrain(sampling, tools, allows_reasoning=thinks).grammar
        assert grammar
        with pytest.raises(InvalidRequest) as refusal:
            compiler.compile(grammar)
        assert str(refusal.value) == f"the grammar is refused: {reason}"
        assert refusal.value.param == param


def test_a_schema_of_many_optional_properties_is_followed(compiler: GrammarCompiler) -> None:
    properties = {f"property_{i}": {"type": "string"} for i in range(200)}
    schema = {"type": "object", "properties": properties}
    matcher = compiler.compile(Grammar("json_schema", json.dumps(schema)))
    assert follow(compiler, matcher, '{"property_7": "a", "property_150": "b"}') == ""
    assert matcher.is_accepting()


def test_an_ordinary_lark_grammar_is_followed(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Grammar("lark", QUERY))
    query = "SELECT a, max(b.c) FROM t WHERE (a = 1 AND b.c < 20) AND c = d AND e = 3"
    assert follow(compiler, matcher, query) == ""
    assert matcher.is_accepting()


def test_compiling_takes_the_same_work_in_all_processes(
    checkpoint: Callable[[str], Path],
) -> None:
    """Work is counted and not measured, and no hash is drawn anew: ranks find the same errors."""
    folder = checkpoint("qwen2")
    here = least_work(folder, VOCAB_SIZE, EOS_ID)
    assert min(here) > 0
    assert max(here) < MAX_WORK
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(least_work, folder, VOCAB_SIZE, EOS_ID).result() == here
