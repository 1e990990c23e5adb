"""Special tokens in grammars: no text is one of them, and Lark alone can name one.

Where a grammar leaves no choice, llguidance spells the text as the tokenizer encodes it. That would
make the special token of a text like "<|im_end|>", which no grammar of texts allows, and the match
would fail. So llguidance gets the tokenizer with other names for its special tokens, which no text
has. A Lark grammar that names one gets its number instead. For llguidance, added tokens such as
"<tool_call>" are special, too, whatever the tokenizer says.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from minisgl.utils.token_names import encoded, rename_tokens

# Not a character, so that no text contains it on purpose.
_MARK = "\ufdd0"
_LIKE_SPECIAL = re.compile(r"<(?!0x[0-9A-F]{2}>).*>", re.DOTALL)  # not a byte
# Usual names of the end of a sequence, for models whose files do not say it.
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<eos>")
# A name in Lark stands outside of texts, comments and regular expressions.
_LARK_PARTS = re.compile(
    r"""
    "(?: \\. | [^"\\\n] )*" i?
    | // [^\n]* | \# [^\n]*
    | / (?: \\. | [^/\\\n] )+ / [imslux]*
    | (?P<name> < [^<>\s]+ > )
    """,
    re.VERBOSE,
)


class _Tokenizer(msgspec.Struct):
    """What is read of a tokenizer."""

    added_tokens: list[dict[str, Any]]


def hide_special_tokens(tokenizer_json: bytes) -> tuple[str, dict[str, int]]:
    """Rename the special tokens of a tokenizer.

    Args:
        tokenizer_json: as the library `tokenizers` writes it.

    Returns:
        the same tokenizer, and the ids of the special tokens by the names that they had.

    Raises:
        ValueError: it is not JSON, or no tokenizer.
    """
    try:
        added = msgspec.json.decode(tokenizer_json, type=_Tokenizer).added_tokens
        ids = {token["content"]: token["id"] for token in added if _is_special(token)}
        hidden = {name: f"{_MARK}{number}{_MARK}" for name, number in ids.items()}
        tokenizer = rename_tokens(tokenizer_json, hidden)
    except (KeyError, TypeError, msgspec.DecodeError) as error:
        raise ValueError(f"tokenizer.json is no tokenizer: {error!r}") from None
    tokenizer["padding"] = tokenizer["truncation"] = encoded(None)
    return msgspec.json.encode(tokenizer).decode(), ids


def end_of_sequence(ids: dict[str, int]) -> int | None:
    """The special token that most likely ends a sequence; None if there is no special token."""
    named = [ids[name] for name in _ENDS if name in ids]
    return next(iter([*named, *ids.values()]), None)


def _is_special(token: dict[str, Any]) -> bool:
    return bool(token["special"] or _LIKE_SPECIAL.fullmatch(token["content"]))


def number_special_tokens(lark: str, ids: dict[str, int]) -> str:
    """Write the numbers of special tokens for their names, as llguidance reads them."""

    def number(part: re.Match[str]) -> str:
        name = part["name"]
        return f"<[{ids[name]}]>" if name in ids else part[0]

    return _LARK_PARTS.sub(number, lark)
