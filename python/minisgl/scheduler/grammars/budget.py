"""Which grammars are forgotten, and whose answers end, when grammars take too much memory.

    measured growth ─ rank 0 ─▶ ForgetGrammarMsg ─ all ranks ─▶ forgotten, its answers ended

Rank 0 decides, because ranks measure different numbers, and all follow in the same step.
"""

from __future__ import annotations

from collections.abc import Iterable

from minisgl.grammar import refusal
from minisgl.message import ForgetGrammarMsg
from minisgl.scheduler.grammars.known import KnownGrammar, KnownGrammars

_MAX_BYTES = 2**28  # of all grammars that are kept or followed, as measured
_MAX_GROWN_BYTES = 2**26  # of a grammar that is kept
_CHECK_BYTES = 2**20  # of growth, after which it is looked whether all is within the budget


class GrammarBudget:
    """Keeps what all grammars take within a number of bytes.

    A grammar that has grown much is forgotten, and its answers go on: the next request has it
    compiled again. If all together take too much, those that no answer follows are forgotten, the
    oldest first. Then the answers of the largest grammar end with an error.
    """

    def __init__(
        self,
        known: KnownGrammars,
        max_bytes: int = _MAX_BYTES,
        max_grown_bytes: int = _MAX_GROWN_BYTES,
        check_bytes: int = _CHECK_BYTES,
    ) -> None:
        self._known = known
        self._max_bytes = max_bytes
        self._max_grown_bytes = max_grown_bytes
        self._check_bytes = check_bytes
        self._unchecked_bytes = 0

    def grow(self, known: KnownGrammar, num_bytes: int) -> None:
        """Count `num_bytes` that a grammar has grown by."""
        known.grown_bytes += num_bytes
        self._unchecked_bytes += num_bytes

    def excess(self, opened: Iterable[tuple[int, KnownGrammar]]) -> list[ForgetGrammarMsg]:
        """Messages that forget grammars, and end answers, so that the rest fits the budget.

        Args:
            opened: uids of answers, and the grammar that each follows.
        """
        if self._unchecked_bytes < self._check_bytes:
            return []
        self._unchecked_bytes = 0
        uids: dict[KnownGrammar, list[int]] = {}
        for uid, known in opened:
            uids.setdefault(known, []).append(uid)
        kept = self._known.all()
        idle = [known for known in kept if known.num_open == 0]
        num_bytes = sum(known.num_bytes for known in [*idle, *uids])

        msgs: list[ForgetGrammarMsg] = []
        for known in kept:
            is_idle = known.num_open == 0
            is_too_much = is_idle and num_bytes > self._max_bytes
            if is_too_much or known.grown_bytes > self._max_grown_bytes:
                msgs.append(ForgetGrammarMsg(known.grammar))
                num_bytes -= known.num_bytes if is_idle else 0
        for known in sorted(uids, key=_num_bytes, reverse=True):
            if num_bytes > self._max_bytes:
                error = self._error(known)
                msgs.append(ForgetGrammarMsg(known.grammar, tuple(uids[known]), error))
                num_bytes -= known.num_bytes
        return msgs

    def _error(self, known: KnownGrammar) -> str:
        reason = (
            f"it took {known.num_bytes >> 20} MiB while answers followed it, the most of all "
            f"grammars, which may take {self._max_bytes >> 20} MiB together"
        )
        return str(refusal(reason))


def _num_bytes(known: KnownGrammar) -> int:
    return known.num_bytes
