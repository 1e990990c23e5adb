"""Special tokens in grammars: no text is one of them, and Lark alone can name one.

Where a grammar leaves no choice, llguidance spells the text as the tokenizer encodes it. That would
make the special token of a text like "<|im_end|>", which no grammar of texts allows, and the match
would fail. So llguidance gets the tokenizer with other names for its special tokens, which no text
has. A Lark grammar that names one gets its number instead. Special to llguidance are also added
tokens like "<tool_call>", whatever the tokenizer says.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

# Not a character, so that it is in no text that anybody sends on purpose.
_MARK = "\ufdd0"
_LIKE_SPECIAL = re.compile(r"<(?!0x[0-9A-F]{2}>).*>", re.DOTALL)  # not a byte
# Usual names of the end of a sequence, for models whose files do not say it.
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<eos>")
_Parts = dict[str, msgspec.Raw]  # of an object in JSON, each as it stands there
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
        tokenizer = msgspec.json.decode(tokenizer_json, type=_Parts)
        added: list[dict[str, Any]] = msgspec.json.decode(tokenizer["added_tokens"])
        special = [token for token in added if _is_special(token)]
        ids = {token["content"]: token["id"] for token in special}
        hidden = {name: f"{_MARK}{number}{_MARK}" for name, number in ids.items()}
        for token in special:
            token["content"] = hidden[token["content"]]
        tokenizer["added_tokens"] = _encoded(added)
        tokenizer["model"] = _renamed(tokenizer["model"], hidden)
    except (KeyError, TypeError, msgspec.DecodeError) as error:
        raise ValueError(f"tokenizer.json is no tokenizer: {error!r}") from None
    tokenizer["padding"] = tokenizer["truncation"] = _encoded(None)
    return msgspec.json.encode(tokenizer).decode(), ids


def end_of_sequence(ids: dict[str, int]) -> int | None:
    """The special token that most likely ends a sequence; None if there is no special token."""
    named = [ids[name] for name in _ENDS if name in ids]
    return next(iter([*named, *ids.values()]), None)


def _is_special(token: dict[str, Any]) -> bool:
    return bool(token["special"] or _LIKE_SPECIAL.fullmatch(token["content"]))


def _renamed(model_json: msgspec.Raw, names: dict[str, str]) -> msgspec.Raw:
    """Rename tokens of the vocabulary, which has their ids as values, or is a list of pairs.

    Merges that make such a token of text, or anything of it, go: it is no text any more. In most
    tokenizers no such token is in the vocabulary. Then neither it nor merges are read, which would
    take long.
    """
    model = msgspec.json.decode(model_json, type=_Parts)
    unknown = msgspec.json.decode(model.get("unk_token", _encoded(None)))
    if unknown in names:
        model["unk_token"] = _encoded(names[unknown])
    if not _may_name_any(bytes(model["vocab"]), names):
        return _encoded(model)
    vocab: dict[str, int] | list[list[Any]] = msgspec.json.decode(model["vocab"])
    if isinstance(vocab, dict):
        vocab = {names.get(name, name): number for name, number in vocab.items()}
    else:
        vocab = [[names.get(name, name), *others] for name, *others in vocab]
    model["vocab"] = _encoded(vocab)
    if "merges" in model:
        merges: list[str] | list[list[str]] = msgspec.json.decode(model["merges"])
        model["merges"] = _encoded([pair for pair in merges if not _merges_any(pair, names)])
    return _encoded(model)


def _may_name_any(vocab_json: bytes, names: dict[str, str]) -> bool:
    """Whether one of these tokens is in a vocabulary; also if it may be written with escapes."""
    has_escapes = b"\\u" in vocab_json or b"\\/" in vocab_json
    return has_escapes or any(bytes(_encoded(name)) in vocab_json for name in names)


def _encoded(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _merges_any(pair: str | list[str], names: dict[str, str]) -> bool:
    """Whether a merge, written as two texts or as one with a space, has to do with these tokens."""
    left, right = pair.split(" ") if isinstance(pair, str) else pair
    return bool(names.keys() & {left, right, left + right})


def number_special_tokens(lark: str, ids: dict[str, int]) -> str:
    """Write the numbers of special tokens for their names, as llguidance reads them."""

    def number(part: re.Match[str]) -> str:
        name = part["name"]
        return f"<[{ids[name]}]>" if name in ids else part[0]

    return _LARK_PARTS.sub(number, lark)
