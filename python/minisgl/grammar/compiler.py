"""From a grammar to a matcher of llguidance."""

# Dimensions: W words of 32 bits.

from __future__ import annotations

import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import llguidance.numpy
import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from minisgl.checkpoint.auto_tokenizer import load_tokenizer
from minisgl.core import Grammar
from minisgl.errors import InvalidRequest, Unavailable
from minisgl.grammar.special_tokens import (
    end_of_sequence,
    hide_special_tokens,
    number_special_tokens,
)
from minisgl.sampling_params import JSON_OPTIONS, TOOL_NOTE
from minisgl.schemas import readable_regex, readable_schema
from minisgl.utils.shortages import is_shortage
from minisgl.utils.threads import started_executor

# Bytes, of which 2**26 are enough for the longest chain of references that a grammar can be.
STACK_BYTES = 2**28
# Sets of tokens that are allowed as a whole where all of them match: llguidance's own, and more of
# short texts. Near the end of a text of limited length it looks at every token that is in no set.
_SLICES = [*(rf'[^"\\\x00-\x1F\x7F]{{1,{n}}}' for n in range(1, 10)), *LLTokenizer.general_slices()]
_LEXER_FUEL = 50_000  # about a second for a regular expression
# States of the automaton that reads lexemes, of 0.5 to 2.5 kB: at most 80 MiB were seen. A string
# of bounded length needs one for each character, so that 32 pages of text are still possible.
_MAX_STATES = 2**15
_limits = partial(LLParserLimits, initial_lexer_fuel=_LEXER_FUEL, max_lexer_states=_MAX_STATES)
# Earley items of one mask. A Lark grammar may be ambiguous, and its items then cost far more each:
# 50,000 are seconds. Schemas are hardly ambiguous, and one of many optional properties needs many.
_LIMITS = {
    "json_schema": _limits(step_max_items=50_000),
    "regex": _limits(),
    "lark": _limits(step_max_items=3_000),
}
_REFUSED = "the grammar is refused: "
_OF_TOOL = "the tool "
_PLACE = re.compile(r"at (\d+)\(\d+\): ")  # of a mistake, in lines and columns
_TOOL_NOTE = re.compile(rf"{TOOL_NOTE}('[\w.-]+')$")
# What follows a reason: an excerpt of the grammar, which may contain what the request did not send,
# or advice to programmers.
_EXCERPT = re.compile(r"\n<state>|\n\s*\d+ \| |; (?:either|try|following special tokens) ")


class GrammarModel(msgspec.Struct, frozen=True):
    """The model that grammars are compiled for.

    Attributes:
        folder: where its tokenizer is.
        vocab_size: of the logits.
        eos_ids: allowed where a match may end.
    """

    folder: str
    vocab_size: int
    eos_ids: list[int]


