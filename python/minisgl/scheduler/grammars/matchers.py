"""Grammars of answers: which tokens may come next, and where a match is complete.

llguidance compiles them and follows them token by token (derivatives of regular expressions under
an Earley parser, as far as they are needed). A matcher has consumed the tokens that the host knows,
so a retracted request goes on where it was. Nothing here is on the device.
"""

# Dimensions: W words of 32 bits, X a selection out of another dimension: requests with a grammar.

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

import llguidance.numpy
import numpy as np
from llguidance import LLMatcher

from minisgl.core import Grammar, IntArray, ReqSlice
from minisgl.grammar import refusal
from minisgl.message import MatchState, SchedulerMsg
from minisgl.scheduler.grammars.budget import GrammarBudget
from minisgl.scheduler.grammars.known import KnownGrammar, KnownGrammars
from minisgl.scheduler.grammars.mask_threads import MaskThreads
from minisgl.utils.heap import bytes_touched, return_free_memory
from minisgl.utils.threads import started_executor

IN_PROGRESS = MatchState()
_COMPLETE = MatchState(is_complete=True)

_ALL_ALLOWED = -1  # a word of a mask
# What llguidance says of a token that is not allowed. Only a lost match lets one pass.
_NOT_ALLOWED = "doesn't satisfy the grammar"
_TRIM_BYTES = 2**23  # of grammars that are gone, after which memory is given back to the kernel


@dataclass(frozen=True, slots=True)
class _Match:
    """The match of one answer; it has no matcher if this rank has lost it."""

    known: KnownGrammar
    matcher: LLMatcher | None


_Growth: TypeAlias = list[tuple[KnownGrammar, int]]  # bytes that grammars have taken


class PendingMasks:
    """Masks of a step that threads are making.

    Args:
        count: is called with the memory that the masks took, by the thread that waits.
    """

    def __init__(self, future: Future[_Growth], count: Callable[[_Growth], None]) -> None:
        self._future = future
        self._count = count

    def wait(self) -> None:
        """Return when all masks are in their place. To be called once."""
        self._count(self._future.result())


