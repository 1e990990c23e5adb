"""How sentencepiece spells the spaces of a text, for tokenizers of GGUF files and tokenizer.model.

It does not know files or vocabularies. Source: `llm_tokenizer_spm` of llama.cpp.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from tokenizers import decoders, normalizers, pre_tokenizers

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


def begin_with_prefix(backend: Any) -> None:
    """Let a fast tokenizer put its space before any text, where it does so only at its beginning.

    The step that does it, `Metaspace`, adds none to a text that begins with a space: that space
    would be lost, since the first space of a decoded text is left out. Its normalizer has written
    all spaces as ▁, so a `Metaspace` that looks for plain ones adds one to each text. In place.
    """
    steps = _steps(backend.pre_tokenizer)
    if not steps or getattr(steps[0], "prepend_scheme", None) != "first":
        return
    prefix = pre_tokenizers.Metaspace(" ", "first", split=False)
    spell = pre_tokenizers.Metaspace(_SPACE, "never", split=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([prefix, spell, *steps[1:]])


def _steps(sequence: Any) -> list[Any]:
    """The steps of a sequence, which has no length; none of anything else."""
    if not isinstance(sequence, pre_tokenizers.Sequence):
        return []
    steps: list[Any] = []
    with suppress(IndexError):
        while True:
            steps.append(sequence[len(steps)])
    return steps
