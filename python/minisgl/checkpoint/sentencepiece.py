"""How sentencepiece spells the spaces of a text, for tokenizers of GGUF files.

It does not know files or vocabularies. Source: `llm_tokenizer_spm` of llama.cpp.
"""

from __future__ import annotations

from typing import Any

from tokenizers import decoders, normalizers

_SPACE = "▁"


def spell_spaces(backend: Any, *, adds_prefix: bool) -> None:
    """Let a fast tokenizer write spaces as sentencepiece does, in place.

    transformers converts such tokenizers to `Metaspace`. That adds no space to a text that begins
    with one, and adds one even if the file says not to.

    Args:
        adds_prefix: whether a space is put before a text, and before what follows a special token.
            The first space of a decoded text is left out then.
    """
    replace = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = replace
    backend.pre_tokenizer = None
    backend.decoder = decoders.Sequence(steps)
