"""Renames tokens in a tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

Parts: TypeAlias = dict[str, msgspec.Raw]  # of an object in JSON, each as it stands there


def rename_tokens(tokenizer_json: bytes, names: Mapping[str, str]) -> Parts:
    """Give tokens other names, and keep their ids.

    Merges that produce or use such a token are removed, since it is not text any more.

    Args:
        tokenizer_json: as the library `tokenizers` writes it.

    Returns:
        the parts of the tokenizer.

    Raises:
        KeyError, TypeError, msgspec.DecodeError: it is not JSON, or no tokenizer.
    """
    tokenizer = msgspec.json.decode(tokenizer_json, type=Parts)
    added: list[dict[str, Any]] = msgspec.json.decode(tokenizer["added_tokens"])
    for token in added:
        token["content"] = names.get(token["content"], token["content"])
    tokenizer["added_tokens"] = encoded(added)
    tokenizer["model"] = _renamed(tokenizer["model"], names)
    return tokenizer


def encoded(value: object) -> msgspec.Raw:
    """A part of a tokenizer."""
    return msgspec.Raw(msgspec.json.encode(value))


def _renamed(model_json: msgspec.Raw, names: Mapping[str, str]) -> msgspec.Raw:
    """Rename tokens of the vocabulary, which has their ids as values, or is a list of pairs.

    In most tokenizers no such token is in the vocabulary. Then neither the vocabulary nor the
    merges are parsed, which would take long.
    """
    model = msgspec.json.decode(model_json, type=Parts)
    unknown = msgspec.json.decode(model.get("unk_token", encoded(None)))
    if unknown in names:
        model["unk_token"] = encoded(names[unknown])
    if not _may_name_any(bytes(model["vocab"]), names):
        return encoded(model)
    vocab: dict[str, int] | list[list[Any]] = msgspec.json.decode(model["vocab"])
    if isinstance(vocab, dict):
        vocab = {names.get(name, name): number for name, number in vocab.items()}
    else:
        vocab = [[names.get(name, name), *others] for name, *others in vocab]
    model["vocab"] = encoded(vocab)
    if "merges" in model:
        merges: list[str] | list[list[str]] = msgspec.json.decode(model["merges"])
        model["merges"] = encoded([pair for pair in merges if not _merges_any(pair, names)])
    return encoded(model)


def _may_name_any(vocab_json: bytes, names: Mapping[str, str]) -> bool:
    """Whether one of these tokens is, or may be (if written with escapes), in a vocabulary."""
    has_escapes = b"\\u" in vocab_json or b"\\/" in vocab_json
    return has_escapes or any(bytes(encoded(name)) in vocab_json for name in names)


def _merges_any(pair: str | list[str], names: Mapping[str, str]) -> bool:
    """Whether a merge, written as two texts or as one with a space, involves these tokens."""
    left, right = pair.split(" ") if isinstance(pair, str) else pair
    return bool(names.keys() & {left, right, left + right})
