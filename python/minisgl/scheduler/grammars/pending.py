"""Requests that wait until their grammar is tried and compiled.

    new grammar ─ trial, rank 0 ─▶ GrammarVerdictMsg ─ compile, all ranks ─▶ GrammarCompiledMsg

Both run beside the steps. Rank 0 posts each message as soon as it can. It comes to all ranks with
the other messages of a step, so that they open requests in one order. Equal grammars share a trial.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from llguidance import LLMatcher

from minisgl.checkpoint.files import is_panic, one_line
from minisgl.config import SchedulerConfig
from minisgl.core import Grammar, Req
from minisgl.errors import EngineFailed, InvalidRequest, RequestError
from minisgl.grammar import (
    GrammarCompiler,
    GrammarModel,
    GrammarTrials,
    Trial,
    Verdict,
    deep_stack_executor,
)
from minisgl.message import GrammarCompiledMsg, GrammarVerdictMsg, SchedulerMsg
from minisgl.scheduler.grammars.known import KnownGrammars

logger = logging.getLogger(__name__)

_MATCHERS_ON_GPU = 8  # of a grammar
_FIRST_GRAMMAR = Grammar("regex", "(?s:.*)")


@dataclass(frozen=True, slots=True)
class GrammarTools:
    """The compiler of grammars on one rank and, on rank 0, their trials.

    Attributes:
        trials: on rank 0; None elsewhere.
        num_matchers: how many matchers are compiled of a grammar, side by side.
    """

    compiler: GrammarCompiler
    trials: GrammarTrials | None
    num_matchers: int = 1

    @classmethod
    def of(
        cls, config: SchedulerConfig, vocab_size: int, eos_ids: Set[int], *, leads: bool
    ) -> GrammarTools:
        """
        Args:
            eos_ids: those outside of the vocabulary are left out.
            leads: whether this is rank 0.
        """
        known_eos_ids = sorted(token for token in eos_ids if 0 <= token < vocab_size)
        compiled_for = GrammarModel(config.model or "", vocab_size, known_eos_ids)
        trials = GrammarTrials(compiled_for) if leads else None
        num_matchers = _MATCHERS_ON_GPU if config.device == "cuda" else 1
        return cls(GrammarCompiler(compiled_for), trials, num_matchers)

    def start(self) -> None:
        """Begin to read the tokenizer, here and in the trial process. Returns at once."""
        if self.trials is not None:
            self.trials.open()
        self.compiler.start_reading()


@dataclass(slots=True)
class _Pending:
    """A grammar that is tried or compiled.

    Attributes:
        reqs: the requests that wait for it, by uid, in order of their arrival.
        trial: on rank 0.
        num_bytes: memory that it takes, from its verdict on.
        compiled: from its verdict on, each a matcher.
        num_left: of these, how many are not compiled yet.
        failure: of one that could not be compiled.
    """

    grammar: Grammar
    reqs: dict[int, Req]
    trial: Trial | None
    num_bytes: int = 0
    compiled: list[Future[LLMatcher]] = field(default_factory=list)
    num_left: int = 0
    failure: BaseException | None = None


class PendingGrammars:
    """Grammars that are tried or compiled, and the requests that wait for them.

    Args:
        known: gets what was tried.
        post: sends a message to all ranks, from any thread.
    """

    def __init__(
        self, known: KnownGrammars, tools: GrammarTools, post: Callable[[SchedulerMsg], None]
    ) -> None:
        self._known = known
        self._compiler = tools.compiler
        self._trials = tools.trials
        self._num_matchers = tools.num_matchers
        self._post = post
        self._executor = deep_stack_executor("grammars", tools.num_matchers)
        self._lock = threading.Lock()  # of `num_left`
        self._pending: dict[int, _Pending] = {}
        self._number_of: dict[Grammar, int] = {}
        self._uids: set[int] = set()
        self._num_started = 0

    def get_ready(self) -> None:
        """Do all that is done once, before a grammar comes: try one, and compile it.

        The trial process starts, which takes a second. Meanwhile the tokenizer is read, if that has
        not begun before. If it cannot be read, rank 0 says so now, and again to each request with a
        grammar.
        """
        trial: Trial | None = None
        if self._trials is not None:
            self._trials.open()
            trial = self._trials.start(_FIRST_GRAMMAR, lambda _: None)
        try:
            self._compiler.read_tokenizer()
            self._executor.submit(self._compiler.compile, _FIRST_GRAMMAR).result()
        except (RequestError, ValueError, OSError, ImportError, MemoryError) as error:
            if self._trials is not None:
                logger.warning("grammars cannot be followed: %s", one_line(error))
        if trial is not None:
            trial.future.result()

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._uids)

    def __contains__(self, req: Req) -> bool:
        return req.uid in self._uids

    def add(self, req: Req) -> None:
        """Let a request wait for its grammar."""
        grammar = req.params.grammar
        assert grammar is not None
        self._uids.add(req.uid)
        if grammar not in self._number_of:
            self._start(grammar)
        self._pending[self._number_of[grammar]].reqs[req.uid] = req

    def _start(self, grammar: Grammar) -> None:
        number = self._num_started
        self._num_started += 1
        self._number_of[grammar] = number
        trial = None
        if self._trials is not None:
            trial = self._trials.start(grammar, partial(self._report, number))
        self._pending[number] = _Pending(grammar, {}, trial)

    def _report(self, number: int, verdict: Verdict) -> None:
        """Runs on the thread of the trials."""
        msg = GrammarVerdictMsg(number, verdict.error, verdict.num_bytes, verdict.is_lasting)
        self._post(msg)

    def remove(self, req: Req) -> None:
        """Forget a request that has ended, and its trial if no other request waits for it."""
        assert req.params.grammar is not None
        self._uids.remove(req.uid)
        number = self._number_of[req.params.grammar]
        pending = self._pending[number]
        del pending.reqs[req.uid]
        if not pending.reqs and not pending.compiled:
            self._remove_grammar(number)
            if self._trials is not None and pending.trial is not None:
                self._trials.cancel(pending.trial)

    def handle(self, msg: GrammarVerdictMsg | GrammarCompiledMsg) -> list[Req]:
        """Go on with a grammar. Returns its requests, if it is known now: compiled or refused."""
        if isinstance(msg, GrammarVerdictMsg):
            return self._handle_verdict(msg)
        return self._handle_compiled(msg)

    def _handle_verdict(self, msg: GrammarVerdictMsg) -> list[Req]:
        """Begin to compile what is accepted."""
        pending = self._pending.get(msg.number)
        if pending is None:  # all its requests were aborted
            return []
        if msg.error is None:
            pending.num_bytes = msg.num_bytes
            pending.num_left = self._num_matchers
            pending.compiled = [
                self._executor.submit(self._compile, msg.number, pending)
                for _ in range(self._num_matchers)
            ]
            return []
        if msg.is_lasting:
            self._known.add_refused(pending.grammar, msg.error)
        else:
            self._known.add_untried(pending.grammar, msg.error)
        return self._remove_grammar(msg.number)

    def _compile(self, number: int, pending: _Pending) -> LLMatcher:
        """Runs on threads of its own, without Python's lock."""
        try:
            return self._compiler.compile(pending.grammar)
        except BaseException as error:
            pending.failure = error
            raise
        finally:
            with self._lock:
                pending.num_left -= 1
                is_last = pending.num_left == 0
            if is_last and self._trials is not None:
                self._post(_end_of(number, pending.failure))

    def _handle_compiled(self, msg: GrammarCompiledMsg) -> list[Req]:
        """Keep what is compiled. A slower rank waits for its compiler, which finds the same.

        What rank 0 could not compile is remembered for now, since its trial has accepted it. The
        other ranks take its word, whatever they have found.

        Raises:
            EngineFailed: rank 0 has compiled what this rank cannot compile.
        """
        pending = self._pending[msg.number]
        if msg.error is not None:
            if msg.is_refused:
                self._known.add_refused(pending.grammar, msg.error, is_lasting=False)
            else:
                self._known.add_untried(pending.grammar, msg.error)
            return self._remove_grammar(msg.number)
        try:
            matchers = [future.result() for future in pending.compiled]
        except BaseException as error:
            if not _is_from_compiler(error):
                raise
            reason = f"a grammar that rank 0 has compiled cannot be compiled: {one_line(error)}"
            raise EngineFailed(reason) from error
        self._known.add(pending.grammar, matchers, pending.num_bytes)
        return self._remove_grammar(msg.number)

    def _remove_grammar(self, number: int) -> list[Req]:
        """Remove a grammar; returns the requests that wait for it."""
        pending = self._pending.pop(number)
        del self._number_of[pending.grammar]
        self._uids.difference_update(pending.reqs)
        return list(pending.reqs.values())

    def close(self) -> None:
        """End the trials. No message is posted afterwards that matters."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._trials is not None:
            self._trials.close()


def _end_of(number: int, failure: BaseException | None) -> GrammarCompiledMsg:
    """Rank 0's message about a grammar that has passed its trial.

    The compiler refuses a grammar by an `InvalidRequest`. Any other exception is a bug or a
    shortage.

    Args:
        failure: the exception of the compilation. If it is not from the compiler, all ranks go on:
            it is raised where the matchers are waited for.
    """
    if isinstance(failure, InvalidRequest):
        return GrammarCompiledMsg(number, str(failure))
    if failure is None or not _is_from_compiler(failure):
        return GrammarCompiledMsg(number)
    logger.error("a grammar that passed its trial cannot be compiled", exc_info=failure)
    reason = f"the grammar passed its trial and cannot be compiled: {one_line(failure)}"
    return GrammarCompiledMsg(number, f"{reason}; try again later", is_refused=False)


def _is_from_compiler(failure: BaseException) -> bool:
    return isinstance(failure, Exception) or is_panic(failure)
