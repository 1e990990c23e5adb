"""Grammars in EBNF (GBNF, as llama.cpp's), which become llguidance's variant of Lark.

Reference: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

MAX_EBNF = 4096  # characters, which are translated in tens of milliseconds
_RULE = re.compile(r"(?m)^[ \t]*[A-Za-z0-9_-]+[ \t]*::=")
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)")


def is_ebnf(grammar: str) -> bool:
    """Whether a grammar has a rule of EBNF. Lark writes rules without an equals sign."""
    return _RULE.search(grammar) is not None


def ebnf_to_lark(grammar: str) -> str:
    """The same grammar in Lark. Its rule `root` is where a match begins.

    Raises:
        ValueError: the grammar is too long, or has a mistake.
    """
    if len(grammar) > MAX_EBNF:
        raise ValueError(
            f"a grammar in EBNF may have {MAX_EBNF} characters, it has {len(grammar)}; send Lark"
        )
    try:
        lark: str = gbnf_to_lark(_ESCAPED.sub(_unescape, grammar))
    except RecursionError:
        raise ValueError("the grammar in EBNF is nested too deep") from None
    except Exception as error:  # of no narrower type
        raise ValueError(f"the grammar in EBNF has a mistake: {error}") from None
    return lark


def _unescape(escape: re.Match[str]) -> str:
    """The character of an escape by its number, which the translation would write wrongly."""
    digits = escape[1] or escape[2]
    if not digits:
        return escape[0]
    number = int(digits, 16)
    if number < 0x80:
        return f"\\x{number:02x}"
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise ValueError(f"{escape[0]} is no character")
    return chr(number)
