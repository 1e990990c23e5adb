"""The tokens of a GGUF file that a text may name, such as <|im_end|>, and which are never split.

transformers' conversion spells a name that is not ASCII in the alphabet of bytes, as if it were a
text, and then adds the name itself behind the vocabulary. There it also puts names that its classes
have by default. The model has no rows for such ids.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

_CONTROL = 3  # of `tokenizer.ggml.token_type`
_USER_DEFINED = 4


def name_tokens(backend: Tokenizer, tokens: list[str], types: list[int]) -> Tokenizer:
    """Return a BPE tokenizer that has each name under the file's id, and no other names.

    Args:
        tokens: the vocabulary of the file, by id.
        types: of these tokens; may be shorter or empty.
    """
    content = json.loads(backend.to_str())
    ids = {text: index for index, text in enumerate(tokens)}
    named = {each["content"]: each for each in content["added_tokens"] if each["content"] in ids}
    for text, kind in zip(tokens, types, strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            named.setdefault(text, _named(text, is_special=kind == _CONTROL))
    texts = {index: text for text, index in content["model"]["vocab"].items()}
    for text, each in named.items():
        each["id"] = ids[text]
        texts[ids[text]] = text
    content["model"]["vocab"] = {text: index for index, text in texts.items()}
    content["added_tokens"] = sorted(named.values(), key=lambda each: each["id"])
    content["post_processor"] = None  # it may have the ids of names
    return Tokenizer.from_str(json.dumps(content))


def _named(text: str, *, is_special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": text, **flags, "special": is_special}
