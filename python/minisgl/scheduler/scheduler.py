"""The step: admit, plan, launch, finish.

Owns the order of a step and the life of a request from its message to its release. Which prompts and decodes
run is the planners' affair, pages are the cache manager's, tensors the executor's.

A request ends (`stop`, `length`, `abort`) or is retracted at any moment; what it holds is released in one place,
`_release`, and only when no launched batch refers to it. Next to read: `prefill.py`, `decode.py`, `cache.py`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from minisgl.config import SchedulerConfig
from minisgl.core import BatchPlan, FinishReason, IntArray, Req, ReqSlice, TokenLogprobs
from minisgl.engine import EngineLimits, ForwardOutput, LaunchedStep, PreparedStep
from minisgl.errors import InvalidRequest, RequestError
from minisgl.kvcache import create_prefix_cache
from minisgl.message import (
    AbortBackendMsg,
    BackendMsg,
    DetokenizeMsg,
    EngineStats,
    ExitMsg,
    ReplyError,
    UserMsg,
    unpack_ids,
)
from minisgl.sampling_params import MAX_SEED
from minisgl.scheduler.admission import check_request
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.grammar import Grammars
from minisgl.scheduler.io import Inbox, Outbox
from minisgl.scheduler.prefill import PrefillManager
from minisgl.scheduler.table import TableManager

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """What runs a plan: the `Engine`."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def grammar_masks(self) -> IntArray:
        """Where the masks of a step are put before it is sampled."""

    def prepare(self, plan: BatchPlan) -> PreparedStep:
        """Do the host work that can be done before the step before is sampled."""

    def launch(self, prepared: PreparedStep) -> LaunchedStep:
        """Start computing logits, after the step before is sampled."""

    def sample(self, launched: LaunchedStep) -> ForwardOutput:
        """Start choosing tokens. The steps after this one find them in the token pool."""


@dataclass(slots=True)
class _Launched:
    """A batch that is being computed.

    Attributes:
        step: until its tokens are being chosen.
        await_masks: where a grammar has a say, until they are used.
        output: from when on its tokens are being chosen.
        tokens: from when on they are known, each with what its request's grammar says to it.
    """

    plan: BatchPlan
    step: LaunchedStep | None
    await_masks: Callable[[], None] | None = None
    output: ForwardOutput | None = None
    tokens: list[tuple[int, bool | InvalidRequest]] | None = None


