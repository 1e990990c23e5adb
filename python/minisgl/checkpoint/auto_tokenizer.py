"""The tokenizer of a folder, as transformers reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minisgl.utils.logger import adopt_loggers


def load_tokenizer(folder: Path) -> Any:
    """Read it. To import transformers takes seconds.

    Raises:
        ValueError: there is no vocabulary. For some models the library makes an empty one, with
            which each text has no tokens.
        Exception: whatever its loaders raise.
    """
    from transformers import AutoTokenizer  # here: processes start that never need it

    adopt_loggers("transformers", "huggingface_hub")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if len(tokenizer) == len(tokenizer.get_added_vocab()):
        raise ValueError("there is no vocabulary, as a tokenizer.json")
    return tokenizer
