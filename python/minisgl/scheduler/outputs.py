"""What steps sample becomes outputs: tokens of an answer, its finish reason, and messages of both.

    sampled token ─ append ─ grammar ─ forced tokens ─ finish reason ─ message

A request's grammar may leave no choice about the next tokens. Such forced tokens are appended
without a step each; the next step computes them together. If a step in flight samples the first of
them already, its mask allows no other token, and what it samples is dropped.

Owns the messages that are not sent yet. Knows nothing of steps; the scheduler releases what ends.
"""

from __future__ import annotations

import msgspec

from minisgl.core import FinishReason, Req, ReqSlice, TokenLogprobs
from minisgl.engine import EngineLimits
from minisgl.errors import InvalidRequest, RequestError
from minisgl.message import DetokenizeMsg, ReplyError
from minisgl.scheduler.events import Events, FirstToken
from minisgl.scheduler.grammar import GrammarMatchers, MatchState
from minisgl.scheduler.prefill_watch import PrefillWatch
from minisgl.scheduler.table import TableManager

# Fewer forced tokens are not worth a step of another kind. The decision depends on the answer
# alone, and not on what is in flight: with and without overlap the tokens are equal. On a CPU a
# slice of several tokens costs little more than one token; three tokens save a step at least, even
# if the first of them is in flight.
MIN_FORCED_ON_CPU = 3
# On a GPU a step of decodes replays a captured graph, while one with a slice of several tokens and
# other requests is launched eagerly, at up to eight times the time of a replay
# (Qwen3-0.6B: 6.9 ms for an eager short prompt, docs/decisions/0013; 0.83 ms for a replayed decode,
# docs/performance.md).
MIN_FORCED_ON_GPU = 8
_PROMPT_TAIL = 4  # tokens of a prompt that the detokenizer gets


class Output(msgspec.Struct, gc=False):
    """What one step gives one request.

    Attributes:
        tokens: the sampled token, and those that are forced after it.
        finish: why the request ends, if it does.
        is_match: whether it ends because its match is complete: all tokens are part of the answer.
        error: why the answer cannot go on.
    """

    tokens: list[int]
    finish: FinishReason | None = None
    is_match: bool = False
    error: InvalidRequest | None = None


