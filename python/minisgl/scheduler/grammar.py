"""Grammars of answers: which tokens may come next, and where a match is complete.

llguidance compiles them and follows them token by token (derivatives of regular expressions under an Earley parser, as
far as they are needed). It follows the tokens that the host knows, so a retracted request goes on where it was. Nothing
here is on the device.
"""

# Dimension key: X requests that have a grammar, W words of 32 bits.

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path

import llguidance.numpy
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from minisgl.core import Grammar, IntArray, ReqSlice
from minisgl.errors import InvalidRequest
from minisgl.sampling_params import JSON_OPTIONS

# Sets of tokens that are allowed as a whole where all of them match: llguidance's own, and more of short texts, since
# near the end of a text of limited length it looks at every token that is in none.
_SLICES = [*(rf'[^"\\\x00-\x1F\x7F]{{1,{n}}}' for n in range(1, 10)), *LLTokenizer.general_slices()]
_LIMITS = LLParserLimits(initial_lexer_fuel=50_000)  # about a second for a regular expression
_STACK = (
    2**28
)  # bytes, of which 2**26 are enough for the longest chain of references that a grammar can be
# What follows a reason: an excerpt of the grammar, which may be around what the request sent, or advice to programmers.
_REST = re.compile(r"\n<state>|\n\s*\d+ \| |; (?:either|try) ")


class Grammars:
    """The open requests that have a grammar, each with its place in a match.

    Each has a matcher to itself: copies share the automaton that they build as they go, and wait for each other. Those
    of ended requests are kept, with what they have built.

    Args:
        folder: of the model, for its tokenizer, which is read when the first grammar comes.
        vocab_size: of the logits.
        eos_ids: allowed where a match may end.
        bits_XW: int32, where the masks of a step go; the last ones were used before their tokens came, and the next
            want those.
        for_gpu: masks are made by threads beside the caller, which on a CPU would fight for cores with the model's.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_ids: frozenset[int],
        bits_XW: IntArray,
        *,
        for_gpu: bool,
    ) -> None:
        self._folder, self._vocab_size = folder, vocab_size
        self._eos_ids = sorted(eos_ids)
        self._bits_XW = bits_XW
        self._executor = LLExecutor() if for_gpu else None
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        before = threading.stack_size(_STACK)
        self._helper.submit(int).result()  # which starts the thread
        threading.stack_size(before)
        self._filling: list[Future[None]] = []
        self._matchers: dict[int, tuple[Grammar, LLMatcher]] = {}
        self._idle: deque[tuple[Grammar, LLMatcher]] = deque(maxlen=len(bits_XW))

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        file, options = (
            self._folder / "tokenizer.json",
            (self._vocab_size, self._eos_ids or None, _SLICES),
        )
        if file.exists():
            return LLTokenizer(str(file), *options)
        from llguidance.hf import from_tokenizer  # takes seconds to import, and is rarely needed
        from transformers import AutoTokenizer

        return from_tokenizer(AutoTokenizer.from_pretrained(self._folder), *options)

    def open(self, uid: int, grammar: Grammar) -> None:
        """
        Raises:
            InvalidRequest: the grammar has a mistake, no match, or something in it that is not supported.
        """
        wait(
            self._filling
        )  # an idle matcher may still be making a mask, of a request that has just ended
        idle = next((it for it in reversed(self._idle) if it[0] == grammar), None)
        if idle:
            self._idle.remove(idle)
        if not idle or not idle[1].reset():
            idle = grammar, self._helper.submit(self._compile, grammar).result()
        self._matchers[uid] = idle

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=_LIMITS)
        except ValueError as error:
            raise _refusal(str(error)) from None
        first_1W = np.empty(llguidance.numpy.get_bitmask_shape(1, self._vocab_size), dtype=np.int32)
        llguidance.numpy.fill_next_token_bitmask(
            matcher, first_1W
        )  # it is compiled as far as it is looked at
        if reason := matcher.get_error():
            raise _refusal("nothing matches it" if reason.startswith("NoExtension") else reason)
        return matcher

    def guides(self, parts: list[ReqSlice]) -> bool:
        """Whether a grammar has a say in what the slices sample."""
        return bool(self._matchers) and any(part.req.uid in self._matchers for part in parts)

    def start_masks(self, parts: list[ReqSlice]) -> Callable[[], None]:
        """Put what the slices may sample that have a grammar where it belongs, once all tokens before were accepted.

        The result waits for the masks. Where llguidance gives up, a mask has the end of the sequence alone, and that
        token ends the request on all ranks.
        """
        asking = [part.req.uid for part in parts if part.req.params.grammar]
        pairs = [(self._matchers[uid][1], x) for x, uid in enumerate(asking)]
        bits_XW, has_begun = self._bits_XW[: len(asking)], threading.Event()
        if not self._executor:
            for matcher, x in pairs:
                llguidance.numpy.fill_next_token_bitmask(matcher, bits_XW, x)
            return lambda: None

        def fill() -> None:
            has_begun.set()
            llguidance.numpy.fill_next_token_bitmask_par(
                self._executor, pairs, bits_XW
            )  # without Python's lock

        self._filling = [self._helper.submit(fill)]
        has_begun.wait()  # else the caller would keep the lock until it waits for the masks, and they begin then
        return self._filling[0].result

    def accept(self, uid: int, token: int) -> bool | InvalidRequest:
        """Go on by a token of a request, if it has a grammar; whether that ends the match.

        The result is an error if the grammar turned out to be more than llguidance follows.
        """
        if uid not in self._matchers:
            return False
        _, matcher = self._matchers[uid]
        matcher.consume_token(token)
        return bool(matcher.is_stopped()) and (
            not matcher.is_error() or _refusal(matcher.get_error())
        )

    def close(self, uid: int) -> None:
        if uid in self._matchers:
            self._idle.append(self._matchers.pop(uid))


def _source(grammar: Grammar) -> str:
    """As llguidance reads it."""
    if grammar.kind == "json_schema":
        return str(LLMatcher.grammar_from_json_schema(grammar.text, defaults=JSON_OPTIONS))
    to_source = (
        LLMatcher.grammar_from_regex if grammar.kind == "regex" else LLMatcher.grammar_from_lark
    )
    return str(to_source(grammar.text))


def _refusal(reason: str) -> InvalidRequest:
    said = " ".join(_REST.split(reason)[0].split())
    return InvalidRequest(f"the grammar is refused: {said[:400]}", param="grammar")
