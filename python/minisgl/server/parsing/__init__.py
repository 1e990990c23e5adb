"""From a model's text to content, reasoning and tool calls; and grammars that enforce these.

    deltas.py         the pieces that a parser makes of an answer's text
    dialect.py        `Dialect`: how the served model writes tool calls and reasoning
    tool_formats.py   the formats of tool calls: how to recognise, enforce and parse each
    tool_calls.py     the parser of tool calls in any format
    reasoning.py      reasoning: its parser, and how a grammar lets a model reason first
    incremental.py    the common part of these parsers
    grammar_rules.py  rules that the grammars are made of

Which tools a request offers is in `requests/tools.py`. Read `deltas.py` first, then
`tool_formats.py`.
"""

from minisgl.server.parsing.dialect import Dialect

__all__ = ["Dialect"]