class Scheduler:
    """Chooses what runs next and keeps at most one batch in flight between steps.

    With overlap, step n launches batch n and then finishes batch n-1 while the device computes n (NanoFlow, Zhu
    et al. 2024, arXiv:2408.12757). Without, it finishes the batch that it launched. The tokens are the same.
    """

    def __init__(
        self, config: SchedulerConfig, executor: Executor, inbox: Inbox, outbox: Outbox
    ) -> None:
        assert config.seed is not None, "ranks would draw different ones"
        limits = executor.limits
        self.is_running = True
        self.table = TableManager(limits.num_rows, limits.num_row_pages, limits.max_seq_len)
        prefix_cache = create_prefix_cache(config.cache, limits.page_size)
        self.cache = CacheManager(limits.num_pages, prefix_cache, self.table)
        self.prefill = PrefillManager(self.cache, self.table)
        self.decode = DecodeManager(self.cache)
        folder, for_gpu = Path(config.model or ""), config.device == "cuda"
        self.grammars = Grammars(
            folder, limits.vocab_size, limits.eos_ids, executor.grammar_masks, for_gpu=for_gpu
        )
        self._executor = executor
        self._limits = limits
        self._inbox = inbox
        self._outbox = outbox
        self._prefill_budget = config.max_prefill_length
        self._overlap = config.overlap
        self._seeds = random.Random(config.seed)
        self._live: dict[int, Req] = {}
        self._retiring: dict[
            int, Req
        ] = {}  # ended or retracted, but a launched batch refers to them
        self._in_flight: _Launched | None = None
        self._news: list[DetokenizeMsg] = []
        self._num_retractions = 0
        self._reported = self._stats()

    @property
    def is_idle(self) -> bool:
        """Whether nothing can happen before the next message."""
        return not (self._live or self._in_flight)

    def run(self) -> None:
        """Step until an ExitMsg comes."""
        while self.is_running:
            self.step()

    def step(self) -> None:
        """Launch batch n, then finish batch n-1 (with overlap) or n (without).

        A grammar has to know the tokens of n-1 before those of n are chosen. Then those are chosen at the last moment,
        before n+1 is launched: masks are made while n-1 is finished and n+1 prepared, and the device computes logits.
        """
        self._take_in(self._inbox.receive(block=self.is_idle))
        plan = self._plan() if self.is_running else None  # at the end nothing is left half done
        prepared = self._executor.prepare(plan) if plan else None
        self._sample(self._in_flight)
        launched = self._launch(plan, prepared) if plan and prepared else None
        if launched and self.grammars.guides(launched.plan.sampling_slices):
            self._read_tokens()
            if launched.step and launched.step.has_logits:
                launched.await_masks = self.grammars.start_masks(launched.plan.sampling_slices)
        else:
            self._sample(launched)
        self._finish_in_flight()
        self._in_flight = launched
        if not self._overlap:
            self._finish_in_flight()
        self._report()

    def _report(self) -> None:
        """Send the news of a step, and how it has left the scheduler if that is not what was said last."""
        stats = self._stats()
        has_changed = stats != self._reported
        if self._news or has_changed:
            self._outbox.send(self._news, stats if has_changed else None)
            self._news, self._reported = [], stats

    def _stats(self) -> EngineStats:
        num_pages, num_half = self.cache.num_pages, self.prefill.half_computed is not None
        return EngineStats(
            num_running=len(self.decode) + num_half,
            num_waiting=len(self.prefill) - num_half,
            num_pages_used=num_pages - self.cache.num_available,
            num_pages=num_pages,
            num_retractions=self._num_retractions,
        )

    def _take_in(self, msgs: Sequence[BackendMsg]) -> None:
        for msg in msgs:
            match msg:
                case UserMsg():
                    self._accept(msg)
                case AbortBackendMsg(uid):
                    if uid in self._live:
                        self._tell(self._live[uid], finish="abort")
                        self._end(self._live[uid], "abort")
                case ExitMsg():
                    self.is_running = False

    def _accept(self, msg: UserMsg) -> None:
        """Queue a request, or answer at once that it cannot be served."""
        assert msg.uid not in self._live
        prompt, params = unpack_ids(msg.input_ids), msg.sampling
        drawn = self._seeds.randint(0, MAX_SEED)  # drawn for every request, so that all ranks agree
        try:
            max_length = check_request(prompt, params, self._limits)
            if params.grammar:
                self.grammars.open(msg.uid, params.grammar)
        except RequestError as error:
            self._news.append(
                DetokenizeMsg(msg.uid, error=ReplyError.of(error), num_prompt=len(prompt))
            )
            return
        req = Req(
            msg.uid, prompt, params, max_length, drawn if params.seed is None else params.seed
        )
        self._live[req.uid] = req
        self.prefill.add(req)

    def _plan(self) -> BatchPlan | None:
        """All decodes that have pages, and beside them prompts up to the prefill budget; None if there is nothing."""
        decodes, starved = self.decode.plan()
        if starved and not self._retiring:  # else pages are on their way back already
            victim = (
                self.prefill.retract(self.decode.least_urgent.params.priority)
                or self.decode.retract()
            )
            logger.debug("request %d is retracted at %d tokens", victim.uid, victim.num_known)
            self._num_retractions += 1
            self._retire(victim)
            decodes = [part for part in decodes if part.req is not victim]
        slices = decodes + self.prefill.plan(self._prefill_budget, num_running=len(self.decode))
        reqs = [part.req for part in slices]
        return (
            BatchPlan(slices, self.table.take_writes(), self.cache.num_shared_tokens(reqs))
            if reqs
            else None
        )

    def _launch(self, plan: BatchPlan, prepared: PreparedStep) -> _Launched:
        launched = _Launched(plan, self._executor.launch(prepared))
        for part in plan.slices:
            self._advance(part)
        return launched

    def _sample(self, batch: _Launched | None) -> None:
        """Start choosing the tokens of a batch, if there is one and they are not being chosen."""
        if batch and batch.step:
            if batch.await_masks:
                batch.await_masks()
            batch.output = self._executor.sample(batch.step)
            batch.step = batch.await_masks = None

    def _advance(self, part: ReqSlice) -> None:
        """Account for a launched slice. A prompt is shared now, before the next plan is made."""
        req = part.req
        req.num_in_flight += 1
        req.num_computed = part.end
        if part.samples:
            req.num_tokens += 1
            if req not in self.decode:
                self.cache.publish(req)
                self.decode.add(req)

    def _read_tokens(self) -> None:
        """Wait for the tokens of the batch in flight, if there is one, and let grammars go on by them; once."""
        batch, accept = self._in_flight, self.grammars.accept
        self._sample(batch)
        if batch and batch.output and batch.tokens is None:
            pairs = zip(
                [part.req for part in batch.plan.sampling_slices], batch.output.wait(), strict=True
            )
            batch.tokens = [
                (token, req.finish is None and accept(req.uid, token)) for req, [token] in pairs
            ]

    def _finish_in_flight(self) -> None:
        """Take the tokens of the batch in flight, if there is one; release what nobody needs any more."""
        self._read_tokens()
        batch, self._in_flight = self._in_flight, None
        if batch is None:
            return
        assert batch.output and batch.tokens is not None
        logprobs = batch.output.logprobs()
        for index, told in batch.output.prompt_logprobs().items():
            part = batch.plan.slices[index]
            part.req.prompt_logprobs[part.start :] = told
        for index, vector in batch.output.embeddings().items():
            batch.plan.slices[index].req.embedding = vector
        for index, (part, (token, match)) in enumerate(
            zip(batch.plan.sampling_slices, batch.tokens, strict=True)
        ):
            if part.req.finish is None:
                self._take_token(part.req, token, match, logprobs.get(index))
        for part in batch.plan.slices:
            part.req.num_in_flight -= 1
            if part.req.uid in self._retiring and part.req.num_in_flight == 0:
                self._release(self._retiring.pop(part.req.uid))

    def _take_token(
        self, req: Req, token: int, match: bool | InvalidRequest, logprobs: TokenLogprobs | None
    ) -> None:
        if req.max_length == req.num_prompt:
            self._tell(req, finish="length")
            self._end(req, "length")
            return
        req.append(token)
        finish: FinishReason | None = None
        if isinstance(match, InvalidRequest):
            self._tell(req, error=ReplyError.of(match))
            self._end(req, "abort")
            return
        may_go_on = req.params.ignore_eos and not match
        if token in req.params.stop_token_ids or (token in self._limits.eos_ids and not may_go_on):
            finish = "stop"
        elif req.num_known == req.max_length and not match:
            finish = "length"
        self._tell(req, tokens=[token], finish=finish, logprobs=[logprobs] if logprobs else [])
        if match and not finish:  # the token belongs to the answer
            finish = "stop"
            self._tell(req, finish=finish)
        if finish:
            self._end(req, finish)

    def _tell(
        self,
        req: Req,
        *,
        tokens: Sequence[int] = (),
        finish: FinishReason | None = None,
        error: ReplyError | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        is_first = req.num_output == len(tokens)
        self._news.append(
            DetokenizeMsg(
                req.uid,
                list(tokens),
                list(logprobs),
                req.params if is_first and req.params.shapes_text else None,
                finish=finish,
                error=error,
                num_prompt=req.num_prompt,
                num_cached=req.num_cached or 0,
                prompt_logprobs=_of_prompt(req)
                if is_first and req.params.prompt_logprobs is not None
                else None,
                embedding=req.embedding if is_first else None,
            )
        )

    def _end(self, req: Req, finish: FinishReason) -> None:
        """A request has its final reply. Nothing plans it any more."""
        req.finish = finish
        del self._live[req.uid]
        self.grammars.close(req.uid)
        if req in self.decode:
            self.decode.remove(req)
        else:
            self.prefill.remove(req)
        self._retire(req)

    def _retire(self, req: Req) -> None:
        if req.num_in_flight:
            self._retiring[req.uid] = req
        else:
            self._release(req)

    def _release(self, req: Req) -> None:
        """The one place where rows and pages come back. A retracted request waits for its next turn."""
        if req.row is not None:
            self.cache.release(req)
        if req.finish is None:
            self.prefill.put_back(req)

    def check_integrity(self) -> None:
        """Assert that every page and every row has exactly one owner. For tests; walks everything."""
        half_computed = [self.prefill.half_computed] if self.prefill.half_computed else []
        admitted = [*half_computed, *self.decode.running, *self._retiring.values()]
        self.cache.check_integrity(admitted)
        self.table.check_integrity([req.row for req in admitted if req.row is not None])


def _of_prompt(req: Req) -> list[tuple[int, TokenLogprobs | None]]:
    """Its tokens with their log probabilities, as far as they have come; nothing predicts the first."""
    return list(
        zip(req.tokens[: req.num_prompt].tolist(), [None, *req.prompt_logprobs], strict=False)
    )
