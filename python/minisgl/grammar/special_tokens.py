"""Special tokens in grammars: no text is one of them, and Lark alone can name one.

Where a grammar leaves no choice, llguidance spells the text as the tokenizer encodes it. That would
make the special token of a text like "<|im_end|>", which no grammar of texts allows, and the match
would fail. So llguidance gets the tokenizer with other names for its special tokens, which no text
has. A Lark grammar that names one gets its number instead.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

# Not a character, so that it is in no text that anybody sends on purpose.
_MARK = "\ufdd0"
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
        tokenizer = msgspec.json.decode(tokenizer_json)
        special = [token for token in tokenizer["added_tokens"] if token["special"]]
        ids = {token["content"]: token["id"] for token in special}
        hidden = {name: f"{_MARK}{number}{_MARK}" for name, number in ids.items()}
        for token in special:
            token["content"] = hidden[token["content"]]
        _rename(tokenizer["model"], hidden)
    except (KeyError, TypeError, msgspec.DecodeError) as error:
        raise ValueError(f"tokenizer.json is no tokenizer: {error!r}") from None
    tokenizer["padding"] = tokenizer["truncation"] = None
    return msgspec.json.encode(tokenizer).decode(), ids


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename tokens of the vocabulary, which has their ids as values, or is a list of pairs."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(name, name): number for name, number in vocab.items()}
    else:
        model["vocab"] = [[names.get(name, name), *others] for name, *others in vocab]
    unknown = model.get("unk_token")
    if unknown in names:
        model["unk_token"] = names[unknown]


def number_special_tokens(lark: str, ids: dict[str, int]) -> str:
    """Write the numbers of special tokens for their names, as llguidance reads them."""

    def number(part: re.Match[str]) -> str:
        name = part["name"]
        return f"<[{ids[name]}]>" if name in ids else part[0]

    return _LARK_PARTS.sub(number, lark)
