"""The step: receive, plan, launch, finish.

With overlap, a step is launched before the previous one is finished, so that the device does not
wait for the host.

Owns the order of these phases, and the life of a request from its message to its release. Other
modules make the decisions: `prefill.py` and `decode.py` choose what is computed, `cache.py` gives
pages, `outputs.py` turns sampled tokens into outputs. The executor has the tensors.

A request ends (`stop`, `length`, `abort`) or is retracted at any moment. Its row and pages are
released in one place, `_release`, and only when no launched step refers to it.

If the device's memory is full when a step is prepared or launched, its plan is undone (`_undo`),
one request of it ends, and the others are planned again. Next to read: `prefill.py`, `decode.py`,
`cache.py`.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from minisgl.config import SchedulerConfig
from minisgl.core import BatchPlan, FinishReason, IntArray, PromptWaves, Req, ReqSlice
from minisgl.engine import EngineLimits, ForwardOutput, LaunchedStep, PreparedStep
from minisgl.errors import InvalidRequest, OutOfMemory, RequestError, StepOutOfMemory
from minisgl.grammar import GrammarCompiler, GrammarTrials
from minisgl.kvcache import create_prefix_cache
from minisgl.message import (
    AbortBackendMsg,
    BackendMsg,
    EngineStats,
    ExitMsg,
    FlushCacheMsg,
    ForgetGrammarMsg,
    GrammarCompiledMsg,
    GrammarVerdictMsg,
    NewDetokenizerMsg,
    StepCostsMsg,
    UserMsg,
    unpack_ids,
)
from minisgl.sampling_params import MAX_SEED
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.decode import DecodeManager, RunningPlan
from minisgl.scheduler.events import (
    ChunkLaunched,
    EventCounts,
    Events,
    RequestFinished,
    RequestQueued,
    RequestRetracted,
    StepFinished,
    StepLaunched,
    StepPlanned,
    log_events,
)
from minisgl.scheduler.grammar import GrammarMatchers, PendingMasks
from minisgl.scheduler.io import Inbox, Outbox, Peers
from minisgl.scheduler.matching import Matching
from minisgl.scheduler.outputs import Output, OutputProcessor
from minisgl.scheduler.pending_grammars import create_pending_grammars
from minisgl.scheduler.prefill import PrefillManager
from minisgl.scheduler.prefill_watch import PrefillWatch
from minisgl.scheduler.request_checks import check_request
from minisgl.scheduler.step_budget import CPU_PACE, GPU_PACE, StepPacer
from minisgl.scheduler.step_costs import StepCosts, StepWork
from minisgl.scheduler.step_digest import StepDigests
from minisgl.scheduler.step_watch import Clock, StepWatch
from minisgl.scheduler.table import TableManager
from minisgl.utils.garbage import collect_when_idle

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """What runs a plan: the `Engine`, or a fake one in tests. It starts no processes."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def grammar_masks(self) -> IntArray:
        """Where the masks of a step are put before it is sampled."""

    @property
    def prompt_waves(self) -> PromptWaves:
        """In which portions the device attends for the tokens of prompts."""

    def prompt_room(self, num_decodes: int) -> Sequence[int]:
        """Which numbers of prompt tokens fit a step beside so many decodes best; they ascend."""

    def prepare(self, plan: BatchPlan) -> PreparedStep:
        """Do the host work that can be done before the step before is sampled.

        Raises:
            StepOutOfMemory: the device's memory is full.
        """

    def launch(self, prepared: PreparedStep) -> LaunchedStep:
        """Start computing logits, after the step before is sampled.

        Raises:
            StepOutOfMemory: the device's memory is full. Some of the plan's writes may be done, and
                the KV of some of its slices may be written.
        """

    def sample(self, launched: LaunchedStep) -> ForwardOutput:
        """Start choosing tokens. The steps after this one find them in the token pool."""


@dataclass(slots=True)
class InFlightStep:
    """A launched step that is not finished.

    Attributes:
        number: how many steps were launched before.
        launched: it has the logits; set by `_launch`, cleared by `_sample`.
        masks: set by `_start_masks` if a grammar restricts the step, cleared by `_sample`.
        sampled: set by `_sample`, when the device starts choosing tokens.
        outputs: one for each sampling slice; set by `_read_tokens`, once the host has the tokens.
        work: None if its time is not measured.
    """

    number: int
    plan: BatchPlan
    sampling_slices: list[ReqSlice]
    launched: LaunchedStep | None
    work: StepWork | None
    masks: PendingMasks | None = None
    sampled: ForwardOutput | None = None
    outputs: list[Output | None] | None = None


