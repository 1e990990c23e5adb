"""Splits of byte-level BPE, against what the original tokenizers do, and GGUF files that name them.

`pre_tokenizer_pieces.json` has texts and, for each name, their pieces with a broken bar between
them. Those of llama-bpe, qwen2, deepseek-v3 and gpt-4o were recorded from the tokenizer.json of
Llama 3, Qwen3, DeepSeek V3 and gpt-oss; tekken's from the expression in Mistral's tekken.json;
those of gpt-2, smollm and deepseek-coder from the steps that their tokenizer.json lists. Those of
deepseek-llm and qwen35 gave, with the original vocabularies, the ids that llama.cpp records.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from minisgl.checkpoint import fetch_model
from minisgl.checkpoint.gguf_folder import write_hf_folder
from minisgl.checkpoint.pre_tokenizers import PRE_TOKENIZERS
from minisgl.errors import CheckpointError
from tests.checkpoint.gguf_files import saved_weights, tokenizer_fields, write_gguf
from tests.checkpoints import tiny_model

Checkpoints = Callable[[str], Path]
_RECORD = json.loads((Path(__file__).parent / "pre_tokenizer_pieces.json").read_text("utf-8"))
TEXTS: list[str] = _RECORD["texts"]
PIECES: dict[str, list[str]] = _RECORD["pieces"]
# llama.cpp knows a split by the ids of this text: by their list's hash, as the original gives it.
CHECK_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n"
    "🚀 (normal) 😶\u200d🌫️ (multiple emojis concatenated) ✅ 🦙🦙 "
    "3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 "
    "កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天\uff5e ------======= нещо на Български "
    "''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? "
    "'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)
SMOLLM_HASH = "855059429035d75a914d1eda9f10a876752e281a054a7a3d421ef0533e5b6249"


def pieces(name: str, text: str) -> list[str]:
    """Split a text, and give the pieces as text and not in the alphabet of bytes."""
    tokenizer = Tokenizer(models.BPE())
    PRE_TOKENIZERS[name].apply_to(tokenizer)
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    split: Any = tokenizer.pre_tokenizer
    return [text[start:end] for _, (start, end) in split.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PIECES)
def test_texts_are_split_as_the_original_tokenizer_splits_them(name: str) -> None:
    assert ["¦".join(pieces(name, text)) for text in TEXTS] == PIECES[name]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_each_split_keeps_every_character(name: str) -> None:
    for text in TEXTS:
        if not PRE_TOKENIZERS[name].composes:
            assert "".join(pieces(name, text)) == text


def file_with(
    checkpoint: Checkpoints, folder: Path, fields: dict[str, Any], arch: str = "llama"
) -> Path:
    tokens = list(tokenizer_fields()["tokenizer.ggml.tokens"])
    tokens[-1] = "ĊĊ"
    tokens[-2] = "quick"
    vocabulary = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["Ċ Ċ"]}
    weights = saved_weights(checkpoint(arch))
    return write_gguf(
        folder / "one.gguf", tiny_model(arch), weights, fields={**vocabulary, **fields}
    )


@pytest.fixture
def convert(checkpoint: Checkpoints, tmp_path: Path) -> Callable[..., Any]:
    """From fields of a file to the tokenizer of its folder, as a process would load it."""

    def make(arch: str = "llama", **fields: Any) -> Any:
        named = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
        write_hf_folder(file_with(checkpoint, tmp_path, named, arch), tmp_path / "out")
        return AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=False)

    return make


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("gpt-2", ["Ċ", "Ċ", "7"]),
        ("smollm", ["ĊĊ", "7"]),
        ("llama-bpe", ["ĊĊ", "7"]),
        ("deepseek-coder", ["Ċ", "Ċ", "7"]),
    ],
)
def test_merges_do_not_cross_the_pieces_that_a_file_names(
    name: str, tokens: list[str], arch: str, convert: Callable[..., Any]
) -> None:
    assert convert(arch, pre=name).tokenize("\n\n7") == tokens


@pytest.mark.parametrize(("name", "is_one"), [("llama-bpe", True), ("smollm", False)])
def test_a_piece_that_is_a_token_needs_no_merge_where_the_name_says_so(
    name: str, is_one: bool, convert: Callable[..., Any]
) -> None:
    assert (convert(pre=name).tokenize("quick") == ["quick"]) == is_one


@pytest.mark.parametrize(
    ("name", "flag", "begins"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("smollm", None, False),
        ("smollm", True, True),
    ],
)
def test_a_prompt_begins_with_bos_as_the_file_says_or_else_as_its_name_says(
    name: str, flag: bool | None, begins: bool, convert: Callable[..., Any]
) -> None:
    tokenizer = convert(pre=name, add_bos_token=flag)
    assert (tokenizer.encode("a")[0] == tokenizer.bos_token_id) == begins


def test_special_tokens_and_the_chat_template_are_those_of_the_file(
    convert: Callable[..., Any],
) -> None:
    tokenizer = convert(pre="smollm")
    assert tokenizer.tokenize("\n\n<|im_end|>\n\n") == ["ĊĊ", "<|im_end|>", "ĊĊ"]
    chat = [{"role": "user", "content": "7"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<s><|im_start|>user\n7<|im_end|>\n"


@pytest.mark.parametrize("name", ["martian", "default", None])
def test_a_split_that_is_not_known_is_refused_with_what_to_do(
    name: str | None, convert: Callable[..., Any]
) -> None:
    says = rf"one\.gguf has the pre-tokenizer {name!r} .*Convert the model again.*safetensors.*"
    with pytest.raises(CheckpointError, match=says + "deepseek-coder, .*smollm"):
        convert(pre=name)


@pytest.mark.slow
def test_the_default_model_gives_the_ids_of_its_original_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(fetch_model(None), trust_remote_code=False)
    ids = tokenizer.encode(CHECK_TEXT)
    assert sha256(str(ids).encode()).hexdigest() == SMOLLM_HASH
    assert tokenizer.tokenize("\n\n7") == ["ĊĊ", "7"]
    assert tokenizer.tokenize("1. one\n\n2. two") == ["1", ".", "Ġone", "ĊĊ", "2", ".", "Ġtwo"]