class GrammarCompiler:
    """Compiles grammars over the vocabulary of one model. The GIL is released meanwhile.

    The tokenizer is read once: when it is first needed, or on a thread that `start_reading` starts.
    It is read again only if the system was short of memory or threads.
    """

    def __init__(self, model: GrammarModel) -> None:
        self._model = model
        self._lock = threading.Lock()  # held by the thread that reads
        # The tokenizer, and the ids of its special tokens by name; or why it cannot be read.
        self._reading: Future[tuple[LLTokenizer, dict[str, int]]] | None = None

    @property
    def tokenizer(self) -> LLTokenizer:
        """
        Raises:
            ValueError, OSError, ImportError, MemoryError: it cannot be read, or not by llguidance.
        """
        return self._read()[0]

    def start_reading(self) -> None:
        """Begin to read the tokenizer, once. Python's lock is held for the most part of a second.

        What waits without that lock, as for a device or another process, is not held up.
        """
        threading.Thread(target=self._read_first, name="tokenizer").start()

    def _read(self) -> tuple[LLTokenizer, dict[str, int]]:
        """Read the tokenizer, or wait for the thread that reads it. No other thread is needed."""
        return self._read_first().result()

    def _read_first(self) -> Future[tuple[LLTokenizer, dict[str, int]]]:
        """Read the tokenizer, unless a thread has. What fails is tried again after a shortage."""
        with self._lock:
            if self._reading is None or is_shortage(self._reading.exception()):
                self._reading = Future()
                try:
                    self._reading.set_result(self._read_tokenizer())
                except BaseException as error:  # for all who wait
                    self._reading.set_exception(error)
            return self._reading

    def _read_tokenizer(self) -> tuple[LLTokenizer, dict[str, int]]:
        tokenizer_json, special_ids = hide_special_tokens(_read_json(Path(self._model.folder)))
        tokenizer = LLTokenizer(
            tokenizer_json,
            n_vocab=self._model.vocab_size,
            eos_token=self._model.eos_ids or end_of_sequence(special_ids),
            slices=_SLICES,
        )
        return tokenizer, special_ids

    def read_tokenizer(self) -> None:
        """Return when the tokenizer is read.

        Raises:
            ValueError, OSError, ImportError, MemoryError: as `tokenizer`.
        """
        _ = self.tokenizer

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Compile a grammar, and make its first mask, because it is compiled as far as it is used.

        It needs a deep stack, since llguidance follows references by recursion.

        Raises:
            InvalidRequest: the grammar has a mistake, no match, or something that is not supported;
                or the tokenizer cannot be read.
            Unavailable: the system is too short of something to read the tokenizer.
        """
        limits = _LIMITS[grammar.kind]
        try:
            tokenizer, special_ids = self._read()
        except (ValueError, OSError, ImportError, MemoryError) as error:
            detail = str(error) or type(error).__name__
            reason = f"the model's tokenizer cannot be read for grammars: {detail}"
            if is_shortage(error):
                raise Unavailable(reason) from None
            raise refusal(reason) from None
        try:
            source = _source(grammar, special_ids)
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
        except ValueError as error:
            raise refusal(_without_foreign_place(grammar, str(error))) from None
        shape_1W = llguidance.numpy.get_bitmask_shape(1, self._model.vocab_size)
        first_1W = np.empty(shape_1W, dtype=np.int32)
        llguidance.numpy.fill_next_token_bitmask(matcher, first_1W)
        if reason := matcher.get_error():
            if reason.startswith("NoExtension"):
                raise refusal("nothing matches it")
            raise refusal(_without_foreign_place(grammar, reason))
        return matcher


def deep_stack_executor(name: str, num_threads: int = 1) -> ThreadPoolExecutor:
    """Make an executor whose threads have a stack that is deep enough for every grammar.

    Raises:
        RuntimeError: the system has too few threads left.
    """
    return started_executor(name, num_threads, STACK_BYTES)


def refusal(reason: str) -> InvalidRequest:
    """The error of a request whose grammar cannot be followed."""
    text = " ".join(_EXCERPT.split(reason)[0].split())
    return refused(f"{_REFUSED}{text[:400]}")


def refused(message: str) -> InvalidRequest:
    """The error with the message of a refusal, of the tools if it is of a tool."""
    is_of_tool = message.startswith(_REFUSED + _OF_TOOL)
    return InvalidRequest(message, param="tools" if is_of_tool else "grammar")


def _without_foreign_place(grammar: Grammar, reason: str) -> str:
    """A reason without its place, where that is in a grammar which the client has not written.

    If that is a schema of a tool, the tool is named instead.
    """
    place = _PLACE.match(reason)
    if place is None:
        return reason
    rest = reason[place.end() :]
    is_foreign = grammar.kind == "regex" or rest.startswith("failed to compile JSON schema")
    if not is_foreign:
        return reason
    if grammar.kind == "lark":
        line = grammar.text.split("\n")[int(place[1]) - 1]
        if note := _TOOL_NOTE.search(line):
            return f"{_OF_TOOL}{note[1]}: {rest}"
    return rest


def _read_json(folder: Path) -> bytes:
    """The tokenizer of a folder, as the library `tokenizers` writes it."""
    file = folder / "tokenizer.json"
    if file.exists():
        return file.read_bytes()
    tokenizer = load_tokenizer(folder)  # imports what is rarely needed
    if not tokenizer.is_fast:
        raise ValueError("llguidance reads tokenizers of the library tokenizers alone")
    text: str = tokenizer.backend_tokenizer.to_str()
    return text.encode()


def _source(grammar: Grammar, special_ids: dict[str, int]) -> str:
    """A grammar as llguidance reads it."""
    if grammar.kind == "json_schema":
        schema = readable_schema(grammar.text)
        return str(LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS))
    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(readable_regex(grammar.text)))
    lark = number_special_tokens(grammar.text, special_ids)
    return str(LLMatcher.grammar_from_lark(lark))
