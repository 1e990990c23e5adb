"""Tokenizers as folders: byte-level ones, pieces with a fallback to bytes, and whole pieces."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.checkpoints import tiny_tokenizer

_PIECES = ["▁", "a", "b", "c", ".", "é", "语", "▁a", "ab", "▁ab", "▁▁", "...", "▁.", "bc", "▁é"]
_MERGES = [("▁", "a"), ("a", "b"), ("▁", "ab"), ("▁", "▁"), ("▁", "."), ("b", "c"), ("▁", "é")]
_SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level(folder: Path) -> Path:
    """GPT-2's kind, with ChatML and a post-processor that puts <s> before a text."""
    tiny_tokenizer().save_pretrained(folder)
    return folder


def byte_fallback(folder: Path) -> Path:
    """Llama 2's kind: words begin with ▁, and what no piece has is spelled in <0x..>.

    The first space of a text is dropped.
    """
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {piece: index for index, piece in enumerate([*_SPECIAL, *bytes_, *_PIECES])}
    tokenizer = Tokenizer(
        models.BPE(vocab, _MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return _save(tokenizer, folder)


def word_pieces(folder: Path) -> Path:
    """BERT's kind: a piece that begins with ## goes on with a word, others begin one."""
    words = ["the", "dog", "##s", "##ed", "runs", ".", ",", "do", "not", "é", "语"]
    vocab = {piece: index for index, piece in enumerate([*_SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _save(tokenizer, folder)


def metaspace(folder: Path) -> Path:
    """Pieces that begin with ▁ for a space, without bytes; a text's first ▁ is dropped."""
    vocab = {piece: index for index, piece in enumerate([*_SPECIAL, *_PIECES])}
    tokenizer = Tokenizer(models.BPE(vocab, _MERGES, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _save(tokenizer, folder)


def _save(tokenizer: Tokenizer, folder: Path) -> Path:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=4096,
    )
    fast.save_pretrained(folder)
    return folder
