"""What steps sample becomes outputs: tokens of an answer, its end, and the messages that say so.

    sampled token ─ append ─ grammar ─ forced tokens ─ finish reason ─ message

A request's grammar may leave no choice about the next tokens. Such forced tokens are appended
without a step each; the next step computes them together. If a step in flight samples the first of
them already, its mask allows no other token, and what it samples is taken back.

Owns the messages that are not sent yet. Knows nothing of steps; the scheduler releases what ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.core import FinishReason, Req, ReqSlice, TokenLogprobs
from minisgl.engine import EngineLimits
from minisgl.errors import InvalidRequest, RequestError
from minisgl.message import DetokenizeMsg, ReplyError
from minisgl.scheduler.events import Events, FirstToken
from minisgl.scheduler.grammar import IN_PROGRESS, GrammarMatchers, MatchState
from minisgl.scheduler.table import TableManager

# Fewer forced tokens are not worth a step of another kind. The decision depends on the answer
# alone, and not on what is in flight: with and without overlap the tokens are the same. On a CPU a
# slice of several tokens costs little more than one token; three tokens save a step at least, even
# if the first of them is in flight.
MIN_FORCED_ON_CPU = 3
# On a GPU a step of decodes replays a captured graph, while one with a slice of several tokens and
# other requests is launched eagerly, at up to eight times the time of a replay
# (docs/performance.md: 6.9 ms for an eager short prompt of Qwen3-0.6B, 0.83 ms for a replayed
# decode).
MIN_FORCED_ON_GPU = 8


@dataclass(slots=True)
class Output:
    """What one step gives one request.

    Attributes:
        tokens: the sampled token, and those that are forced behind it.
        finish: why the answer ends with these tokens.
        is_match: whether its match is complete: the answer ends behind the tokens and has all of
            them.
        error: why the answer cannot go on.
    """

    tokens: list[int]
    finish: FinishReason | None = None
    is_match: bool = False
    error: InvalidRequest | None = None

    @property
    def end(self) -> FinishReason | None:
        """Why the request ends, if it does."""
        if self.error:
            return "abort"
        return "stop" if self.is_match else self.finish


class OutputProcessor:
    """Appends what steps sample to its requests, and collects their outputs.

    Args:
        min_forced: fewer tokens are not fast-forwarded.
    """

    def __init__(
        self,
        grammars: GrammarMatchers,
        table: TableManager,
        limits: EngineLimits,
        events: Events,
        min_forced: int,
    ) -> None:
        self._grammars = grammars
        self._table = table
        self._eos_ids = limits.eos_ids
        self._events = events
        self._min_forced = min_forced
        self._messages: list[DetokenizeMsg] = []

    @property
    def has_messages(self) -> bool:
        return bool(self._messages)

    def take_messages(self) -> list[DetokenizeMsg]:
        """All messages since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def take_sampled(self, chunk: ReqSlice, sampled: list[int]) -> Output | None:
        """Append what a launched slice has sampled to its request, and what is forced behind it.

        Returns:
            None if the request has ended, or the token is taken back.
        """
        req = chunk.req
        if req.finish is not None:
            return None
        if req.max_length == req.num_prompt:
            return Output([], finish="length")
        if chunk.end < req.num_known:
            assert sampled == [req.tokens[chunk.end]], "its mask allows the forced token alone"
            return None
        assert chunk.end == req.num_known
        [token] = sampled
        req.append(token)
        match = IN_PROGRESS
        if req.params.grammar is not None:
            match = self._grammars.accept(req.uid, sampled)
        if match.error:
            return Output([], error=match.error)
        if self._is_stop(req, token, match):
            return Output(sampled, finish="stop")
        if req.params.grammar is not None and not match.is_complete:
            forced = self._forced_tokens(req)
            if forced:
                match = self._append_forced(req, forced)
                sampled = sampled + forced
        return self._output(req, sampled, match)

    def _is_stop(self, req: Req, token: int, match: MatchState) -> bool:
        """Whether a token ends the answer and is no part of it."""
        if token in req.params.stop_token_ids:
            return True
        return token in self._eos_ids and (match.is_complete or not req.params.ignore_eos)

    def _output(self, req: Req, tokens: list[int], match: MatchState) -> Output:
        if match.error:
            return Output([], error=match.error)
        if match.is_complete:
            return Output(tokens, is_match=True)
        if req.num_known == req.max_length:
            return Output(tokens, finish="length")
        return Output(tokens)

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
        self._add(req, output.tokens, output.finish, logprobs=[logprobs] if logprobs else [])
        if output.is_match:  # in a message of its own: the last token is a part of the answer
            self._add(req, [], "stop")

    def add_abort(self, req: Req) -> None:
        self._add(req, [], "abort")

    def add_error(self, req: Req, error: RequestError) -> None:
        self._add(req, [], error=ReplyError.of(error))

    def add_refusal(self, uid: int, num_prompt: int, error: RequestError) -> None:
        """Collect the message that a request is not accepted."""
        message = DetokenizeMsg(uid, error=ReplyError.of(error), num_prompt=num_prompt)
        self._messages.append(message)

    def _add(
        self,
        req: Req,
        tokens: list[int],
        finish: FinishReason | None = None,
        *,
        error: ReplyError | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        is_first = req.num_output == len(tokens)
        message = DetokenizeMsg(
            req.uid,
            tokens,
            list(logprobs),
            finish=finish,
            error=error,
            num_prompt=req.num_prompt,
            num_cached=req.num_cached or 0,
            **(_first_message_fields(req) if is_first else {}),
        )
        self._messages.append(message)
        if is_first and tokens and self._events.first_token:
            self._events.first_token.emit(FirstToken(req.uid))


def _first_message_fields(req: Req) -> dict[str, Any]:
    """What the first message of a request says besides its tokens."""
    fields: dict[str, Any] = {"embedding": req.embedding}
    if req.params.shapes_text:
        fields["params"] = req.params
    if req.params.prompt_logprobs is not None:
        fields["prompt_logprobs"] = _prompt_logprobs(req)
    return fields


def _prompt_logprobs(req: Req) -> list[tuple[int, TokenLogprobs | None]]:
    """The prompt's tokens with their log probabilities so far; the first token has none."""
    tokens = req.tokens[: req.num_prompt].tolist()
    return list(zip(tokens, [None, *req.prompt_logprobs], strict=False))