class Scheduler:
    """Chooses what runs next and keeps at most one step in flight between steps.

    With overlap, step n is launched, and step n-1 is finished while the device computes n
    (NanoFlow, Zhu et al. 2024, arXiv:2408.12757). Without overlap, step n is finished at once. Both
    give equal tokens.

    Args:
        leads: whether this is rank 0, which tries grammars, measures steps, and posts what it finds
            to `inbox`. It also measures prefills, for traces.
        compiler: of grammars, if it was made before.
        trials: of rank 0, if they were opened before; they are opened with the first grammar else.
        peers: the other ranks, with whom each step is compared; None if there are none.
        clock: seconds, from any start.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        executor: Executor,
        inbox: Inbox,
        outbox: Outbox,
        *,
        leads: bool = True,
        compiler: GrammarCompiler | None = None,
        trials: GrammarTrials | None = None,
        peers: Peers | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        assert config.seed is not None, "ranks would draw different ones"
        assert config.max_prefill_length is not None
        limits = executor.limits
        is_on_gpu = config.device == "cuda"
        self.is_running = True
        self.events = Events()
        self.table = TableManager(limits.num_rows, limits.num_row_pages, limits.num_row_tokens)
        prefix_cache = create_prefix_cache(config.cache, limits.page_size)
        self.cache = CacheManager(limits.num_pages, prefix_cache, self.table)
        self.prefill = PrefillManager(self.cache, self.table, self.events, config.schedule)
        self.decode = DecodeManager(self.cache)
        self.grammars = GrammarMatchers(
            executor.grammar_masks, inbox.post if leads else None, for_gpu=is_on_gpu
        )
        self.pending_grammars = create_pending_grammars(
            config,
            limits,
            self.grammars.known,
            inbox.post,
            leads=leads,
            compiler=compiler,
            trials=trials,
        )
        matching = Matching(self.grammars, limits.eos_ids, peers, for_gpu=is_on_gpu)
        prefill_watch = PrefillWatch(self.events, clock) if leads else None
        self.outputs = OutputProcessor(matching, self.table, limits, self.events, prefill_watch)
        self._leads = leads
        self._executor = executor
        self._limits = limits
        self._inbox = inbox
        self._outbox = outbox
        self._max_tokens = config.max_prefill_length
        self.pacer = StepPacer(
            self._max_tokens,
            config.target_itl_ms,
            GPU_PACE if is_on_gpu else CPU_PACE,
            prompt_room=executor.prompt_room,
            prompt_waves=executor.prompt_waves,
        )
        is_watched = leads and config.target_itl_ms != 0
        self._watch = StepWatch(inbox.post, clock, executor.prompt_waves) if is_watched else None
        self._peers = peers
        self._digests = StepDigests()
        self._overlap = config.overlap
        self._seeds = random.Random(config.seed)
        self._live: dict[int, Req] = {}
        # Ended or retracted requests whose release waits for a launched step that refers to them.
        self._deferred: dict[int, Req] = {}
        self._in_flight: InFlightStep | None = None
        self._num_steps = 0
        self._flushes: list[tuple[int, int]] = []  # uids and dropped tokens; not reported yet
        self._counts = EventCounts(self.events)
        log_events(self.events)
        self._reported: EngineStats | None = self._stats()  # None if nobody has got it

    @property
    def is_idle(self) -> bool:
        """Whether nothing can happen before the next message."""
        return len(self._live) == len(self.pending_grammars) and not self._in_flight

    def run(self) -> None:
        """Step until an ExitMsg comes."""
        while self.is_running:
            if self.is_idle:
                collect_when_idle()
            self.step()

    def step(self) -> None:
        """Launch step n, then finish step n-1 (with overlap) or n (without).

        Masks of n need the tokens of n-1. A step with masks is therefore sampled just before n+1 is
        launched: they are made while the device computes logits, n-1 is finished and n+1 prepared.
        """
        is_idle = self.is_idle
        msgs = self._inbox.receive(block=is_idle)
        if is_idle and self._watch:
            self._watch.resume()
        self._receive(msgs)
        plan = self._plan() if self.is_running else None  # at the end no step is left in flight
        previous = self._in_flight
        candidates: list[Req] = []
        try:
            prepared = self._executor.prepare(plan) if plan else None
            if previous:
                self._sample(previous)
            step = self._launch(plan, prepared) if plan and prepared else None
        except StepOutOfMemory as error:
            assert plan
            candidates = self._undo(plan, error)
            step = None
            if previous:
                self._sample(previous)

        if step and self.grammars.restricts_any(step.sampling_slices):
            self._start_masks(step, previous)
        elif step:
            self._sample(step)

        if previous:
            self._finish(previous)
        self._end_newest(candidates)
        if step and not self._overlap:
            self._sample(step)
            self._finish(step)
            step = None
        self._in_flight = step
        self.grammars.stay_in_budget()
        self._report()

    def _report(self) -> None:
        """Send the outputs of a step, and the statistics if they have changed."""
        stats = self._stats()
        has_changed = stats != self._reported
        if self.outputs.has_messages or has_changed:
            self._outbox.send(self.outputs.drain_messages(), stats if has_changed else None)
            self._reported = stats
            self._flushes = []

    def _stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.decode) + len(self.prefill.half_computed),
            num_waiting=len(self.pending_grammars) + len(self.prefill),
            num_pages_used=self.cache.num_pages - self.cache.num_available,
            num_pages=self.cache.num_pages,
            num_retractions=self._counts.num_retractions,
            num_steps=self._counts.num_steps,
            num_computed_tokens=self._counts.num_computed_tokens,
            num_cached_tokens=self._counts.num_cached_tokens,
            budget_tokens=self.pacer.latest.num_tokens,
            budget_ms=round(self.pacer.latest.bound_ms, 1),
            flushes=list(self._flushes),
        )

    def _receive(self, msgs: Sequence[BackendMsg]) -> None:
        for msg in msgs:
            match msg:
                case UserMsg():
                    self._accept(msg)
                case AbortBackendMsg(uid):
                    self._abort(uid)
                case FlushCacheMsg(uid):
                    self._flushes.append((uid, self.cache.flush()))
                case NewDetokenizerMsg(life):
                    self._outbox.redirect(life)
                    self._reported = None
                case GrammarVerdictMsg() | GrammarCompiledMsg():
                    self._open(self.pending_grammars.take(msg))
                case ForgetGrammarMsg():
                    self._forget(msg)
                case StepCostsMsg(seconds):
                    self.pacer.costs = StepCosts(*seconds)
                case ExitMsg():
                    self.is_running = False
                    self.pending_grammars.close()

    def _abort(self, uid: int) -> None:
        """End a request, if it lives."""
        req = self._live.get(uid)
        if req is not None:
            self.outputs.add_abort(req)
            self._end(req, "abort")

    def _forget(self, msg: ForgetGrammarMsg) -> None:
        """Forget a grammar, and end the requests whose answers take too much memory with it."""
        self.grammars.known.discard(msg.grammar)
        for uid in msg.uids:
            req = self._live.get(uid)
            if req is not None:
                self.outputs.add_error(req, InvalidRequest(msg.error, param="grammar"))
                self._end(req, "abort")

    def _accept(self, msg: UserMsg) -> None:
        """Queue a request, or answer at once that it cannot be served."""
        assert msg.uid not in self._live
        prompt = unpack_ids(msg.input_ids)
        params = msg.sampling
        seed = self._seeds.randint(0, MAX_SEED)  # drawn for every request, so that all ranks agree
        try:
            max_length = check_request(prompt, params, self._limits)
        except RequestError as error:
            self.outputs.add_refusal(msg.uid, len(prompt), error)
            return
        if params.seed is not None:
            seed = params.seed
        req = Req(msg.uid, prompt, params, max_length, seed)
        self._live[req.uid] = req
        if params.grammar is None or self.grammars.knows(params.grammar):
            self._open([req])
        else:
            self.pending_grammars.add(req)

    def _open(self, reqs: Sequence[Req]) -> None:
        """Queue requests that need not wait for their grammar, or answer that it is refused."""
        for req in reqs:
            try:
                if req.params.grammar is not None:
                    self.grammars.open(req.uid, req.params.grammar)
            except RequestError as error:
                del self._live[req.uid]
                self.outputs.add_refusal(req.uid, req.num_prompt, error)
                continue
            self.prefill.add(req)
            if self.events.request_queued:
                self.events.request_queued.emit(RequestQueued(req.uid, req.num_prompt))

    def _plan(self) -> BatchPlan | None:
        """Plan slices of running requests, and of prompts within the budget; None if none.

        Not a choice alone. It retracts and admits requests, publishes prefixes, and drains the
        tables' writes: a plan that is made is launched. All ranks agree on it, or the group ends.
        """
        running = self.decode.plan(self._max_tokens)
        if running.is_short_of_pages and not self._deferred:  # else pages come back soon
            running.drop(self._retract())
        slices = running.slices
        # Admit nobody while a running request lacks pages: a newcomer would take what retraction
        # frees, and be retracted in turn.
        budget = self.pacer.budget(slices, self.prefill.oldest)
        chunks = self.prefill.plan(
            min(budget.num_tokens, running.budget),
            num_running=len(self.decode),
            may_admit=not running.is_short_of_pages,
        )
        slices += chunks
        if not slices:
            self._agree(None, running)
            return None
        num_shared_tokens = self.cache.num_shared_tokens(chunks)
        plan = BatchPlan(slices, self.table.drain_writes(), num_shared_tokens)
        self._agree(plan, running)
        if self.events.step_planned:
            event = StepPlanned(self._num_steps, len(slices), plan.num_tokens)
            self.events.step_planned.emit(event)
        return plan

    def _agree(self, plan: BatchPlan | None, running: RunningPlan) -> None:
        """Compare a plan with the other ranks'.

        Args:
            running: the part of it that is about running requests.
        """
        if self._peers:
            history = self.decode.history
            self._peers.agree(self._digests.next(self._num_steps, plan, running, history))

    def _retract(self) -> Req:
        """Retract the least urgent request; its release waits for steps that refer to it."""
        priority = self.decode.least_urgent.params.priority
        victim = self.prefill.retract(priority) or self.decode.retract()
        if self.events.request_retracted:
            event = RequestRetracted(victim.uid, victim.num_known)
            self.events.request_retracted.emit(event)
        self._release_or_defer(victim)
        return victim

    def _launch(self, plan: BatchPlan, prepared: PreparedStep) -> InFlightStep:
        work = self._watch.begin(plan) if self._watch else None
        launched = self._executor.launch(prepared)
        step = InFlightStep(self._num_steps, plan, plan.sampling_slices, launched, work)
        self._num_steps += 1
        self.table.settle()
        self.prefill.settle()
        if self.events.step_launched:
            self.events.step_launched.emit(StepLaunched(step.number))
        self._advance(plan.slices)
        return step

    def _undo(self, plan: BatchPlan, error: StepOutOfMemory) -> list[Req]:
        """Undo a plan whose step was not launched.

        Running requests keep the pages that they got for it, whose writes are done with the next
        plan.

        Returns:
            the requests of which one has to end, first of all the first.

        Raises:
            StepOutOfMemory: there are other ranks, whose memory need not be full.
        """
        if self._peers:
            raise error
        logger.warning(
            "the device's memory is full in a step of %s tokens: %s", plan.num_tokens, error
        )
        self.table.undo_drain()
        prompts = self.prefill.undo_plan()
        if self._in_flight:
            self._in_flight.work = None  # its time would have that of the failed step in it
        elif self._watch:
            self._watch.resume()
        return prompts or self.decode.least_urgent_first(plan.slices)

    def _end_newest(self, candidates: Sequence[Req]) -> None:
        """End the first of these requests, unless the step before has ended one of them."""
        if candidates and all(req.finish is None for req in candidates):
            self.outputs.add_error(candidates[0], OutOfMemory())
            self._end(candidates[0], "abort")

    def _advance(self, slices: list[ReqSlice]) -> None:
        """Account for launched slices."""
        running = self.decode
        for req_slice in slices:
            req = req_slice.req
            req.num_in_flight += 1
            req.num_computed = req_slice.end
            if req_slice.samples:
                req.num_tokens += 1
            if req not in running:
                self._advance_prompt(req_slice)

    def _advance_prompt(self, chunk: ReqSlice) -> None:
        """Account for a launched chunk."""
        if self.events.chunk_launched:
            event = ChunkLaunched(chunk.req.uid, chunk.start, chunk.end)
            self.events.chunk_launched.emit(event)
        if chunk.samples:
            self.decode.add(chunk.req)

    def _start_masks(self, step: InFlightStep, previous: InFlightStep | None) -> None:
        """Start making a step's masks, which need the tokens of the previous step.

        Each rank applies the part that is about its tokens.
        """
        if previous:
            self._read_tokens(previous)
        step.masks = self.grammars.start_masks(step.sampling_slices)

    def _sample(self, step: InFlightStep) -> None:
        """Start choosing the tokens of a step, unless that has happened: only masks delay it."""
        if step.launched is None:
            return
        if step.masks:
            step.masks.wait()
        step.sampled = self._executor.sample(step.launched)
        step.launched = None
        step.masks = None

    def _read_tokens(self, step: InFlightStep) -> None:
        """Wait for the tokens of a step, once, and append them to their requests."""
        assert step.sampled is not None
        if step.outputs is None:
            sampled = step.sampled.wait()
            step.outputs = self.outputs.append_sampled(step.sampling_slices, sampled)

    def _finish(self, step: InFlightStep) -> None:
        """Collect the outputs of a sampled step; release requests whose release waited for it."""
        self._read_tokens(step)
        assert step.sampled is not None
        assert step.outputs is not None
        self._keep_prompt_outputs(step.plan, step.sampled)
        if self._watch:
            self._watch.end(step.work)

        logprobs = step.sampled.logprobs()
        pairs = zip(step.sampling_slices, step.outputs, strict=True)
        for index, (req_slice, output) in enumerate(pairs):
            if output is not None:
                self.outputs.add(req_slice.req, output, logprobs.get(index))
                if output.finish:
                    self._end(req_slice.req, output.finish)

        for req_slice in step.plan.slices:
            req = req_slice.req
            req.num_in_flight -= 1
            if req.num_in_flight == 0 and req.uid in self._deferred:
                self._release(self._deferred.pop(req.uid))
        if self.events.step_finished:
            num_tokens = sum(len(output.tokens) for output in step.outputs if output)
            self.events.step_finished.emit(StepFinished(step.number, num_tokens))

    def _keep_prompt_outputs(self, plan: BatchPlan, sampled: ForwardOutput) -> None:
        """Store log probabilities and embeddings of prompts in their requests."""
        for index, logprobs in sampled.prompt_logprobs().items():
            req_slice = plan.slices[index]
            req_slice.req.prompt_logprobs[req_slice.start :] = logprobs
        for index, embedding in sampled.embeddings().items():
            plan.slices[index].req.embedding = embedding

    def _end(self, req: Req, finish: FinishReason) -> None:
        """End a request: no later plan contains it."""
        req.finish = finish
        del self._live[req.uid]
        self.grammars.close(req.uid)
        if req in self.decode:
            self.decode.remove(req)
        elif req in self.pending_grammars:
            self.pending_grammars.remove(req)
        else:
            self.prefill.remove(req)
        if self.events.request_finished:
            event = RequestFinished(req.uid, finish, req.num_output)
            self.events.request_finished.emit(event)
        self._release_or_defer(req)

    def _release_or_defer(self, req: Req) -> None:
        if req.num_in_flight:
            self._deferred[req.uid] = req
        else:
            self._release(req)

    def _release(self, req: Req) -> None:
        """Release a request's row and pages; queue it again if it was retracted.

        No other function calls `CacheManager.release`, which returns the pages, and calls
        `TableManager.release` with the row; but for `PrefillManager.undo_plan`, whose requests were
        never launched.
        """
        if req.row is not None:
            self.cache.release(req)
        if req.finish is None:
            self.prefill.put_back(req)

    def check_integrity(self) -> None:
        """Assert that each page and each row has exactly one owner. For tests; walks everything."""
        half_computed = self.prefill.half_computed
        admitted = [*half_computed, *self.decode.running, *self._deferred.values()]
        self.cache.check_integrity(admitted)
        self.table.check_integrity([req.row for req in admitted if req.row is not None])
