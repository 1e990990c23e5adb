"""The tokenizer of a GGUF file, made of its tokens and merges as llama.cpp reads them.

transformers converts such files, too, but other versions of it give other tokens, and ids that the
file does not have. Source: `llama_vocab` of llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from minisgl.checkpoint.files import is_panic
from minisgl.checkpoint.gguf import GGUFFile
from minisgl.checkpoint.gguf_types import TOKENIZER_FIELDS
from minisgl.checkpoint.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from minisgl.checkpoint.sentencepiece import Spelling
from minisgl.errors import CheckpointError
from minisgl.utils.excerpts import excerpt

_NAMES_OF_TRANSFORMERS = {  # of kinds of tokens
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}
# Kinds of tokens whose ids a file may declare: also the ends of a turn and of a message.
_NAMED_TOKENS = (*_NAMES_OF_TRANSFORMERS, "eot", "eom")
# Of `tokenizer.ggml.token_type`: a text may name these, such as <|im_end|>, which are never split.
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The tokens of a file.

    Attributes:
        texts: by id.
        types: as many as there are, up to one of each token.
        named: ids by kind (`_NAMED_TOKENS`), where the file declares them.
    """

    texts: list[str]
    types: list[int]
    named: dict[str, int]

    @classmethod
    def of(cls, file: GGUFFile) -> _Vocabulary:
        """
        Raises:
            CheckpointError: there are no tokens, or fewer than an id that is declared.
        """
        texts = _required(file, "tokenizer.ggml.tokens")
        named = {}
        for kind in _NAMED_TOKENS:
            field = f"tokenizer.ggml.{kind}_token_id"
            token = file.field(field)
            if token is not None:
                check_token_id(file, field, token, len(texts))
                named[kind] = token
        return cls(texts, file.field("tokenizer.ggml.token_type") or [], named)

    @property
    def ids(self) -> dict[str, int]:
        return {text: index for index, text in enumerate(self.texts)}

    def text_of(self, kind: str) -> str | None:
        token = self.named.get(kind)
        return None if token is None else self.texts[token]

    def added_tokens(self) -> list[AddedToken]:
        """The tokens that a text may name: by their types, and those of a declared kind."""
        is_special = {self.texts[token]: True for token in self.named.values()}
        for text, kind in zip(self.texts, self.types, strict=False):
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
                is_special.setdefault(text, kind != _USER_DEFINED)
        return [AddedToken(text, special=yes, normalized=False) for text, yes in is_special.items()]


def check_token_id(file: GGUFFile, field: str, token: Any, num_tokens: int) -> None:
    """
    Raises:
        CheckpointError: a field, or an item of it, is no id of a token.
    """
    if type(token) is not int or not 0 <= token < num_tokens:
        raise CheckpointError(
            f"{file}: {field} must be a whole number in [0, {num_tokens}), got {excerpt(token)}"
        )


def make_tokenizer(file: GGUFFile) -> Any:
    """Return the tokenizer as transformers' class for fast ones.

    Raises:
        CheckpointError: a field is missing or damaged, or asks for what is not supported.
    """
    from transformers import PreTrainedTokenizerFast

    for name in TOKENIZER_FIELDS:
        file.check_type(name)
    vocabulary = _Vocabulary.of(file)
    names = {
        name: vocabulary.texts[vocabulary.named[kind]]
        for kind, name in _NAMES_OF_TRANSFORMERS.items()
        if kind in vocabulary.named
    }
    try:
        return PreTrainedTokenizerFast(
            tokenizer_object=_backend(file, vocabulary),
            chat_template=file.field("tokenizer.chat_template"),
            clean_up_tokenization_spaces=False,
            **names,
        )
    except CheckpointError:
        raise
    except BaseException as error:  # the libraries raise whatever they find
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise CheckpointError(f"the tokenizer of {file} cannot be made: {error}") from error


