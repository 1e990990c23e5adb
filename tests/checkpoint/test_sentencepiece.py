"""Tokenizers of sentencepiece in GGUF files: spaces and bytes, as llama.cpp has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl.checkpoint.gguf_folder import write_hf_folder
from minisgl.tokenizer import Tokenizer
from tests.checkpoint.gguf_files import (
    saved_weights,
    sentencepiece_fields,
    sentencepiece_tokens,
    write_gguf,
)
from tests.checkpoints import tiny_model

PREFIXED = "tokenizer.ggml.add_space_prefix"


@pytest.fixture
def tokenizer_with(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> Callable[[bool | None], Tokenizer]:
    """From what the file says about a prefix to its tokenizer."""

    def make(prefix: bool | None) -> Tokenizer:
        weights = saved_weights(checkpoint("llama"))
        fields = {**sentencepiece_fields(), PREFIXED: prefix}
        path = write_gguf(tmp_path / "one.gguf", tiny_model("llama"), weights, fields=fields)
        write_hf_folder(path, tmp_path / "out")
        return Tokenizer(tmp_path / "out")

    return make


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    tokens = sentencepiece_tokens()
    return [tokens[index] for index in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize("prefix", [None, True])
def test_a_space_is_put_before_every_text(
    prefix: bool | None, tokenizer_with: Callable[[bool | None], Tokenizer]
) -> None:
    tokenizer = tokenizer_with(prefix)
    assert pieces(tokenizer, "ab a") == ["▁ab", "▁a"]
    assert pieces(tokenizer, " a") == ["▁", "▁a"], "also before one that begins with a space"
    assert pieces(tokenizer, "a</s>b") == ["▁a", "</s>", "▁", "b"]
    for text in ("ab a", " a", "a  b", "zü语\n"):
        assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_no_space_is_put_before_a_text_where_the_file_says_so(
    tokenizer_with: Callable[[bool | None], Tokenizer],
) -> None:
    tokenizer = tokenizer_with(False)
    assert pieces(tokenizer, "ab a") == ["ab", "▁a"]
    for text in ("ab a", " a", "a  b", "zü语\n"):
        assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


@pytest.mark.parametrize("prefix", [True, False])
def test_an_answer_goes_on_where_its_prompt_ends(
    prefix: bool, tokenizer_with: Callable[[bool | None], Tokenizer]
) -> None:
    """A space between the two is kept, and bytes of a character are joined."""
    tokenizer = tokenizer_with(prefix)
    tokens = sentencepiece_tokens()
    ids = [tokens.index(piece) for piece in ("▁a", "<0xC3>", "<0xBC>")]
    prompt = tokenizer.encode("ab").tolist()
    assert tokenizer.text_of(tokenizer.encode("ab", add_special_tokens=False)) == "ab"
    assert tokenizer.decode([*prompt, *ids]) == "ab aü"
