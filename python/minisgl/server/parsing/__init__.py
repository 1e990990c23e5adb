"""How the served model spells what is not content: calls of tools, and thoughts.

    dialect.py        `Dialect`: what a request's tools and thoughts mean for its parameters, and who reads the answer
    tools.py          tools as requests offer them, and which an answer may or must call
    tool_formats.py   the spellings of calls: how to recognise, hold to and read each
    calls.py          the reader of calls, of any spelling
    reasoning.py      thoughts: their reader, and what lets a model think before it follows a grammar
    readers.py        what these readers have in common
    grammars.py       pieces of which the grammars are made

Read `tool_formats.py` first.
"""

from minisgl.server.parsing.dialect import Dialect

__all__ = ["Dialect"]
