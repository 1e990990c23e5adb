"""The tokenizer of a folder: tokenizer.json as it is written, or else one of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minisgl.utils.logger import adopt_loggers


def load_tokenizer(folder: Path) -> Any:
    """Read the tokenizer. Importing transformers for it takes seconds.

    A tokenizer.json is read by the class that takes it as it is written. transformers' classes for
    Llama, Qwen2 and GPT-2 take only its vocabulary, and normalize, split and decode in their own
    way.

    Raises:
        ValueError: there is no vocabulary. For some models transformers makes an empty one, with
            which no text has any tokens.
        Exception: any error of transformers' loaders.
    """
    reader = _reader(is_written=(folder / "tokenizer.json").exists())
    adopt_loggers("transformers", "huggingface_hub")
    tokenizer = reader.from_pretrained(folder, trust_remote_code=False)
    if len(tokenizer) == len(tokenizer.get_added_vocab()):
        raise ValueError("there is no vocabulary, as a tokenizer.json")
    return tokenizer


def _reader(*, is_written: bool) -> Any:
    """The class that reads a tokenizer. It is imported here: processes start that never need it."""
    if is_written:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer  # knows all models, which takes a quarter of a second

    return AutoTokenizer
