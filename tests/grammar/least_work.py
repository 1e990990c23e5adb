"""How much work it is to compile some grammars, as llguidance counts it; in any process.

Imports little, so that a process which only asks this starts soon.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from pathlib import Path
from unittest.mock import patch

from llguidance import LLParserLimits

from minisgl.core import Grammar
from minisgl.errors import InvalidRequest
from minisgl.grammar import GrammarCompiler, GrammarModel
from minisgl.grammar.compiler import _LIMITS

MAX_WORK = 100_000
TERMS = r"""start: A* B | C+ "x" start
A: /[a-z]{1,20}/ & /.*q.*/
B: /[0-9]+/
C: ~/a+/ & /[a-z]{2}/
"""


def least_work(folder: Path, vocab_size: int, eos_id: int) -> list[int]:
    """The least fuel with which each of some grammars is compiled."""
    schemas = [
        {
            "type": "object",
            "properties": {f"p{i}": {"pattern": f"^[a-z]{{{i}}}x"} for i in range(9)},
        },
        {"anyOf": [{"type": "string", "pattern": f"^.{{0,{k}}}a$"} for k in range(60)]},
        {"allOf": [{"type": "string", "pattern": f"^.*{letter}.*$"} for letter in "abcdef"]},
        {"patternProperties": {"^x": {"type": "number"}}, "required": ["y"], "minProperties": 2},
    ]
    grammars = [Grammar("json_schema", json.dumps(schema)) for schema in schemas]
    grammars.append(Grammar("lark", TERMS))
    compiler = GrammarCompiler(GrammarModel(str(folder), vocab_size, [eos_id]))
    return [_least_fuel(compiler, grammar) for grammar in grammars]


def _least_fuel(compiler: GrammarCompiler, grammar: Grammar) -> int:
    def is_compiled(fuel: int) -> bool:
        limits = LLParserLimits(initial_lexer_fuel=fuel, step_lexer_fuel=fuel)
        with patch.dict(_LIMITS, {grammar.kind: limits}):
            try:
                compiler.compile(grammar)
            except InvalidRequest:
                return False
        return True

    return bisect_left(range(MAX_WORK), True, key=is_compiled)
