"""The tokenizer of a GGUF file has its tokens under its ids, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl.checkpoint.gguf_folder import write_hf_folder
from minisgl.errors import CheckpointError
from minisgl.tokenizer import Tokenizer
from tests.checkpoint.gguf_files import sentencepiece_fields, tokenizer_fields, with_fields
from tests.checkpoints import EOS_ID

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


@pytest.mark.parametrize(("said", "ends"), [(None, False), (False, False), (True, True)])
def test_a_prompt_ends_with_eos_if_the_file_says_so(
    said: bool | None, ends: bool, convert: Convert
) -> None:
    tokenizer = convert({**tokenizer_fields(), "tokenizer.ggml.add_eos_token": said})
    assert (tokenizer.encode("a").tolist()[-1] == EOS_ID) == ends


def test_pieces_of_the_highest_score_are_made_first(convert: Convert) -> None:
    fields = sentencepiece_fields()
    tokens = fields["tokenizer.ggml.tokens"]
    tokens += ["c", "bc"]
    fields["tokenizer.ggml.token_type"] += [1, 1]
    scores = dict.fromkeys(tokens, -1000.0)
    fields["tokenizer.ggml.add_space_prefix"] = False
    for first, ids in (("ab", ["ab", "c"]), ("bc", ["a", "bc"])):
        fields["tokenizer.ggml.scores"] = list((scores | {first: -1.0}).values())
        assert convert(fields).encode("abc").tolist()[1:] == [tokens.index(each) for each in ids]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tokenizer.ggml.tokens": None}, r"the field tokenizer\.ggml\.tokens is missing"),
        ({"tokenizer.ggml.merges": None}, r"the field tokenizer\.ggml\.merges is missing"),
        ({"tokenizer.ggml.merges": ["ab"]}, "the merge 'ab' has no two parts"),
        ({"tokenizer.ggml.merges": ["zq zq"]}, "cannot be made: .*zq"),
        (
            {"tokenizer.ggml.model": "martian"},
            r"tokenizer\.ggml\.model 'martian' is not supported; there is gpt2, llama",
        ),
        ({"tokenizer.ggml.model": None}, r"tokenizer\.ggml\.model None is not supported"),
        (
            {**sentencepiece_fields(), "tokenizer.ggml.scores": None},
            r"the field tokenizer\.ggml\.scores is missing",
        ),
        (
            {**sentencepiece_fields(), "tokenizer.ggml.scores": [0.0, -1.0]},
            r"tokenizer\.ggml\.scores has 2 numbers for 266 tokens",
        ),
    ],
)
def test_what_a_tokenizer_lacks_is_named(
    fields: dict[str, Any], says: str, convert: Convert
) -> None:
    with pytest.raises(CheckpointError, match=rf"one\.gguf.*{says}"):
        convert(fields)
