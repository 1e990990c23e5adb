"""What a match does to its answer is what rank 0 has found, whatever this rank finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from minisgl.core import Grammar, Req, ReqSlice, SamplingParams
from minisgl.grammar import GrammarCompiler, GrammarModel
from minisgl.message import MatchState, StepDigestMsg
from minisgl.scheduler.grammars.matchers import IN_PROGRESS, GrammarMatchers
from minisgl.scheduler.grammars.progress import GrammarProgress
from tests.checkpoints import EOS_ID, VOCAB_SIZE

UID = 7
NUM_WORDS = -(-VOCAB_SIZE // 32)
LETTERS = Grammar("regex", "[a-c]{9}")
TEXT = Grammar("regex", "[a-c]the quick brown fox jumps")
FAILED = MatchState(error="the grammar is refused: too many states")


class Leader:
    """The other ranks of a follower: what rank 0 has found, or what this rank has."""

    def __init__(self) -> None:
        self.state: MatchState | None = None

    def compare(self, digest: StepDigestMsg) -> None:
        raise AssertionError("no step is planned here")

    def share(self, states: dict[int, MatchState]) -> dict[int, MatchState]:
        return states if self.state is None else {UID: self.state}


class Follower:
    """One request of a rank, with its grammar."""

    def __init__(self, compiler: GrammarCompiler, grammar: Grammar) -> None:
        self.compiler = compiler
        self.leader = Leader()
        self.masks_XW = np.zeros((1, NUM_WORDS), dtype=np.int32)
        self.matchers = GrammarMatchers(self.masks_XW, None, for_gpu=False)
        self.matchers.known.add(grammar, [compiler.compile(grammar)], 0)
        self.matchers.open(UID, grammar)
        prompt = np.ones(3, dtype=np.int32)
        self.req = Req(UID, prompt, SamplingParams(grammar=grammar), 100, seed=0)
        self._progress = GrammarProgress(
            self.matchers, frozenset({EOS_ID}), self.leader, for_gpu=False
        )

    def sample(self, text: str) -> MatchState:
        [token] = self.compiler.tokenizer.tokenize_str(text)
        return self._progress.advance([(self.req, token)])[UID]

    def mask(self) -> list[int]:
        """Make a mask, and return the tokens that it allows."""
        end = self.req.num_known
        assert self.matchers.start_masks([ReqSlice(self.req, 0, end, samples=True)]) is None
        bits = np.unpackbits(self.masks_XW.view(np.uint8), count=VOCAB_SIZE, bitorder="little")
        return [int(token) for token in np.flatnonzero(bits)]


@pytest.fixture(scope="module")
def compiler(checkpoint: Callable[[str], Path]) -> GrammarCompiler:
    return GrammarCompiler(GrammarModel(str(checkpoint("qwen2")), VOCAB_SIZE, [EOS_ID]))


def test_a_rank_that_finds_the_same_goes_on(compiler: GrammarCompiler) -> None:
    follower = Follower(compiler, LETTERS)
    follower.leader.state = IN_PROGRESS
    assert follower.sample("a") == IN_PROGRESS
    assert 0 < len(follower.mask()) < VOCAB_SIZE


def test_forced_tokens_are_found_by_all_and_none_is_lost(compiler: GrammarCompiler) -> None:
    follower = Follower(compiler, TEXT)
    state = follower.sample("a")
    assert compiler.tokenizer.decode_str(state.forced) == "the quick brown fox jumps"
    assert state.is_complete


def test_a_match_that_fails_on_rank_0_fails_here(compiler: GrammarCompiler) -> None:
    follower = Follower(compiler, LETTERS)
    follower.leader.state = FAILED
    assert follower.sample("a") == FAILED
    assert LETTERS not in follower.matchers.known


def test_a_match_that_fails_here_alone_goes_on_without_a_mask(compiler: GrammarCompiler) -> None:
    """Rank 0 still refuses what its match does not allow."""
    follower = Follower(compiler, LETTERS)
    follower.leader.state = IN_PROGRESS
    assert follower.sample("x") == IN_PROGRESS
    assert LETTERS in follower.matchers.known
    assert follower.mask() == list(range(VOCAB_SIZE))
    assert follower.sample("a") == IN_PROGRESS
    assert follower.mask() == list(range(VOCAB_SIZE))

    follower.leader.state = FAILED
    assert follower.sample("a") == FAILED
    follower.matchers.close(UID)


def test_a_token_that_another_rank_did_not_mask_is_refused_without_being_named(
    compiler: GrammarCompiler,
) -> None:
    state = Follower(compiler, LETTERS).sample("x")
    assert state.error == "the grammar is refused: a limit was met while it was followed"


def test_other_forced_tokens_than_rank_0s_are_not_appended(compiler: GrammarCompiler) -> None:
    follower = Follower(compiler, TEXT)
    follower.leader.state = IN_PROGRESS
    assert follower.sample("a") == IN_PROGRESS
    assert follower.mask() == list(range(VOCAB_SIZE))
