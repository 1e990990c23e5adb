"""How sentencepiece spells the spaces of a text, for tokenizers of GGUF files and tokenizer.model.

It does not know files or vocabularies. Sources: arXiv:1808.06226, and `llm_tokenizer_spm` of
llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Regex, decoders, normalizers, pre_tokenizers

SPACE = "▁"
Prefix = Literal["each", "first"]


@dataclass(frozen=True, slots=True)
class Spelling:
    """What happens to the spaces of a text before it is split into tokens.

    Attributes:
        prefix: whether a space is put before "each" text, also before what follows a special token,
            or before the "first" one alone. The first space of a decoded text is left out then.
        keeps_spaces: whether spaces at both ends, and all of several in a row, stay. If not, a text
            that begins with spaces has no prefix where only the first one would have it.
    """

    prefix: Prefix | None
    keeps_spaces: bool = True

    def apply_to(self, backend: Any) -> None:
        """Let a fast tokenizer spell spaces in this way, in place.

        Its own way is forgotten. Characters that it maps to others before (`Precompiled`) stay.
        """
        steps = [step for step in _steps(backend.normalizer) if _maps_characters(step)]
        if not self.keeps_spaces:
            steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
            steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        if self.prefix == "each":
            steps.append(normalizers.Prepend(SPACE))
        steps.append(normalizers.Replace(" ", SPACE))
        backend.normalizer = normalizers.Sequence(steps)
        backend.pre_tokenizer = _first_prefix() if self.prefix == "first" else None
        spelled = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        first = [] if self.prefix is None else [decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence([*spelled, *first])


def _first_prefix() -> Any:
    """A step that puts a space before the first text.

    A `Metaspace` adds none to a text that begins with one. Here the normalizer has written all
    spaces as ▁, so one that looks for plain spaces adds one to each text.
    """
    prefix = pre_tokenizers.Metaspace(" ", "first", split=False)
    spell = pre_tokenizers.Metaspace(SPACE, "never", split=False)
    return pre_tokenizers.Sequence([prefix, spell])


def _maps_characters(step: Any) -> bool:
    return isinstance(step, normalizers.Precompiled)


def _steps(normalizer: Any) -> list[Any]:
    """The steps of a normalizer, whose sequences have no length."""
    if not isinstance(normalizer, normalizers.Sequence):
        return [] if normalizer is None else [normalizer]
    steps: list[Any] = []
    while True:
        try:
            steps.append(normalizer[len(steps)])
        except IndexError:
            return steps
