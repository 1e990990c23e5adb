"""The step: receive, plan, launch, finish, send.

With overlap, a step is launched before the previous one is finished, so that the device does not
wait for the host.

Owns the order of these phases. Other modules make the decisions: `step_planner.py` says what a step
computes, with `decode.py` and `prefill.py`; `live_requests.py` has the life of a request,
`cache.py` gives pages, `outputs.py` turns sampled tokens into outputs. Tensors are the executor's.

If the device's memory is full when a step is prepared or launched, its plan is rolled back. One
request of it ends, and the others are planned again. Next to read: `step_planner.py`,
`live_requests.py`, `decode.py`, `request_queue.py`, `prefill.py`, `outputs.py`, `cache.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.config import SchedulerConfig
from minisgl.core import BatchPlan
from minisgl.engine import LaunchedStep, PreparedStep, SampledStep
from minisgl.errors import StepOutOfMemory
from minisgl.kvcache import create_prefix_cache
from minisgl.message import (
    AbortMsg,
    ExitMsg,
    FlushCacheMsg,
    ForgetGrammarMsg,
    GrammarCompiledMsg,
    GrammarVerdictMsg,
    NewDetokenizerMsg,
    SchedulerMsg,
    StepCostsMsg,
    UserMsg,
)
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.events import Events, StepFinished, StepLaunched, log_events
from minisgl.scheduler.executor import Executor
from minisgl.scheduler.grammars.matchers import GrammarMatchers, PendingMasks
from minisgl.scheduler.grammars.pending import GrammarTools, PendingGrammars
from minisgl.scheduler.grammars.progress import GrammarProgress
from minisgl.scheduler.io import Inbox, OtherRanks, Outbox
from minisgl.scheduler.live_requests import LiveRequests
from minisgl.scheduler.outputs import Output, OutputProcessor
from minisgl.scheduler.pacing.costs import StepCosts, StepWork
from minisgl.scheduler.pacing.pacer import CPU_PACE, GPU_PACE, StepPacer
from minisgl.scheduler.pacing.watch import Clock, StepWatch
from minisgl.scheduler.prefill import PrefillManager
from minisgl.scheduler.prefill_watch import PrefillWatch
from minisgl.scheduler.statistics import Statistics
from minisgl.scheduler.step_planner import StepPlanner
from minisgl.scheduler.table import TableManager
from minisgl.utils.garbage import collect_when_idle

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class InFlightStep:
    """A launched step that is not finished.

    Attributes:
        number: how many steps were launched before.
        launched: has the logits; set by `_launch`, cleared by `_sample`.
        masks: the grammar masks that threads make; set by `_begin_sampling`, cleared by `_sample`.
        sampled: set by `_sample`, when the device starts choosing tokens.
        outputs: one for each sampling slice; set by `_read_tokens`, once the host has the tokens.
        work: None if its time is not measured.
    """

    number: int
    plan: BatchPlan
    launched: LaunchedStep | None
    work: StepWork | None
    masks: PendingMasks | None = None
    sampled: SampledStep | None = None
    outputs: list[Output | None] | None = None


class Scheduler:
    """Chooses what each step computes. Between calls of `step`, at most one step is in flight.

    With overlap, step n is launched, and step n-1 is finished while the device computes n
    (NanoFlow, Zhu et al. 2024, arXiv:2408.12757). Without overlap, step n is finished at once. Both
    give equal tokens.

    Args:
        leads: whether this is rank 0, which tries grammars, measures steps, and posts the results
            to `inbox`. It also measures prefills, for /metrics and traces.
        grammar_tools: if they were started before; else they start with the first grammar.
        other_ranks: the ranks with which each plan is compared; None if there are none.
        clock: seconds since any moment.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        executor: Executor,
        inbox: Inbox,
        outbox: Outbox,
        *,
        leads: bool = True,
        grammar_tools: GrammarTools | None = None,
        other_ranks: OtherRanks | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        assert config.seed is not None, "ranks would draw different ones"
        assert config.max_prefill_length is not None
        limits = executor.limits
        is_on_gpu = config.device == "cuda"
        self.is_running = True
        self.events = Events()
        self._executor = executor
        self._inbox = inbox
        self._outbox = outbox
        self._other_ranks = other_ranks

        # Memory, and the requests that have some of it or wait for it.
        self.table = TableManager(limits.num_rows, limits.num_row_pages, limits.num_row_tokens)
        prefix_cache = create_prefix_cache(config.cache, limits.page_size)
        self.cache = CacheManager(limits.num_pages, prefix_cache, self.table)
        self.prefill = PrefillManager(self.cache, self.table, self.events, config.schedule)
        self.decode = DecodeManager(self.cache)

        # Structured output.
        self.grammars = GrammarMatchers(
            executor.grammar_masks, inbox.post if leads else None, for_gpu=is_on_gpu
        )
        tools = grammar_tools or GrammarTools.of(
            config, limits.vocab_size, limits.eos_ids, leads=leads
        )
        self.pending_grammars = PendingGrammars(self.grammars.known, tools, inbox.post)
        progress = GrammarProgress(self.grammars, limits.eos_ids, other_ranks, for_gpu=is_on_gpu)

        # Outputs, and the life of a request.
        prefill_watch = PrefillWatch(self.events, clock) if leads else None
        self.outputs = OutputProcessor(progress, self.table, limits, self.events, prefill_watch)
        self.requests = LiveRequests(
            limits=limits,
            cache=self.cache,
            prefill=self.prefill,
            decode=self.decode,
            grammars=self.grammars,
            pending_grammars=self.pending_grammars,
            outputs=self.outputs,
            events=self.events,
            seed=config.seed,
        )

        # What a step computes, and how long it takes.
        self.pacer = StepPacer(
            config.max_prefill_length,
            config.target_itl_ms,
            GPU_PACE if is_on_gpu else CPU_PACE,
            unpadded_prompt_sizes=executor.unpadded_prompt_sizes,
        )
        self._planner = StepPlanner(
            table=self.table,
            cache=self.cache,
            prefill=self.prefill,
            decode=self.decode,
            requests=self.requests,
            pacer=self.pacer,
            events=self.events,
            max_prefill_length=config.max_prefill_length,
            kv_bytes=limits.kv_bytes,
            other_ranks=other_ranks,
        )
        is_watched = leads and config.target_itl_ms != 0
        self._watch = StepWatch(inbox.post, clock) if is_watched else None

        # The step.
        self._overlap = config.overlap
        self._in_flight: InFlightStep | None = None
        self._num_steps = 0

        # What others see of it.
        self.statistics = Statistics(
            self.cache, self.prefill, self.decode, self.pending_grammars, self.pacer, self.events
        )
        log_events(self.events)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do before the next message."""
        return len(self.requests) == len(self.pending_grammars) and not self._in_flight

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

        If memory does not suffice for n, n-1 is sampled and finished as if nothing had been
        planned. Then one request of n ends.
        """
        for msg in self._receive():
            if self.is_running:  # nothing begins after the end
                self._handle(msg)

        plan = None  # at the end, only finish what is launched
        if self.is_running:
            plan = self._planner.plan(self._num_steps)

        previous = self._in_flight
        prepared = self._prepare(plan) if plan else None
        if previous:
            self._sample(previous)
        current = self._launch(plan, prepared) if plan and prepared else None
        if current:
            self._begin_sampling(current, previous)

        if previous:
            self._finish(previous)
        if plan and not current:
            self._planner.end_least_urgent_of(plan)
        if current and not self._overlap:
            self._sample(current)
            self._finish(current)
            current = None
        self._in_flight = current

        self.grammars.stay_in_budget()
        self._send()
        if self._watch:
            self._watch.learn()

    def _receive(self) -> Sequence[SchedulerMsg]:
        """The messages that have come. Wait for one if nothing can happen before."""
        is_idle = self.is_idle
        msgs = self._inbox.receive(block=is_idle)
        if is_idle and self._watch:
            self._watch.resume()
        return msgs

    def _handle(self, msg: SchedulerMsg) -> None:
        """Handle one message."""
        match msg:
            case UserMsg():
                self.requests.accept(msg)
            case AbortMsg(uid):
                self.requests.abort(uid)
            case GrammarVerdictMsg() | GrammarCompiledMsg():
                self.requests.handle_grammar(msg)
            case ForgetGrammarMsg():
                self.requests.forget_grammar(msg)
            case FlushCacheMsg(uid):
                self.statistics.add_flush(uid, self.cache.flush())
            case NewDetokenizerMsg(life):
                self._outbox.redirect(life)
                self.statistics.report_again()
            case StepCostsMsg(seconds):
                self.pacer.costs = StepCosts(*seconds)
            case ExitMsg():
                self.is_running = False
                self.pending_grammars.close()

    def _prepare(self, plan: BatchPlan) -> PreparedStep | None:
        """Prepare a step; if memory does not suffice, roll its plan back and return None."""
        try:
            return self._executor.prepare(plan)
        except StepOutOfMemory as error:
            self._rollback(plan, error)
            return None

    def _launch(self, plan: BatchPlan, prepared: PreparedStep) -> InFlightStep | None:
        """Launch a step; if memory does not suffice, roll its plan back and return None."""
        work = self._watch.begin(plan) if self._watch else None
        try:
            launched = self._executor.launch(prepared)
        except StepOutOfMemory as error:
            self._rollback(plan, error)
            return None
        step = InFlightStep(self._num_steps, plan, launched, work)
        self._num_steps += 1
        self._planner.commit()
        if self.events.step_launched:
            self.events.step_launched.emit(StepLaunched(step.number))
        self.requests.enter_step(plan.slices)
        return step

    def _rollback(self, plan: BatchPlan, error: StepOutOfMemory) -> None:
        """Undo a plan whose step was not launched.

        Raises:
            StepOutOfMemory: there are other ranks, whose memory need not be full.
        """
        if self._other_ranks:
            raise error
        logger.warning(
            "the device's memory is full in a step of %s tokens: %s", plan.num_tokens, error
        )
        self._planner.rollback()
        if self._in_flight:
            self._in_flight.work = None  # its time would have that of the failed step in it
        elif self._watch:
            self._watch.resume()

    def _begin_sampling(self, step: InFlightStep, previous: InFlightStep | None) -> None:
        """Start choosing the tokens of a step or, if it has masks, making these.

        Masks need the tokens of the previous step. Each rank applies the part that is about its
        tokens.
        """
        if not self.grammars.restricts_any(step.plan.sampling_slices):
            self._sample(step)
            return
        if previous:
            self._read_tokens(previous)
        step.masks = self.grammars.start_masks(step.plan.sampling_slices)

    def _sample(self, step: InFlightStep) -> None:
        """Start choosing the tokens of a step, unless that has happened: only masks delay it."""
        if step.sampled is not None:
            return
        assert step.launched is not None
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
            step.outputs = self.outputs.append_sampled(step.plan.sampling_slices, sampled)

    def _finish(self, step: InFlightStep) -> None:
        """Collect the outputs of a sampled step; release requests whose release waited for it."""
        self._read_tokens(step)
        assert step.sampled is not None
        assert step.outputs is not None
        self.outputs.keep_prompt_outputs(step.plan.slices, step.sampled)
        if self._watch:
            self._watch.end(step.work)

        logprobs = step.sampled.logprobs()
        pairs = zip(step.plan.sampling_slices, step.outputs, strict=True)
        for index, (req_slice, output) in enumerate(pairs):
            if output is None:
                continue
            if output.error:
                self.requests.fail(req_slice.req, output.error)
                continue
            self.outputs.add_output(req_slice.req, output, logprobs.get(index))
            if output.finish:
                self.requests.end(req_slice.req, output.finish)

        self.requests.leave_step(step.plan.slices)
        if self.events.step_finished:
            num_tokens = sum(len(output.tokens) for output in step.outputs if output)
            self.events.step_finished.emit(StepFinished(step.number, num_tokens))

    def _send(self) -> None:
        """Send the outputs of a step, and the statistics if they have changed."""
        stats = self.statistics.take_changed()
        if stats is not None or self.outputs.has_messages:
            self._outbox.send(self.outputs.drain_messages(), stats)

    def check_integrity(self) -> None:
        """Assert that each page and each row has exactly one owner. For tests; walks everything."""
        admitted = self.requests.admitted
        self.cache.check_integrity(admitted)
        self.table.check_integrity([req.row for req in admitted if req.row is not None])
