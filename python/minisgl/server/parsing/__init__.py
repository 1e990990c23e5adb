"""What the text of a model means: content, reasoning, tool calls; and the grammars that enforce it.

    deltas.py         what a parser finds in an answer: the one stream behind all answers
    dialect.py        `Dialect`: how the served model writes tool calls and reasoning
    tool_formats.py   the formats of tool calls: how to recognise, enforce and parse each
    tool_calls.py     the parser of tool calls in any format
    reasoning.py      reasoning: its parser, and how a grammar lets a model reason first
    incremental.py    what these parsers have in common
    grammar_rules.py  pieces of which the grammars are made

Which tools a request offers is in `requests/tools.py`. Read `deltas.py` first, then
`tool_formats.py`.
"""

from minisgl.server.parsing.dialect import Dialect

__all__ = ["Dialect"]