class OutputProcessor:
    """Appends what steps sample to its requests, and collects their outputs.

    Args:
        min_forced: fewer tokens are not fast-forwarded.
        prefill_watch: rank 0's; the others have none.
    """

    def __init__(
        self,
        grammars: GrammarMatchers,
        table: TableManager,
        limits: EngineLimits,
        events: Events,
        min_forced: int,
        prefill_watch: PrefillWatch | None,
    ) -> None:
        self._grammars = grammars
        self._table = table
        self._eos_ids = limits.eos_ids
        self._events = events
        self._min_forced = min_forced
        self._prefill_watch = prefill_watch
        self._messages: list[DetokenizeMsg] = []

    @property
    def has_messages(self) -> bool:
        return bool(self._messages)

    def drain_messages(self) -> list[DetokenizeMsg]:
        """Remove and return all messages since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def append_sampled(self, req_slice: ReqSlice, sampled: list[int]) -> Output | None:
        """Append what a launched slice has sampled to its request, and what is forced after it.

        Returns:
            None if the request has ended, or if the token is dropped because it was forced before.
        """
        req = req_slice.req
        if req.finish is not None:
            return None
        max_length = req.max_length
        if max_length == req.num_prompt:  # max_tokens is 0: only the prompt's outputs are wanted
            return Output([], "length")
        if req_slice.end < req.num_known:
            assert sampled == [req.tokens[req_slice.end]], "its mask allows the forced token alone"
            return None
        assert req_slice.end == req.num_known
        [token] = sampled
        req.append(token)
        params = req.params
        if params.grammar is not None:
            return self._advance_match(req, sampled)
        if token in params.stop_token_ids or (token in self._eos_ids and not params.ignore_eos):
            return Output(sampled, "stop")
        return Output(sampled, "length" if req.num_known == max_length else None)

    def _advance_match(self, req: Req, sampled: list[int]) -> Output:
        """Advance a request's match by a sampled token, and by what is forced after it."""
        [token] = sampled
        match = self._grammars.accept(req.uid, sampled)
        if match.error:
            return Output([], "abort", error=match.error)
        if self._is_stop(req, token, match):
            return Output(sampled, "stop")
        if not match.is_complete:
            forced = self._forced_tokens(req)
            if forced:
                match = self._append_forced(req, forced)
                sampled = sampled + forced
        if match.error:
            return Output([], "abort", error=match.error)
        if match.is_complete:
            return Output(sampled, "stop", is_match=True)
        return Output(sampled, "length" if req.num_known == req.max_length else None)

    def _is_stop(self, req: Req, token: int, match: MatchState) -> bool:
        """Whether a token ends the answer and is no part of it."""
        if token in req.params.stop_token_ids:
            return True
        return token in self._eos_ids and (match.is_complete or not req.params.ignore_eos)

    def _forced_tokens(self, req: Req) -> list[int]:
        """The next tokens of an answer if its grammar leaves no choice and they are enough.

        Tokens from one on that would end the answer are sampled as usual, and so are all tokens of
        requests that want log probabilities, which are made by sampling.
        """
        if req.params.logprobs is not None:
            return []
        tokens = self._grammars.forced_tokens(req.uid)[: req.max_length - req.num_known]
        if len(tokens) < self._min_forced:
            return []
        ends = self._eos_ids.union(req.params.stop_token_ids)
        length = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        return tokens[:length] if length >= self._min_forced else []

    def _append_forced(self, req: Req, tokens: list[int]) -> MatchState:
        assert req.row is not None
        start = req.num_known
        req.append_forced(tokens)
        self._table.append_tokens(req.row, start, req.tokens[start : req.num_known])
        return self._grammars.accept(req.uid, tokens)

    def add(self, req: Req, output: Output, logprobs: TokenLogprobs | None) -> None:
        """Collect the messages of an output."""
        if output.error:
            self.add_error(req, output.error)
            return
        entries = [] if logprobs is None else [logprobs]
        if output.is_match:  # two messages: the last token of a "stop" is no part of the answer
            self._add(req, output.tokens, None, entries)
            self._add(req, [], "stop", [])
        else:
            self._add(req, output.tokens, output.finish, entries)

    def add_error(self, req: Req, error: RequestError) -> None:
        """Collect the message that a request ends without the rest of its answer."""
        self._add(req, [], None, [], ReplyError.of(error))

    def add_abort(self, req: Req) -> None:
        self._add(req, [], "abort", [])

    def add_refusal(self, uid: int, num_prompt: int, error: RequestError) -> None:
        """Collect the message that a request is not accepted."""
        message = DetokenizeMsg(uid, error=ReplyError.of(error), num_prompt=num_prompt)
        self._messages.append(message)

    def _add(
        self,
        req: Req,
        tokens: list[int],
        finish: FinishReason | None,
        logprobs: list[TokenLogprobs],
        error: ReplyError | None = None,
    ) -> None:
        is_first = req.num_known == req.num_prompt + len(tokens)
        message = DetokenizeMsg(
            req.uid,
            tokens,
            logprobs,
            finish=finish,
            error=error,
            num_prompt=req.num_prompt,
            num_cached=req.num_cached or 0,
            goes_on=not is_first,
        )
        if is_first:
            message = self._as_first(req, message)
        self._messages.append(message)
        if is_first and tokens and self._events.first_token:
            self._events.first_token.emit(FirstToken(req.uid))

    def _as_first(self, req: Req, message: DetokenizeMsg) -> DetokenizeMsg:
        """A message with what only the first one of a request says."""
        watch = self._prefill_watch
        return msgspec.structs.replace(
            message,
            params=req.params if req.params.shapes_text else None,
            prompt_logprobs=_prompt_logprobs(req),
            embedding=req.embedding,
            prompt_tail=req.tokens[max(0, req.num_prompt - _PROMPT_TAIL) : req.num_prompt].tolist(),
            prefill_s=watch.seconds(req.uid) if watch else None,
        )


def _prompt_logprobs(req: Req) -> list[tuple[int, TokenLogprobs | None]] | None:
    """The prompt's tokens with their log probabilities so far, if wanted; the first has none."""
    if req.params.prompt_logprobs is None:
        return None
    tokens = req.tokens[: req.num_prompt].tolist()
    return list(zip(tokens, [None, *req.prompt_logprobs], strict=False))
