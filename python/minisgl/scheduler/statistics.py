"""Numbers about the engine, which API processes show at /metrics.

They travel with the outputs of a step, when they have changed. Counts of events are kept here;
every other number is read from its owner.
"""

from __future__ import annotations

from minisgl.message import EngineStats
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.events import EventCounts, Events
from minisgl.scheduler.grammars.pending import PendingGrammars
from minisgl.scheduler.pacing.pacer import StepPacer
from minisgl.scheduler.prefill import PrefillManager


class Statistics:
    """Collects the numbers, and knows which were reported last."""

    def __init__(
        self,
        cache: CacheManager,
        prefill: PrefillManager,
        decode: DecodeManager,
        pending_grammars: PendingGrammars,
        pacer: StepPacer,
        events: Events,
    ) -> None:
        self.counts = EventCounts(events)
        self._cache = cache
        self._prefill = prefill
        self._decode = decode
        self._pending_grammars = pending_grammars
        self._pacer = pacer
        self._flushes: list[tuple[int, int]] = []  # uids and dropped tokens; not reported yet
        self._reported: EngineStats | None = self._now()  # None if it may be lost

    def add_flush(self, uid: int, num_tokens: int) -> None:
        """Report once that a request to flush the cache has dropped `num_tokens`."""
        self._flushes.append((uid, num_tokens))

    def report_again(self) -> None:
        """Report everything once more: what was reported may be lost."""
        self._reported = None

    def take_changed(self) -> EngineStats | None:
        """Return all numbers, and count them as reported; None if none has changed."""
        stats = self._now()
        if stats == self._reported:
            return None
        self._reported = stats
        self._flushes = []
        return stats

    def _now(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._decode) + len(self._prefill.partly_computed),
            num_waiting=len(self._pending_grammars) + self._prefill.num_waiting,
            num_pages_used=self._cache.num_pages - self._cache.num_available,
            num_pages=self._cache.num_pages,
            num_retractions=self.counts.num_retractions,
            num_steps=self.counts.num_steps,
            num_computed_tokens=self.counts.num_computed_tokens,
            num_cached_tokens=self.counts.num_cached_tokens,
            budget_tokens=self._pacer.latest_bounded.num_tokens,
            budget_ms=round(self._pacer.latest_bounded.bound_ms, 1),
            flushes=list(self._flushes),
        )
