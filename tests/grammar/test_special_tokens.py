"""A grammar of texts never leaves a special token as the only choice; Lark may ask for one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers

from minisgl.core import Grammar
from minisgl.grammar import GrammarCompiler, GrammarModel
from minisgl.grammar.special_tokens import hide_special_tokens, number_special_tokens
from tests.checkpoints import EOS_ID, IM_END_ID, SPECIAL_TOKENS, VOCAB_SIZE

IM_END = SPECIAL_TOKENS[IM_END_ID]
SCHEMA = json.dumps({"const": f"p{IM_END}x"})


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen2")


@pytest.fixture(scope="module")
def compiler(folder: Path) -> GrammarCompiler:
    return GrammarCompiler(GrammarModel(str(folder), VOCAB_SIZE, [EOS_ID]))


@pytest.mark.parametrize(
    ("grammar", "begin", "rest"),
    [
        (Grammar("regex", rf"[ab]{IM_END.replace('|', chr(92) + '|')}d"), "a", f"{IM_END}d"),
        (Grammar("json_schema", SCHEMA), '"', f'p{IM_END}x"'),
        (Grammar("lark", f'start: ("a" | "b") "{IM_END}" // {IM_END}'), "a", IM_END),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_a_forced_text_that_spells_a_special_token_is_text(
    grammar: Grammar, begin: str, rest: str, compiler: GrammarCompiler
) -> None:
    matcher = compiler.compile(grammar)
    assert matcher.consume_tokens(compiler.tokenizer.tokenize_str(begin))
    forced = matcher.compute_ff_tokens()
    assert forced
    assert not any(compiler.tokenizer.is_special_token(token) for token in forced)
    assert rest.startswith(compiler.tokenizer.decode_str(forced))
    assert matcher.consume_tokens(compiler.tokenizer.tokenize_str(rest))
    assert matcher.is_accepting(), matcher.get_error()


@pytest.mark.parametrize("name", [IM_END, f"<[{IM_END_ID}]>"])
def test_a_lark_grammar_may_name_a_special_token(name: str, compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Grammar("lark", f'start: "a" {name} "b"'))
    a, b = (compiler.tokenizer.tokenize_str(text) for text in "ab")
    assert matcher.consume_tokens([*a, IM_END_ID, *b])
    assert matcher.is_accepting(), matcher.get_error()


def test_all_other_tokens_are_as_they_were(folder: Path, compiler: GrammarCompiler) -> None:
    plain = LLTokenizer(str(folder / "tokenizer.json"), VOCAB_SIZE, [EOS_ID])
    for token in range(VOCAB_SIZE):
        is_special = plain.is_special_token(token)
        assert compiler.tokenizer.is_special_token(token) == is_special
        if not is_special:
            assert compiler.tokenizer.decode_bytes([token]) == plain.decode_bytes([token])
    text = Path(__file__).read_text()
    for name in SPECIAL_TOKENS:
        text = text.replace(name, "")
    assert compiler.tokenizer.tokenize_str(text) == plain.tokenize_str(text)


@pytest.mark.parametrize(
    ("lark", "numbered"),
    [
        ("start: <|end|> <other>", "start: <[7]> <other>"),
        (r'start: "<|end|>" "\"<|end|>" <|end|>', r'start: "<|end|>" "\"<|end|>" <[7]>'),
        (r"start: /<|end|>\/<|end|>/i <|end|>", r"start: /<|end|>\/<|end|>/i <[7]>"),
        ('// "a <|end|>\nstart: <|end|> # <|end|>', '// "a <|end|>\nstart: <[7]> # <|end|>'),
        ("start: <[3-5]> <[^7]>", "start: <[3-5]> <[^7]>"),
    ],
)
def test_names_are_numbered_where_they_are_no_text(lark: str, numbered: str) -> None:
    assert number_special_tokens(lark, {"<|end|>": 7}) == numbered


VOCAB = {"<unk>": 0, "</s>": 1, "a": 2, "<": 3, "/": 4, "s": 5, ">": 6}
MODELS: dict[str, Any] = {
    "BPE": models.BPE(vocab=VOCAB, merges=[], unk_token="<unk>"),
    "WordLevel": models.WordLevel(vocab=VOCAB, unk_token="<unk>"),
    "Unigram": models.Unigram([(name, -1.0) for name in VOCAB], unk_id=0),
}


@pytest.mark.parametrize("kind", MODELS)
def test_each_kind_of_vocabulary_is_renamed(kind: str) -> None:
    tokenizer = Tokenizer(MODELS[kind])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<unk>", "</s>", "<new>"])
    tokenizer.enable_padding(length=9)
    assert tokenizer.encode("a</s>").ids == [2, 1, *[0] * 7]
    hidden_json, ids = hide_special_tokens(tokenizer.to_str().encode())
    hidden = Tokenizer.from_str(hidden_json)
    assert ids == {"<unk>": 0, "</s>": 1, "<new>": 7}
    assert hidden.encode("a</s>").ids == [2, 3, 4, 5, 6]
    assert hidden.encode("b").ids == [0]
    assert {
        token.content: number for number, token in hidden.get_added_tokens_decoder().items()
    } == {f"\ufdd0{number}\ufdd0": number for number in ids.values()}


def test_added_tokens_that_look_special_are_hidden_too_and_bytes_are_not() -> None:
    tokenizer = Tokenizer(models.WordLevel(vocab=VOCAB, unk_token="<unk>"))
    tokenizer.add_tokens(["<tool_call>", "<0x0A>", "[INST]"])
    hidden, ids = hide_special_tokens(tokenizer.to_str().encode())
    assert ids == {"<tool_call>": 7}
    assert "<tool_call>" not in hidden
    assert "<0x0A>" in hidden


def test_a_forced_text_that_spells_an_added_token_is_text(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["<tool_call>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    compiler = GrammarCompiler(GrammarModel(str(tmp_path), size, [EOS_ID]))
    matcher = compiler.compile(Grammar("regex", "[ab]<tool_call>d"))
    assert matcher.consume_tokens(compiler.tokenizer.tokenize_str("a"))
    assert matcher.consume_tokens(matcher.compute_ff_tokens()), matcher.get_error()
    assert not matcher.is_error()


def test_merges_into_a_special_token_go() -> None:
    vocab = {"<": 0, "/": 1, "s": 2, ">": 3, "</": 4, "s>": 5, "</s>": 6}
    merges = [("<", "/"), ("s", ">"), ("</", "s>")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens(["</s>"])
    hidden, ids = hide_special_tokens(tokenizer.to_str().encode())
    assert ids == {"</s>": 6}
    assert Tokenizer.from_str(hidden).encode("</s>").ids == [4, 5]


@pytest.mark.parametrize("written", ["\\u003c/s>", "<\\/s>"])
def test_a_special_token_of_the_vocabulary_is_found_however_it_is_written(written: str) -> None:
    tokenizer = Tokenizer(models.WordLevel(vocab=VOCAB, unk_token="<unk>"))
    tokenizer.add_special_tokens(["</s>"])
    text = tokenizer.to_str()
    vocab = text[text.index('"vocab"') :]
    escaped = vocab.replace('"</s>"', f'"{written}"')
    assert escaped != vocab
    hidden, ids = hide_special_tokens(text.replace(vocab, escaped).encode())
    assert ids["</s>"] == 1
    assert "</s>" not in Tokenizer.from_str(hidden).get_vocab()


def test_where_no_end_is_said_no_text_is_one(folder: Path) -> None:
    compiler = GrammarCompiler(GrammarModel(str(folder), VOCAB_SIZE, []))
    matcher = compiler.compile(Grammar("regex", "ab?"))
    assert compiler.tokenizer.eos_token == EOS_ID
    assert matcher.consume_tokens(compiler.tokenizer.tokenize_str("a"))
    assert matcher.is_accepting()


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"added_tokens": [], "model": {}}'])
def test_what_is_no_tokenizer_is_said(text: bytes) -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        hide_special_tokens(text)
