"""Grammars of answers: which tokens may come next, and where a match is complete.

llguidance compiles them and follows them token by token (derivatives of regular expressions under
an Earley parser, as far as they are needed). A matcher has consumed the tokens that the host knows,
so a retracted request goes on where it was. Nothing here is on the device.
"""

# Dimensions: W words of 32 bits, X a selection out of another dimension: requests with a grammar.

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import llguidance.numpy
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from minisgl.core import Grammar, IntArray, ReqSlice
from minisgl.errors import InvalidRequest
from minisgl.sampling_params import JSON_OPTIONS

# Sets of tokens that are allowed as a whole where all of them match: llguidance's own, and more of
# short texts. Near the end of a text of limited length it looks at every token that is in no set.
_SLICES = [*(rf'[^"\\\x00-\x1F\x7F]{{1,{n}}}' for n in range(1, 10)), *LLTokenizer.general_slices()]
_LIMITS = LLParserLimits(initial_lexer_fuel=50_000)  # about a second for a regular expression
# Bytes, of which 2**26 are enough for the longest chain of references that a grammar can be.
_STACK = 2**28
# What follows a reason: an excerpt of the grammar, which may contain what the request did not send,
# or advice to programmers.
_EXCERPT = re.compile(r"\n<state>|\n\s*\d+ \| |; (?:either|try) ")


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


@dataclass(slots=True)
class _Matcher:
    """A compiled grammar and the place in a match; `grammar` says what it can be used for again."""

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

    Each request has a matcher to itself: copies share the automaton that they build as they go, and
    wait for each other. Matchers of ended requests are kept, with what they have built.

    Args:
        folder: the model's, for its tokenizer, which is read when the first grammar comes.
        vocab_size: of the logits.
        eos_ids: allowed where a match may end.
        masks_XW: int32, where the masks of a step go. The masks before were used before the tokens
            came that the next masks depend on.
        for_gpu: masks are made by threads beside the caller, which on a CPU would compete for cores
            with the model's.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_ids: frozenset[int],
        masks_XW: IntArray,
        *,
        for_gpu: bool,
    ) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._masks_XW = masks_XW
        self._executor = LLExecutor() if for_gpu else None
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        stack_size = threading.stack_size(_STACK)
        self._helper.submit(int).result()  # which starts the thread
        threading.stack_size(stack_size)
        self._pending = PendingMasks()
        self._matchers: dict[int, _Matcher] = {}
        self._idle: deque[_Matcher] = deque(maxlen=len(masks_XW))

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        file = self._folder / "tokenizer.json"
        options = (self._vocab_size, self._eos_ids or None, _SLICES)
        if file.exists():
            return LLTokenizer(str(file), *options)
        from llguidance.hf import from_tokenizer  # takes seconds to import, and is rarely needed
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self._folder, trust_remote_code=False)
        return from_tokenizer(tokenizer, *options)

    def open(self, uid: int, grammar: Grammar) -> None:
        """Find or make a matcher for a request.

        Raises:
            InvalidRequest: the grammar has a mistake, no match, or something that is not supported.
        """
        self._pending.wait()  # an idle matcher may still be making a mask of an ended request
        same = (idle for idle in reversed(self._idle) if idle.grammar == grammar)
        idle = next(same, None)
        if idle is not None:
            self._idle.remove(idle)
        if idle is None or not idle.matcher.reset():
            compiled = self._helper.submit(self._compile, grammar).result()
            idle = _Matcher(grammar, compiled)
        self._matchers[uid] = idle

    def close(self, uid: int) -> None:
        """Keep the matcher of an ended request, if it has one, for others with its grammar."""
        if uid in self._matchers:
            self._idle.append(self._matchers.pop(uid))

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=_LIMITS)
        except ValueError as error:
            raise _refusal(str(error)) from None
        # A first mask, because a grammar is compiled as far as it is used.
        first_1W = np.empty(llguidance.numpy.get_bitmask_shape(1, self._vocab_size), dtype=np.int32)
        llguidance.numpy.fill_next_token_bitmask(matcher, first_1W)
        if reason := matcher.get_error():
            raise _refusal("nothing matches it" if reason.startswith("NoExtension") else reason)
        return matcher

    def guide(self, slices: Sequence[ReqSlice]) -> bool:
        """Whether a grammar restricts what the slices sample."""
        return bool(self._matchers) and any(chunk.req.uid in self._matchers for chunk in slices)

    def start_masks(self, slices: Sequence[ReqSlice]) -> PendingMasks:
        """Start making the masks for sampling slices whose requests have a grammar.

        All tokens before must have been accepted. If llguidance reaches a limit, a mask allows the
        end of the sequence alone, and that token ends the request on all ranks.
        """
        guided = [chunk for chunk in slices if chunk.req.params.grammar is not None]
        masks_XW = self._masks_XW[: len(guided)]
        matchers: list[tuple[LLMatcher, int]] = []
        for x, chunk in enumerate(guided):
            if chunk.end < chunk.req.num_known:
                _allow_only(masks_XW[x], int(chunk.req.tokens[chunk.end]))
            else:
                matchers.append((self._matchers[chunk.req.uid].matcher, x))

        if self._executor is None:
            for matcher, x in matchers:
                llguidance.numpy.fill_next_token_bitmask(matcher, masks_XW, x)
            return PendingMasks()
        has_begun = threading.Event()
        future = self._helper.submit(self._fill, matchers, masks_XW, has_begun)
        self._pending = PendingMasks(future)
        # Else the caller would keep Python's lock until it waits for the masks, and they begin
        # then.
        has_begun.wait()
        return self._pending

    def _fill(
        self, matchers: list[tuple[LLMatcher, int]], masks_XW: IntArray, has_begun: threading.Event
    ) -> None:
        """Make masks in parallel; runs on the helper's thread, without Python's lock."""
        has_begun.set()
        if matchers:
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, matchers, masks_XW)

    def accept(self, uid: int, tokens: list[int]) -> MatchState:
        """Advance a request's match by its next tokens."""
        matcher = self._matchers[uid].matcher
        matcher.consume_tokens(tokens)
        if not matcher.is_stopped():
            return IN_PROGRESS
        if matcher.is_error():
            return MatchState(error=_refusal(matcher.get_error()))
        return _COMPLETE

    def forced_tokens(self, uid: int) -> list[int]:
        """The next tokens of a request, as far as its grammar leaves no choice.

        A mask at this place allows the first of them alone. The match does not advance.
        """
        return list(self._matchers[uid].matcher.compute_ff_tokens())


def _allow_only(mask_W: IntArray, token: int) -> None:
    """Write a mask that allows one token."""
    mask_W[:] = 0
    mask_W.view(np.uint32)[token // 32] = 1 << (token % 32)


def _source(grammar: Grammar) -> str:
    """A grammar as llguidance reads it."""
    if grammar.kind == "json_schema":
        return str(LLMatcher.grammar_from_json_schema(grammar.text, defaults=JSON_OPTIONS))
    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(grammar.text))
    return str(LLMatcher.grammar_from_lark(grammar.text))


def _refusal(reason: str) -> InvalidRequest:
    text = " ".join(_EXCERPT.split(reason)[0].split())
    return InvalidRequest(f"the grammar is refused: {text[:400]}", param="grammar")
