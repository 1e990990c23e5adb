"""Tokenizers of two families, as folders: byte-level ones, and pieces with a fallback to bytes."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, processors
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
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=4096,
    )
    fast.save_pretrained(folder)
    return folder
