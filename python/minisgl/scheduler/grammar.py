"""Grammars of answers: which tokens may come next, and where a match is complete.

llguidance compiles them and follows them token by token (derivatives of regular expressions under
an Earley parser, as far as they are needed). A matcher has consumed the tokens that the host knows,
so a retracted request goes on where it was. Nothing here is on the device.
"""

# Dimensions: W words of 32 bits, X a selection out of another dimension: requests with a grammar.

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import llguidance.numpy
import numpy as np
from llguidance import LLExecutor, LLMatcher

from minisgl.core import Grammar, IntArray, ReqSlice
from minisgl.errors import InvalidRequest
from minisgl.grammar import refusal

MATCHERS_ON_GPU = 8  # of a grammar
_CACHE_BYTES = 2**28  # of grammars that are kept
_CHARACTER_BYTES = 4
_ENTRY_BYTES = 1024  # of a grammar that is refused, beside its text


@dataclass(frozen=True, slots=True)
class MatchState:
    """Where a match is after some tokens.

    Attributes:
        is_complete: whether the answer ends here.
        error: set if the grammar turned out to be more than llguidance follows.
    """

    is_complete: bool = False
    error: InvalidRequest | None = None


IN_PROGRESS = MatchState()
_COMPLETE = MatchState(is_complete=True)


@dataclass(frozen=True, slots=True)
class _KnownGrammar:
    """A grammar that was tried.

    Attributes:
        matchers: at the beginning of a match; copies of them follow the answers. Empty if
            the grammar is refused.
        error: why it is refused.
        num_bytes: memory that it takes.
    """

    matchers: deque[LLMatcher]
    error: str | None
    num_bytes: int


