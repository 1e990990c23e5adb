"""How far answers have come in their grammars: equal on all ranks, because rank 0's result counts.

    sampled token ─ accept ─ forced tokens ─ accept ─▶ MatchState ─ share ─▶ rank 0's MatchState

Every rank follows every match, because it needs masks for its part of the vocabulary. What a match
does to its answer must be equal on all ranks. By itself it need not be: answers share an automaton,
and the work of a new state is charged to the answer that needs it first, which depends on a rank's
threads. So rank 0's result counts. A rank with another result loses the match: its masks allow
everything from then on. Rank 0's own match still refuses what the grammar does not allow, and the
answer ends then.

Decides which forced tokens are appended. Knows nothing of steps and messages.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from minisgl.core import NO_TOKEN, Req
from minisgl.message import MatchState
from minisgl.scheduler.grammars.matchers import GrammarMatchers
from minisgl.scheduler.io import OtherRanks

# Fewer forced tokens are not worth a step of another kind. The decision depends on the answer
# alone, and not on what is in flight: with and without overlap the tokens are equal. On a CPU a
# slice of several tokens costs little more than one token; three tokens save a step at least, even
# if the first of them is in flight.
MIN_FORCED_ON_CPU = 3
# On a GPU a step with a slice of several tokens was launched eagerly when this was measured, at up
# to eight times the time of a replay (Qwen3-0.6B: 6.9 ms for an eager short prompt,
# docs/decisions/0013; 0.83 ms for a replayed decode, docs/performance.md). Such steps have captured
# graphs now (`GraphKind.WITH_PROMPTS`), so fewer may be worth it: that is not measured.
MIN_FORCED_ON_GPU = 8

logger = logging.getLogger(__name__)


class GrammarProgress:
    """Advances the matches of a step's answers by what was sampled, equally on all ranks.

    Args:
        eos_ids: of the model.
        other_ranks: if there are any.
    """

    def __init__(
        self,
        grammars: GrammarMatchers,
        eos_ids: frozenset[int],
        other_ranks: OtherRanks | None,
        *,
        for_gpu: bool,
    ) -> None:
        self._grammars = grammars
        self._eos_ids = eos_ids
        self._min_forced = MIN_FORCED_ON_GPU if for_gpu else MIN_FORCED_ON_CPU
        self._other_ranks = other_ranks

    def advance(self, sampled: Sequence[tuple[Req, int]]) -> dict[int, MatchState]:
        """Advance matches by sampled tokens, and by what is forced after them.

        Args:
            sampled: requests with a grammar, and tokens that are not appended yet, or `NO_TOKEN`.

        Returns:
            by uid, what each rank gets.
        """
        own = {req.uid: self._advance(req, token) for req, token in sampled}
        states = self._other_ranks.share(own) if own and self._other_ranks else own
        for uid, state in states.items():
            if state.error is not None:
                self._grammars.forget_grammar_of(uid)
            elif state != own[uid]:
                logger.warning("the match of request %d is lost: rank 0's stands elsewhere", uid)
                self._grammars.lose_match(uid)
        return states

    def _advance(self, req: Req, token: int) -> MatchState:
        """Advance one match, on this rank. Without a token it stays, but may have failed before."""
        if token == NO_TOKEN:
            return self._grammars.accept(req.uid, [])
        state = self._grammars.accept(req.uid, [token])
        if state.is_complete or state.error or req.params.ends_at(token, self._eos_ids):
            return state
        forced = self._forced_tokens(req)
        if not forced:
            return state
        state = self._grammars.accept(req.uid, forced)
        return MatchState(forced, state.is_complete, state.error)

    def _forced_tokens(self, req: Req) -> list[int]:
        """The next tokens of an answer if its grammar leaves no choice and they are enough.

        Tokens from one on that would end the answer are sampled as usual. So are all tokens of
        requests that want log probabilities, because sampling makes these.
        """
        if req.params.logprobs is not None:
            return []
        num_left = req.max_length - req.num_known - 1  # after the sampled token
        tokens = self._grammars.forced_tokens(req.uid)[:num_left]
        if len(tokens) < self._min_forced:
            return []
        ends = self._eos_ids.union(req.params.stop_token_ids)
        length = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        return tokens[:length] if length >= self._min_forced else []
