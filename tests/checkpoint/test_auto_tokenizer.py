"""A tokenizer.model of sentencepiece, alone, gives the tokens and texts of sentencepiece itself."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.errors import CheckpointError
from minisgl.message import DetokenizeMsg
from minisgl.tokenizer import Tokenizer

CORPUS = ["the dog runs to the dog", "a  dog\tand a cat", "to run and to run", "cats and dogs"]
TEXTS = ["the dog", " the", "  the", "a  b ", "\n x", " ", "", "zü 语\n", "▁the", " ▁ dog"]
# What tokenizer_config.json says; `legacy` is about what follows a special token.
CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "Llama": {"tokenizer_class": "LlamaTokenizer"},
    "not legacy": {"tokenizer_class": "LlamaTokenizer", "legacy": False},
}
# How the trainer lets characters and spaces be changed.
NORMALIZATIONS: dict[str, dict[str, Any]] = {
    "identity": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "nfkc": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": False},
    "fewer spaces": {"normalization_rule_name": "identity", "remove_extra_whitespaces": True},
    "both": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
}


def write_folder(
    folder: Path,
    *,
    model_type: str,
    prefix: bool,
    config: dict[str, Any],
    normalization: str = "identity",
) -> Any:
    """Write a folder with a tokenizer.model; return sentencepiece's own reader of it."""
    library = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=prefix,
        hard_vocab_limit=False,
        minloglevel=2,
        **NORMALIZATIONS[normalization],
    )
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return library.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of an answer that begins a text, token by token."""
    detokenizer = tokenizer.make_detokenizer()
    msgs = [DetokenizeMsg(0, [token]) for token in ids] + [DetokenizeMsg(0, finish="length")]
    return "".join(detokenizer.make_reply(msg).text for msg in msgs)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_a_text_has_the_tokens_of_sentencepiece(
    model_type: str, prefix: bool, config: dict[str, Any], tmp_path: Path
) -> None:
    reference = write_folder(tmp_path, model_type=model_type, prefix=prefix, config=config)
    tokenizer = Tokenizer(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).tolist()
        assert ids == reference.encode(text), text
        assert tokenizer.decode(ids) == reference.decode(ids), text
        assert streamed(tokenizer, ids) == reference.decode(ids), text


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_characters_and_spaces_are_changed_as_by_sentencepiece(
    normalization: str, prefix: bool, tmp_path: Path
) -> None:
    reference = write_folder(
        tmp_path, model_type="llama", prefix=prefix, config={}, normalization=normalization
    )
    tokenizer = Tokenizer(tmp_path)
    for text in (*TEXTS, " a ", "a\u00a0dog", "\u2460 the  \ufb01n"):
        ids = tokenizer.encode(text, add_special_tokens=False).tolist()
        assert ids == reference.encode(text), text


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("said", [True, False])
def test_a_prefix_is_put_before_a_text_as_the_config_says(
    said: bool, prefix: bool, tmp_path: Path
) -> None:
    config = {"add_prefix_space": said}
    reference = write_folder(tmp_path, model_type="llama", prefix=prefix, config=config)
    ids = Tokenizer(tmp_path).encode("the", add_special_tokens=False).tolist()
    text = "".join(map(reference.id_to_piece, ids))
    assert text == ("▁the" if said else "the")


@pytest.mark.parametrize(("legacy", "pieces"), [(True, ["▁", "the"]), (False, ["the"])])
def test_what_follows_a_special_token_begins_a_text_if_the_file_is_legacy(
    legacy: bool, pieces: list[str], tmp_path: Path
) -> None:
    reference = write_folder(tmp_path, model_type="llama", prefix=True, config={"legacy": legacy})
    ids = Tokenizer(tmp_path).encode("a</s>the", add_special_tokens=False).tolist()
    first, end, *others = map(reference.id_to_piece, ids)
    assert (first, end) == ("▁a", "</s>")
    assert "".join(others) == "".join(pieces)


@pytest.mark.parametrize(("said", "has_bos"), [(None, True), (True, True), (False, False)])
def test_a_text_begins_with_the_first_token_unless_the_file_says_no(
    said: bool | None, has_bos: bool, tmp_path: Path
) -> None:
    config = {} if said is None else {"add_bos_token": said}
    reference = write_folder(tmp_path, model_type="llama", prefix=True, config=config)
    ids = Tokenizer(tmp_path).encode("the").tolist()
    assert ids == [reference.bos_id()] * has_bos + reference.encode("the")


@pytest.mark.parametrize("missing", ["sentencepiece", "google.protobuf"])
def test_a_missing_package_is_named(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    with pytest.raises(CheckpointError, match=r"pip install 'minisgl\[sentencepiece\]'") as refused:
        Tokenizer(tmp_path)
    assert str(refused.value).startswith(str(tmp_path / "tokenizer.model"))


def test_a_damaged_file_is_said_to_be_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers would take it for one of tiktoken, and name a line of it."""
    write_folder(tmp_path, model_type="llama", prefix=True, config={})
    path = tmp_path / "tokenizer.model"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"is damaged: sentencepiece says .*parse") as refused:
        Tokenizer(tmp_path)
    assert str(refused.value).startswith(str(path))
    assert not caplog.records