class KnownGrammars:
    """Grammars that were tried, the latest used ones, up to a number of bytes."""

    def __init__(self, max_bytes: int = _CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._known: OrderedDict[Grammar, _KnownGrammar] = OrderedDict()

    def __contains__(self, grammar: Grammar) -> bool:
        return grammar in self._known

    def __len__(self) -> int:
        return len(self._known)

    def add(self, grammar: Grammar, matchers: list[LLMatcher], num_bytes: int) -> None:
        """Keep a grammar that was compiled once or several times, each time to so many bytes."""
        num_bytes = num_bytes * len(matchers) + _bytes_of(grammar)
        self._add(grammar, _KnownGrammar(deque(matchers), None, num_bytes))

    def add_refused(self, grammar: Grammar, error: str) -> None:
        """Remember why a grammar is refused."""
        self._add(grammar, _KnownGrammar(deque(), error, _bytes_of(grammar)))

    def discard(self, grammar: Grammar) -> None:
        """Forget a grammar, if it is here: the next request with it has it compiled again."""
        known = self._known.pop(grammar, None)
        if known is not None:
            self._num_bytes -= known.num_bytes

    def _add(self, grammar: Grammar, known: _KnownGrammar) -> None:
        assert grammar not in self._known
        self._known[grammar] = known
        self._num_bytes += known.num_bytes
        while self._num_bytes > self._max_bytes and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """Return a copy of a matcher of a known grammar, of each in turn.

        Raises:
            InvalidRequest: the grammar was refused.
        """
        self._known.move_to_end(grammar)
        known = self._known[grammar]
        if known.error is not None:
            raise InvalidRequest(known.error, param="grammar")
        known.matchers.rotate()
        return known.matchers[0].deep_copy()


def _bytes_of(grammar: Grammar) -> int:
    return len(grammar.text) * _CHARACTER_BYTES + _ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class _Match:
    """The match of one answer."""

    grammar: Grammar
    matcher: LLMatcher


class PendingMasks:
    """Masks of a step that threads may still be making."""

    def __init__(self, future: Future[None] | None = None) -> None:
        self._future = future

    def wait(self) -> None:
        """Return when all masks are in their place."""
        if self._future is not None:
            self._future.result()


class GrammarMatchers:
    """The matchers of the open requests that have a grammar.

    Each request has a copy of a matcher. Copies of one matcher share the automaton that they build
    as they go, and wait for each other. Where threads make masks there are several to copy from.
    Once the automaton has as many states as it may, every copy fails at the next new one. So a
    grammar is forgotten when a match fails.

    Args:
        masks_XW: int32, where the masks of a step go. The masks before were used before the tokens
            came that the next masks depend on.
        for_gpu: masks are made by threads beside the caller, which on a CPU would compete for cores
            with the model's.
    """

    def __init__(self, masks_XW: IntArray, *, for_gpu: bool) -> None:
        self.known = KnownGrammars()
        self._masks_XW = masks_XW
        self._executor = LLExecutor() if for_gpu else None
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._matches: dict[int, _Match] = {}

    def knows(self, grammar: Grammar) -> bool:
        """Whether a request with this grammar can be opened or refused at once."""
        return grammar in self.known

    def open(self, uid: int, grammar: Grammar) -> None:
        """Make a matcher for a request with a known grammar.

        Raises:
            InvalidRequest: the grammar is refused.
        """
        self._matches[uid] = _Match(grammar, self.known.matcher(grammar))

    def close(self, uid: int) -> None:
        """Drop the matcher of an ended request, if it has one."""
        self._matches.pop(uid, None)

    def restricts_any(self, slices: Sequence[ReqSlice]) -> bool:
        """Whether a grammar restricts what the slices sample."""
        return bool(self._matches) and any(
            req_slice.req.uid in self._matches for req_slice in slices
        )

    def start_masks(self, slices: Sequence[ReqSlice]) -> PendingMasks:
        """Start making the masks for sampling slices whose requests have a grammar.

        All tokens before must have been accepted. If llguidance reaches a limit, a mask allows the
        end of the sequence alone, and that token ends the request on all ranks.
        """
        guided = [req_slice for req_slice in slices if req_slice.req.params.grammar is not None]
        masks_XW = self._masks_XW[: len(guided)]
        matchers: list[tuple[LLMatcher, int]] = []
        for x, req_slice in enumerate(guided):
            if req_slice.end < req_slice.req.num_known:
                _allow_only(masks_XW[x], int(req_slice.req.tokens[req_slice.end]))
            else:
                matchers.append((self._matches[req_slice.req.uid].matcher, x))

        if self._executor is None:
            for matcher, x in matchers:
                llguidance.numpy.fill_next_token_bitmask(matcher, masks_XW, x)
            return PendingMasks()
        has_begun = threading.Event()
        future = self._helper.submit(self._fill, matchers, masks_XW, has_begun)
        # Else the caller would keep Python's lock until it waits for the masks, and they begin
        # then.
        has_begun.wait()
        return PendingMasks(future)

    def _fill(
        self, matchers: list[tuple[LLMatcher, int]], masks_XW: IntArray, has_begun: threading.Event
    ) -> None:
        """Make masks in parallel; runs on the helper's thread, without Python's lock."""
        has_begun.set()
        if matchers:
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, matchers, masks_XW)

    def accept(self, uid: int, tokens: list[int]) -> MatchState:
        """Advance a request's match by its next tokens."""
        match = self._matches[uid]
        matcher = match.matcher
        matcher.consume_tokens(tokens)
        if not matcher.is_stopped():
            return IN_PROGRESS
        if matcher.is_error():
            self.known.discard(match.grammar)
            return MatchState(error=refusal(matcher.get_error()))
        return _COMPLETE

    def forced_tokens(self, uid: int) -> list[int]:
        """The next tokens of a request, as far as its grammar leaves no choice.

        A mask at this place allows the first of them alone. The match does not advance.
        """
        return list(self._matches[uid].matcher.compute_ff_tokens())


def _allow_only(mask_W: IntArray, token: int) -> None:
    """Write a mask that allows one token."""
    mask_W[:] = 0
    mask_W.view(np.uint32)[token // 32] = 1 << (token % 32)
