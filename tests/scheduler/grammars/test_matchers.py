"""Masks that threads make: nothing else happens on these threads, and no step starts one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLExecutor

from minisgl.core import Grammar, Req, ReqSlice, SamplingParams
from minisgl.grammar import GrammarCompiler, GrammarModel
from minisgl.scheduler.grammars import mask_threads, matchers
from minisgl.scheduler.grammars.budget import GrammarBudget
from minisgl.scheduler.grammars.matchers import GrammarMatchers
from tests.checkpoints import EOS_ID, VOCAB_SIZE
from tests.utils.test_threads import no_thread

UID = 7
NUM_WORDS = -(-VOCAB_SIZE // 32)
LETTERS = Grammar("regex", "[a-c]{9}")
PROMPT = np.ones(3, dtype=np.int32)
REQ = Req(UID, PROMPT, SamplingParams(grammar=LETTERS), 100, seed=0)
SLICES = [ReqSlice(REQ, 0, len(PROMPT), samples=True)]


@pytest.fixture(scope="module")
def compiler(checkpoint: Callable[[str], Path]) -> GrammarCompiler:
    return GrammarCompiler(GrammarModel(str(checkpoint("qwen2")), VOCAB_SIZE, [EOS_ID]))


def open_one(compiler: GrammarCompiler) -> tuple[GrammarMatchers, np.ndarray[Any, Any]]:
    """Matchers as for a GPU with one request, and where its mask goes."""
    masks_XW = np.zeros((1, NUM_WORDS), dtype=np.int32)
    opened = GrammarMatchers(masks_XW, lambda _: None, for_gpu=True)
    opened.known.add(LETTERS, [compiler.compile(LETTERS)], 0)
    opened.open(UID, LETTERS)
    return opened, masks_XW


def is_restricted(masks_XW: np.ndarray[Any, Any]) -> bool:
    bits = np.unpackbits(masks_XW.view(np.uint8), count=VOCAB_SIZE, bitorder="little")
    return 0 < bits.sum() < VOCAB_SIZE


def test_a_step_starts_no_thread(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, masks_XW = open_one(compiler)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    opened.start_masks(SLICES).wait()
    assert is_restricted(masks_XW)
    opened.known.freed_bytes = 2**30
    opened.stay_in_budget()


def test_masks_do_not_wait_while_memory_is_returned(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, masks_XW = open_one(compiler)
    may_end = threading.Event()
    monkeypatch.setattr(matchers, "return_free_memory", may_end.wait)
    opened.known.freed_bytes = 2**30
    opened.stay_in_budget()
    starting = threading.Thread(target=lambda: opened.start_masks(SLICES).wait(), daemon=True)
    starting.start()
    starting.join(timeout=10)
    has_ended = not starting.is_alive()
    may_end.set()
    assert has_ended
    assert is_restricted(masks_XW)


@pytest.mark.parametrize("is_watched", [True, False])
def test_what_masks_take_is_counted_by_the_thread_that_steps(
    is_watched: bool, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, masks_XW = open_one(compiler)
    threads = opened._mask_threads
    assert threads is not None
    threads._num_watched_steps = int(is_watched)
    counted_by: list[int] = []

    def count(*_: object) -> int:
        counted_by.append(threading.get_ident())
        return 0

    touched = iter(range(0, 2**30, 2**22))
    monkeypatch.setattr(matchers, "bytes_touched", lambda: next(touched))
    monkeypatch.setattr(mask_threads, "process_bytes_touched", lambda: 2**40)
    monkeypatch.setattr(mask_threads, "bytes_touched_by", count)
    monkeypatch.setattr(GrammarBudget, "grow", count)
    opened.start_masks(SLICES).wait()
    assert is_restricted(masks_XW)
    assert set(counted_by) == {threading.get_ident()}


def test_a_thread_that_began_beside_those_of_masks_may_end(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    other = threading.Thread(target=may_end.wait)

    def start_both(num_threads: int | None) -> LLExecutor:
        other.start()
        return LLExecutor(num_threads)

    monkeypatch.setattr(mask_threads, "LLExecutor", start_both)
    opened, masks_XW = open_one(compiler)
    may_end.set()
    other.join()
    monkeypatch.setattr(mask_threads, "_UNWATCHED_BYTES", 0)
    opened.start_masks(SLICES).wait()
    assert is_restricted(masks_XW)