class GrammarMatchers:
    """The matchers of the open requests that have a grammar.

    Each request has a copy of a matcher. Copies of one matcher share the automaton that they build
    as they go, and wait for each other. Where threads make masks there are several to copy from.
    Once the automaton has as many states as it may, every copy fails at the next new one. So a
    grammar is forgotten when a match fails. The memory of automata and matches is measured as they
    grow, for `GrammarBudget`. Results here are this rank's own; `GrammarProgress` has those that
    count on all ranks.

    Args:
        masks_XW: int32, where the masks of a step go. The masks before were used before the tokens
            came that the next masks depend on.
        post: sends a message to all ranks, on rank 0; None elsewhere.
        for_gpu: masks are made by threads beside the caller, which on a CPU would compete for cores
            with the model's.
    """

    def __init__(
        self, masks_XW: IntArray, post: Callable[[SchedulerMsg], None] | None, *, for_gpu: bool
    ) -> None:
        self.known = KnownGrammars()
        self._budget = GrammarBudget(self.known)
        self._masks_XW = masks_XW
        self._post = post
        self._mask_threads = MaskThreads() if for_gpu else None
        self._mask_maker = started_executor("masks") if for_gpu else None
        self._memory_returner = started_executor("memory")
        self._matches: dict[int, _Match] = {}

    def knows(self, grammar: Grammar) -> bool:
        """Whether a request with this grammar can be opened or refused at once."""
        return grammar in self.known

    def open(self, uid: int, grammar: Grammar) -> None:
        """Make a matcher for a request with a known grammar.

        Raises:
            InvalidRequest: the grammar is refused.
        """
        known = self.known.open(grammar)
        before = bytes_touched()
        self._matches[uid] = _Match(known, known.copy_matcher())
        self._measure(known, before)

    def close(self, uid: int) -> None:
        """Drop the matcher of an ended request, if it has one."""
        match = self._matches.pop(uid, None)
        if match is not None:
            self.known.close(match.known)

    def stay_in_budget(self) -> None:
        """Say what has to go because grammars take too much memory, on rank 0.

        The memory of large ones that are gone is given back to the kernel, beside the caller. What
        is used a second time is not measured, so it would not count in the budget.
        """
        if self.known.freed_bytes >= _TRIM_BYTES:
            self.known.freed_bytes = 0
            self._memory_returner.submit(return_free_memory)
        if self._post is None:
            return
        opened = ((uid, match.known) for uid, match in self._matches.items())
        for msg in self._budget.excess(opened):
            self._post(msg)

    def _measure(self, known: KnownGrammar, before: int) -> None:
        """Count what this thread has taken for a grammar.

        Args:
            before: what `bytes_touched` said at the beginning.
        """
        self._count(known, bytes_touched() - before)

    def _count(self, known: KnownGrammar, num_bytes: int) -> None:
        if num_bytes:
            if self._mask_threads is not None:
                num_bytes += self._mask_threads.take_unknown(num_bytes)
            self._budget.grow(known, num_bytes)

    def _count_masks(self, growth: _Growth) -> None:
        """Count what was taken for the masks of a step."""
        for known, num_bytes in growth:
            self._count(known, num_bytes)
        if self._mask_threads is not None:
            self._mask_threads.measure()

    def restricts_any(self, slices: Sequence[ReqSlice]) -> bool:
        """Whether a grammar restricts what the slices sample."""
        return bool(self._matches) and any(
            req_slice.req.uid in self._matches for req_slice in slices
        )

    def start_masks(self, slices: Sequence[ReqSlice]) -> PendingMasks | None:
        """Start making the masks for sampling slices whose requests have a grammar.

        All tokens before must have been accepted. If llguidance reaches a limit, a mask allows the
        end of the sequence alone, and whatever is sampled, the match has failed then. The mask of
        a match that this rank has lost allows everything.

        Returns:
            those that threads are making; None if all masks are in their place already.
        """
        guided = [req_slice for req_slice in slices if req_slice.req.params.grammar is not None]
        masks_XW = self._masks_XW[: len(guided)]
        matches: list[tuple[KnownGrammar, LLMatcher, int]] = []
        for x, req_slice in enumerate(guided):
            if req_slice.end < req_slice.req.num_known:
                _allow_only(masks_XW[x], int(req_slice.req.tokens[req_slice.end]))
                continue
            match = self._matches[req_slice.req.uid]
            if match.matcher is None:
                masks_XW[x] = _ALL_ALLOWED
            else:
                matches.append((match.known, match.matcher, x))

        threads = self._mask_threads
        if threads is None or self._mask_maker is None:
            self._count_masks(_fill_each(matches, masks_XW))
            return None
        has_begun = threading.Event()
        together = None if threads.begin_step() else threads
        future = self._mask_maker.submit(_fill, together, matches, masks_XW, has_begun)
        # Else the caller would keep Python's lock until it waits for the masks, and they begin
        # then.
        has_begun.wait()
        return PendingMasks(future, self._count_masks)

    def accept(self, uid: int, tokens: list[int]) -> MatchState:
        """Advance a request's match by its next tokens."""
        match = self._matches[uid]
        matcher = match.matcher
        if matcher is None:
            return IN_PROGRESS
        before = bytes_touched()
        matcher.consume_tokens(tokens)
        self._measure(match.known, before)
        if not matcher.is_stopped():
            return IN_PROGRESS
        if matcher.is_error():
            return MatchState(error=str(refusal(_reason(matcher.get_error()))))
        return _COMPLETE

    def forced_tokens(self, uid: int) -> list[int]:
        """The next tokens of a request, as far as its grammar leaves no choice.

        A mask at this position allows the first of them alone. The match does not advance.
        """
        match = self._matches[uid]
        if match.matcher is None:
            return []
        before = bytes_touched()
        tokens = list(match.matcher.compute_ff_tokens())
        self._measure(match.known, before)
        return tokens

    def forget_grammar_of(self, uid: int) -> None:
        """Forget the grammar of a request whose match has failed: its automaton may be full."""
        self.known.forget(self._matches[uid].known.grammar)

    def lose_match(self, uid: int) -> None:
        """Follow a request's match no longer: rank 0's stands elsewhere."""
        self._matches[uid] = _Match(self._matches[uid].known, None)


def _fill(
    threads: MaskThreads | None,
    matches: list[tuple[KnownGrammar, LLMatcher, int]],
    masks_XW: IntArray,
    has_begun: threading.Event,
) -> _Growth:
    """Make masks; runs on the helper's thread, without Python's lock.

    Args:
        threads: None: one mask after the other.
    """
    has_begun.set()
    if threads is None:
        return _fill_each(matches, masks_XW)
    if matches:
        threads.fill([(matcher, x) for _, matcher, x in matches], masks_XW)
    return []


def _fill_each(matches: list[tuple[KnownGrammar, LLMatcher, int]], masks_XW: IntArray) -> _Growth:
    """Make masks one after the other, and measure by how much each grammar grows."""
    growth = []
    for known, matcher, x in matches:
        before = bytes_touched()
        llguidance.numpy.fill_next_token_bitmask(matcher, masks_XW, x)
        growth.append((known, bytes_touched() - before))
    return growth


def _reason(error: str) -> str:
    """Why a match has failed, by what llguidance says of it."""
    return "a limit was met while it was followed" if _NOT_ALLOWED in error else error


def _allow_only(mask_W: IntArray, token: int) -> None:
    """Write a mask that allows one token."""
    mask_W[:] = 0
    mask_W.view(np.uint32)[token // 32] = 1 << (token % 32)