def _backend(file: GGUFFile, vocabulary: _Vocabulary) -> Tokenizer:
    kind = file.field("tokenizer.ggml.model")
    if kind == "gpt2":
        pre_tokenizer = _pre_tokenizer(file)
        backend = _byte_level(file, vocabulary, pre_tokenizer)
        begins_with_bos = pre_tokenizer.adds_bos
    elif kind == "llama":
        backend = _sentencepiece(file, vocabulary)
        begins_with_bos = True
    else:
        raise CheckpointError(
            f"{file}: tokenizer.ggml.model {excerpt(kind)} is not supported; there is gpt2, llama"
        )
    backend.add_tokens(vocabulary.added_tokens())
    said = file.field("tokenizer.ggml.add_bos_token")
    adds_bos = begins_with_bos if said is None else said
    adds_eos = file.field("tokenizer.ggml.add_eos_token") is True
    backend.post_processor = _template(vocabulary, adds_bos=adds_bos, adds_eos=adds_eos)
    return backend


def _pre_tokenizer(file: GGUFFile) -> PreTokenizer:
    """Return how texts are split before merges apply.

    Raises:
        CheckpointError: the file does not name the split, or its name is not known.
    """
    name = file.field("tokenizer.ggml.pre")
    pre_tokenizer = PRE_TOKENIZERS.get(str(name))
    if pre_tokenizer is None:
        raise CheckpointError(
            f"{file} has the pre-tokenizer {excerpt(name)} (tokenizer.ggml.pre), "
            "which is not known: "
            "its texts would be split into wrong tokens. Convert the model again with a recent "
            "llama.cpp, or serve the folder of safetensors that the file was made from. Known "
            f"are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return pre_tokenizer


def _byte_level(file: GGUFFile, vocabulary: _Vocabulary, pre_tokenizer: PreTokenizer) -> Tokenizer:
    """Merges of bytes, in the order of the file (Radford et al. 2019)."""
    merges = _merges(_required(file, "tokenizer.ggml.merges"))
    backend = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges))
    pre_tokenizer.apply_to(backend)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GGUFFile, vocabulary: _Vocabulary) -> Tokenizer:
    """Merges of characters, those of the highest score first (arXiv:1808.06226).

    A character that is no token is written as the tokens of its bytes.
    """
    stored = file.field("tokenizer.ggml.merges")
    if stored is None:
        scores = _required(file, "tokenizer.ggml.scores")
        if len(scores) != len(vocabulary.texts):
            raise CheckpointError(
                f"{file}: tokenizer.ggml.scores has {len(scores)} numbers for "
                f"{len(vocabulary.texts)} tokens"
            )
        merges = _merges_by_score(vocabulary.ids, scores)
    else:
        merges = _merges(stored)
    model = models.BPE(
        vocab=vocabulary.ids,
        merges=merges,
        unk_token=vocabulary.text_of("unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    adds_prefix = file.field("tokenizer.ggml.add_space_prefix") is not False
    Spelling("each" if adds_prefix else None).apply_to(backend)
    return backend


def _merges(stored: list[str]) -> list[tuple[str, str]]:
    """Both parts of each merge, with a space between them. The first may begin with a space."""
    merges = []
    for merge in stored:
        place = merge.find(" ", 1)
        if place < 0:
            raise ValueError(f"the merge {excerpt(merge)} has no two parts")
        merges.append((merge[:place], merge[place + 1 :]))
    return merges


def _merges_by_score(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token."""
    merges = []
    for text in sorted(ids, key=lambda text: -scores[ids[text]]):
        pairs = [(text[:place], text[place:]) for place in range(1, len(text))]
        known = [pair for pair in pairs if ids.keys() >= set(pair)]
        merges += sorted(known, key=lambda pair: [ids[part] for part in pair])
    return merges


def _template(
    vocabulary: _Vocabulary, *, adds_bos: bool, adds_eos: bool
) -> processors.TemplateProcessing:
    """What is put before and behind a prompt, as far as the file declares these tokens."""
    first = ["bos"] if adds_bos and "bos" in vocabulary.named else []
    last = ["eos"] if adds_eos and "eos" in vocabulary.named else []
    tokens = [
        {"id": kind, "ids": [vocabulary.named[kind]], "tokens": [vocabulary.text_of(kind)]}
        for kind in (*first, *last)
    ]
    return processors.TemplateProcessing(
        single=[*first, "$A", *last], pair=[*first, "$A", "$B", *last], special_tokens=tokens
    )


def _required(file: GGUFFile, name: str) -> Any:
    value = file.field(name)
    if value is None:
        raise CheckpointError(f"{file}: the field {name} is missing")
    return value
