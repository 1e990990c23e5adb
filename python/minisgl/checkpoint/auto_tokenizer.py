"""The tokenizer of a folder: tokenizer.json as it is written, or else one of transformers.

Without a tokenizer.json, a tokenizer.model of sentencepiece is followed as sentencepiece itself
does, whatever class tokenizer_config.json names.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from minisgl.errors import CheckpointError
from minisgl.utils.logger import adopt_loggers

_READERS_OF_SENTENCEPIECE = ("sentencepiece", "google.protobuf")


def load_tokenizer(folder: Path) -> Any:
    """Read the tokenizer. Importing transformers for it takes seconds.

    A tokenizer.json is read by the class that takes it as it is written. The same class takes a
    tokenizer.model of sentencepiece by its own settings. transformers' classes for Llama, Qwen2 and
    GPT-2 take only the vocabulary, and normalize, split and decode in their own way.

    Raises:
        CheckpointError: a package is missing that reads the file, or the file is damaged.
        ValueError: there is no vocabulary. For some models transformers makes an empty one, with
            which no text has any tokens.
        Exception: any error of transformers' loaders.
    """
    is_written = (folder / "tokenizer.json").exists()
    is_sentencepiece = not is_written and _is_sentencepiece(folder / "tokenizer.model")
    processor = _read_sentencepiece(folder / "tokenizer.model") if is_sentencepiece else None
    reader = _reader(as_written=is_written or is_sentencepiece)
    adopt_loggers("transformers", "huggingface_hub")
    tokenizer = reader.from_pretrained(folder, trust_remote_code=False)
    if len(tokenizer) == len(tokenizer.get_added_vocab()):
        raise ValueError("there is no vocabulary, as a tokenizer.json")
    if processor is not None:
        _follow_sentencepiece(tokenizer, processor)
    return tokenizer


def _reader(*, as_written: bool) -> Any:
    """The class that reads a tokenizer. It is imported here: processes start that never need it."""
    if as_written:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer  # knows all models, which takes a quarter of a second

    return AutoTokenizer


def _is_sentencepiece(path: Path) -> bool:
    """Whether a file is a model of sentencepiece, which begins with the tag of its first piece.

    The other files of this name are tiktoken's, which are lines of text.
    """
    if not path.exists():
        return False
    with path.open("rb") as file:
        return file.read(1) == b"\n"


def _read_sentencepiece(path: Path) -> Any:
    """Sentencepiece's own reader of a file.

    Raises:
        CheckpointError: a package is missing, or the file is damaged.
    """
    # Where it cannot be read, transformers takes the file for one of tiktoken, and reports a line.
    if not all(map(_is_installed, _READERS_OF_SENTENCEPIECE)):
        raise CheckpointError(
            f"{path} needs sentencepiece and protobuf: pip install 'minisgl[sentencepiece]'"
        )
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_file=str(path))
    except RuntimeError as error:
        raise CheckpointError(f"{path} is damaged: sentencepiece says {error}") from error


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def _follow_sentencepiece(tokenizer: Any, processor: Any) -> None:
    """Do what transformers' conversion leaves out, or does in some versions alone, in place."""
    # Here, too: a scheduler imports this module, and no tokenizers.
    from minisgl.checkpoint.sentencepiece import SPACE, Prefix, Spelling

    said = tokenizer.init_kwargs.get("add_prefix_space")
    adds_prefix = processor.normalize("a").startswith(SPACE) if said is None else said
    place: Prefix = "first" if tokenizer.init_kwargs.get("legacy") is False else "each"
    keeps_spaces = 2 * SPACE in processor.normalize("a  a")
    spelling = Spelling(place if adds_prefix else None, keeps_spaces)
    spelling.apply_to(tokenizer.backend_tokenizer)
    # The models of this kind, Llama's and Mistral's, begin with it where no file says anything.
    if "add_bos_token" not in tokenizer.init_kwargs and tokenizer.bos_token is not None:
        tokenizer.add_bos_token = True
