"""Grammars in EBNF (llama.cpp's GBNF), which become llguidance's variant of Lark.

The translation of llguidance changes names to Lark's form (upper or lower case, underscores), and
copies escapes and repetitions that Lark does not have. Besides, Lark matches literals, regular
expressions and rules in upper case as a lexer does, each as long as possible. So the EBNF is
rewritten before the translation, and the names of rules after it, such that Lark matches character
by character.

Reference: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

MAX_EBNF = 4096  # characters; their translation takes tens of milliseconds
_RULE = re.compile(r"(?m)^[ \t]*[A-Za-z0-9_-]+[ \t]*::=")
# A literal, a class, a comment, how often something is repeated, a name, blanks or a character.
# An unclosed one reaches to the end, and is refused.
_TOKEN = re.compile(
    r"""(?xs) "(?:\\.|[^"\\])*"? | \[(?:\\.|[^]\\])*]? | \#[^\r\n]* | \{[^}]*}?
        | [\w-]+ | \s+ | ."""
)
_ESCAPED = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)"
_IN_LITERAL = re.compile(rf"(?s){_ESCAPED}|.")
_IN_CLASS = rf"(?:{_ESCAPED}|[^]\\])"
_RANGE = re.compile(rf"(?s)({_IN_CLASS})-({_IN_CLASS})|({_IN_CLASS})")  # or one character
_UNREADABLE = re.compile(r"[\x00-\x1f\x7f]")  # in a literal of Lark
_SET_OPERATORS = "&~-"  # in a class; two of them would be an operation on sets
_ANY_CHARACTER = "[\\x00-\U0010ffff]"  # Lark's dot matches no line break
_ZERO_TIMES = re.compile(r"\{\s*0\s*(?:,\s*0\s*)?\}")
_REPETITIONS = "*+?{"
# A comment, a literal or a regular expression of Lark, or the name that a rule of characters got.
_TERMINAL = re.compile(r'//[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])*/|\b(R\d+_[A-Z0-9_]*)\b')


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
        lark: str = gbnf_to_lark(_translatable(grammar))
    except RecursionError:
        raise ValueError("the grammar in EBNF is nested too deep") from None
    except Exception as error:  # of no narrower type
        raise ValueError(f"the grammar in EBNF has a mistake: {error}") from None
    return _TERMINAL.sub(_as_rule, lark)


def _translatable(grammar: str) -> str:
    """A grammar rewritten so that the translation does not misread it."""
    tokens = _TOKEN.findall(grammar)
    names = _unique_names(tokens)
    written = [names.get(token) or _written(token) for token in tokens]
    return "".join(_with_kept_groups(_without_zero_times(written)))


def _unique_names(tokens: list[str]) -> dict[str, str]:
    """Names for the rules that stay distinct in Lark.

    Raises:
        ValueError: a rule is used and not defined.
    """
    text = "".join(" " if token[0] in '"[#{' else token for token in tokens)
    defined = set(re.findall(r"(?<![\w-])([\w-]+)\s*::=", text))
    names = {"root": "root"}
    for name in re.findall(r"[\w-]+", text):
        if defined and name not in defined:
            raise ValueError(f"Rule {name!r} not found")
        names.setdefault(name, f"r{len(names)}-{name}")
    return names


def _written(token: str) -> str:
    """A literal, a class or a dot, rewritten for the translation; other tokens as they are."""
    if token == ".":
        return _ANY_CHARACTER
    if token.startswith('"'):
        return _written_literal(token)
    if token.startswith("["):
        begin = 2 if token.startswith("[^") else 1
        return token[:begin] + _RANGE.sub(_written_range, token[begin:])
    return token


def _written_literal(token: str) -> str:
    """A literal as single characters: Lark would not backtrack from a longer one."""
    if len(token) == 1 or not token.endswith('"'):
        return token  # it is not closed
    characters = [_written_in_literal(match) for match in _IN_LITERAL.finditer(token[1:-1])]
    if len(characters) == 1:
        return f'"{characters[0]}"'
    quoted = (f'"{character}"' for character in characters)
    return f"({' '.join(quoted)})" if characters else '""'


def _written_in_literal(match: re.Match[str]) -> str:
    character = match[0]
    if character in (r"\[", r"\]"):
        return character[1]
    return _by_number(character) if _UNREADABLE.fullmatch(character) else _unescape(character)


def _written_range(match: re.Match[str]) -> str:
    first, last, single = match.groups()
    if single:
        return _written_in_class(single)
    return f"{_written_in_class(first)}-{_written_in_class(last)}"


def _written_in_class(character: str) -> str:
    return _by_number(character) if character in _SET_OPERATORS else _unescape(character)


def _unescape(character: str) -> str:
    """The character of a numeric escape, which the translation would get wrong."""
    if len(character) < 6:  # \u and four digits
        return character
    number = int(character[2:], 16)
    if number < 0x80:
        return f"\\x{number:02x}"
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise ValueError(f"{character} is no character")
    return chr(number)


def _by_number(character: str) -> str:
    return f"\\x{ord(character):02x}"


def _as_rule(match: re.Match[str]) -> str:
    """The name of a rule in lower case; literals and regular expressions as they are.

    The translation makes rules that only have characters upper case. Such a rule would match as
    many characters as it can, including some that the next item needs.
    """
    return match[1].lower() if match[1] else match[0]


def _with_kept_groups(tokens: list[str]) -> list[str]:
    """The tokens with an empty literal at the end of each group that ends with a repeated item.

    The translation drops the parentheses of a single item, even if both are repeated.
    """
    kept: list[str] = []
    for index, token in enumerate(tokens):
        if token == ")" and _is_repeated(tokens[index + 1 :]) and _ends_repeated(kept):
            kept.append(' ""')
        kept.append(token)
    return kept


def _is_repeated(behind: list[str]) -> bool:
    return next((token[0] in _REPETITIONS for token in behind if not _is_blank(token)), False)


def _ends_repeated(before: list[str]) -> bool:
    last = next((token for token in reversed(before) if not _is_blank(token)), " ")
    return last[0] in _REPETITIONS + ")"


def _is_blank(token: str) -> bool:
    return token.isspace() or token.startswith("#")


def _without_zero_times(tokens: list[str]) -> list[str]:
    """The tokens with an empty literal in place of an item repeated zero times: Lark refuses it."""
    kept: list[str] = []
    for token in tokens:
        if _ZERO_TIMES.fullmatch(token) and (begin := _begin_of_item(kept)) is not None:
            kept[begin:] = ['""']
        else:
            kept.append(token)
    return kept


def _begin_of_item(tokens: list[str]) -> int | None:
    """Where the last item begins: a literal, a class, a name or a group, with its repetitions."""
    num_open = 0
    for index in reversed(range(len(tokens))):
        token = tokens[index]
        if token == ")":
            num_open += 1
        elif token == "(":
            num_open -= 1
        elif _is_blank(token) or token[0] in _REPETITIONS:
            continue
        if num_open <= 0:
            return index if token[0] not in ")|:=" else None
    return None
