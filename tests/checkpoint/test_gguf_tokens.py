"""Tokens of GGUF files that a text may name: each has the file's id, and there are no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl.checkpoint.gguf_folder import write_hf_folder
from minisgl.tokenizer import Tokenizer
from tests.checkpoint.gguf_files import sentencepiece_fields, tokenizer_fields, with_fields

CONTROL = 3
USER_DEFINED = 4
# As DeepSeek writes them.
BOS = "<\uff5cbegin▁of▁sentence\uff5c>"
USER = "<\uff5cUser\uff5c>"
Convert = Callable[[dict[str, Any]], Tokenizer]


@pytest.fixture
def convert(checkpoint: Callable[[str], Path], tmp_path: Path) -> Convert:
    def make(fields: dict[str, Any]) -> Tokenizer:
        write_hf_folder(with_fields(tmp_path, checkpoint, fields), tmp_path / "out")
        return Tokenizer(tmp_path / "out")

    return make


def fields_with(names: dict[int, tuple[str, int]]) -> dict[str, Any]:
    """The fields of a vocabulary whose tokens of some ids have other texts and types."""
    fields = tokenizer_fields()
    for index, (text, kind) in names.items():
        fields["tokenizer.ggml.tokens"][index] = text
        fields["tokenizer.ggml.token_type"][index] = kind
    return {**fields, "tokenizer.ggml.add_bos_token": True}


def test_names_in_other_letters_have_the_ids_of_the_file(convert: Convert) -> None:
    names = {0: (BOS, CONTROL), 2: (USER, CONTROL), 3: ("\n  \n", USER_DEFINED)}
    tokenizer = convert(fields_with(names))
    a, b = map(tokenizer_fields()["tokenizer.ggml.tokens"].index, "ab")
    assert tokenizer.encode(f"{USER}a\n  \nb").tolist() == [0, 2, a, 3, b]
    assert tokenizer.decode([2, a, 3, b]) == "a\n  \nb", "only control tokens are left out"
    assert tokenizer.added_tokens == {BOS: 0, "</s>": 1, USER: 2, "\n  \n": 3}


def test_a_text_has_only_tokens_of_the_file(convert: Convert) -> None:
    """Names that transformers' class has by default are text where the file lacks them."""
    fields = tokenizer_fields()
    text = "<|endoftext|>"
    assert text not in fields["tokenizer.ggml.tokens"]
    tokenizer = convert(fields)
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    assert max(ids) < len(fields["tokenizer.ggml.tokens"])
    assert tokenizer.decode(ids) == text


def test_a_text_has_only_tokens_of_a_sentencepiece_vocabulary(convert: Convert) -> None:
    fields = sentencepiece_fields()
    tokens = fields["tokenizer.ggml.tokens"]
    tokens[:3] = ["<unknown>", "<|start|>", "<|end|>"]
    tokenizer = convert(fields)
    assert tokenizer.added_tokens == {"<unknown>": 0, "<|start|>": 1, "<|end|>": 2}
    ids = tokenizer.encode("a</s><s><unk>").tolist()
    assert max(ids) < len(tokens)
    assert tokenizer.decode(ids) == "a</s><s><unk>"
