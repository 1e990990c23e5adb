"""Turns sampled tokens into outputs (new tokens, a finish reason) and outputs into messages.

    sampled token ─ grammar ─ append ─ forced tokens ─ finish reason ─ message

A request's grammar may leave no choice about the next tokens. Such forced tokens are appended
without a step each; the next step computes them together. If a step in flight samples the first of
them already, its mask allows no other token, and what it samples is dropped.

Owns the messages that are not sent yet. It neither ends nor releases requests: `live_requests.py`
does.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from minisgl.core import NO_TOKEN, FinishReason, Req, ReqSlice, TokenLogprobs
from minisgl.engine import EngineLimits, SampledStep
from minisgl.errors import InvalidRequest, NoNumbers, RequestError
from minisgl.message import DetokenizeMsg, MatchState, ReplyError
from minisgl.scheduler.events import Events, FirstToken
from minisgl.scheduler.grammars.progress import GrammarProgress
from minisgl.scheduler.prefill_watch import PrefillWatch
from minisgl.scheduler.table import TableManager

_PROMPT_TAIL = 4  # tokens of a prompt that the detokenizer gets


class Output(msgspec.Struct, gc=False):
    """The output of one step for one request.

    Attributes:
        tokens: the sampled token, and those that are forced after it.
        finish: why the request ends, if it ends without an error.
        completes_match: whether it ends because its match is complete. Then all tokens are part of
            the answer.
        error: why the answer cannot go on.
    """

    tokens: list[int]
    finish: FinishReason | None = None
    completes_match: bool = False
    error: RequestError | None = None


class OutputProcessor:
    """Appends sampled tokens to their requests, and collects the messages to the detokenizer.

    The methods with `append` extend a request; those with `add` collect a message.

    Args:
        prefill_watch: rank 0's; the others have none.
    """

    def __init__(
        self,
        grammar_progress: GrammarProgress,
        table: TableManager,
        limits: EngineLimits,
        events: Events,
        prefill_watch: PrefillWatch | None,
    ) -> None:
        self._grammar_progress = grammar_progress
        self._table = table
        self._eos_ids = limits.eos_ids
        self._events = events
        self._prefill_watch = prefill_watch
        self._messages: list[DetokenizeMsg] = []

    @property
    def has_messages(self) -> bool:
        return bool(self._messages)

    def drain_messages(self) -> list[DetokenizeMsg]:
        """Remove and return all messages since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def append_sampled(
        self, slices: Sequence[ReqSlice], sampled: Sequence[int]
    ) -> list[Output | None]:
        """Append what launched slices have sampled to their requests, and what is forced after it.

        Returns:
            of each slice; None if its request has ended, or if its token is dropped because it was
            forced before.
        """
        states = self._grammar_progress.advance(_next_in_grammars(slices, sampled))
        return [
            self._append_token(req_slice, token, states)
            for req_slice, token in zip(slices, sampled, strict=True)
        ]

    def _append_token(
        self, req_slice: ReqSlice, token: int, states: dict[int, MatchState]
    ) -> Output | None:
        """Append the token that one slice has sampled, and what is forced after it.

        Args:
            states: has the match of its request, if that has advanced.
        """
        req = req_slice.req
        extends = _extends_answer(req_slice)
        if not extends and (req.finish is not None or req.max_length > req.num_prompt):
            return None
        if token == NO_TOKEN:
            return Output([], error=_why_none(states.get(req.uid)))
        if not extends:
            return Output([], "length")
        max_length = req.max_length
        req.append(token)
        if req.params.grammar is not None:
            return self._follow(req, token, states[req.uid])
        if req.params.ends_at(token, self._eos_ids):
            return Output([token], "stop")
        return Output([token], "length" if req.num_known == max_length else None)

    def _follow(self, req: Req, token: int, state: MatchState) -> Output:
        """Make the output of an answer whose match has advanced by a sampled token."""
        if state.error is not None:
            return Output([], error=_of_grammar(state.error))
        if not state.forced and self._is_stop(req, token, state):
            return Output([token], "stop")
        if state.forced:
            self._append_forced(req, state.forced)
        tokens = [token, *state.forced]
        if state.is_complete:
            return Output(tokens, "stop", completes_match=True)
        return Output(tokens, "length" if req.num_known == req.max_length else None)

    def _is_stop(self, req: Req, token: int, state: MatchState) -> bool:
        """Whether a token ends the answer and is no part of it."""
        if state.is_complete and token in self._eos_ids:
            return True
        return req.params.ends_at(token, self._eos_ids)

    def _append_forced(self, req: Req, tokens: list[int]) -> None:
        assert req.row is not None
        start = req.num_known
        req.append_forced(tokens)
        self._table.write_tokens(req.row, start, req.tokens[start : req.num_known])

    def keep_prompt_outputs(self, slices: Sequence[ReqSlice], sampled: SampledStep) -> None:
        """Store log probabilities and embeddings of prompts in their requests."""
        for index, logprobs in sampled.prompt_logprobs().items():
            req_slice = slices[index]
            req_slice.req.prompt_logprobs[req_slice.start :] = logprobs
        for index, embedding in sampled.embeddings().items():
            slices[index].req.embedding = embedding

    def add_output(self, req: Req, output: Output, logprobs: TokenLogprobs | None) -> None:
        """Add the messages of an output without an error.

        Args:
            logprobs: of the sampled token, which the output need not have.
        """
        entries = [logprobs] if logprobs is not None and output.tokens else []
        if output.completes_match:
            # Two messages: the last token of a "stop" is no part of the answer.
            self._add_message(req, output.tokens, None, entries)
            self._add_message(req, [], "stop", [])
        else:
            self._add_message(req, output.tokens, output.finish, entries)

    def add_error(self, req: Req, error: RequestError) -> None:
        """Add the message that a request ends without the rest of its answer."""
        self._add_message(req, [], None, [], ReplyError.of(error))

    def add_abort(self, req: Req) -> None:
        self._add_message(req, [], "abort", [])

    def add_refusal(self, uid: int, error: RequestError) -> None:
        """Add the message that a request is not accepted."""
        self._messages.append(DetokenizeMsg(uid, error=ReplyError.of(error)))

    def _add_message(
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
            num_prompt=0 if req.num_cached is None else req.num_prompt,
            num_cached=req.num_cached or 0,
            is_first=is_first,
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


def _next_in_grammars(slices: Sequence[ReqSlice], sampled: Sequence[int]) -> list[tuple[Req, int]]:
    """The answers that follow grammars, and the next token of each. Most steps have none."""
    tokens = []
    for req_slice, token in zip(slices, sampled, strict=True):
        req = req_slice.req
        if req.params.grammar is not None and _extends_answer(req_slice):
            tokens.append((req, token))
    return tokens


def _extends_answer(req_slice: ReqSlice) -> bool:
    """Whether the token that a slice has sampled becomes part of the answer.

    It does not if the request has ended, or wants no tokens, but outputs of its prompt alone. Nor
    does it if the next token was forced. The slice's mask allows that alone. None is sampled if the
    model's logits are not numbers, and the next plan writes the forced token.
    """
    req = req_slice.req
    wants_tokens = req.max_length > req.num_prompt
    return req.finish is None and wants_tokens and req_slice.end == req.num_known


def _why_none(state: MatchState | None) -> RequestError:
    """Why no token could be sampled: the match of the answer has failed, or the model."""
    if state is not None and state.error is not None:
        return _of_grammar(state.error)
    return NoNumbers()


def _of_grammar(error: str) -> InvalidRequest:
    return InvalidRequest(error, param="grammar")


def _prompt_logprobs(req: Req) -> list[tuple[int, TokenLogprobs | None]] | None:
    """The prompt's tokens with their log probabilities so far, if wanted; the first has none."""
    if req.params.prompt_logprobs is None:
        return None
    tokens = req.tokens[: req.num_prompt].tolist()
    return list(zip(tokens, [None, *req.prompt_logprobs], strict=False))
