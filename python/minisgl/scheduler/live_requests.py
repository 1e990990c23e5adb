"""The life of a request in the scheduler, from its message to its release.

    message ─ pending ─ waiting ─ partly computed ─ running ─ ended ─ released
                           ▲            │              │
                           └────────────┴─ retracted ──┘

`PendingGrammars` has the pending requests, `PrefillManager` those that are waiting or partly
computed, and `DecodeManager` the running ones. A prompt that one step computes as a whole is never
partly computed.

A request ends (`stop`, `length`, `abort`, an error) or is retracted at any moment, and launched
steps may still refer to it. `_release` gives its row and pages back when no launched step does.
`PrefillManager.rollback` releases what was admitted for a step that was not launched after all.

Of steps it knows only which requests they refer to.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from minisgl.core import FinishReason, Req, ReqSlice
from minisgl.engine import EngineLimits
from minisgl.errors import InvalidRequest, NoNumbers, RequestError
from minisgl.message import (
    ForgetGrammarMsg,
    GrammarCompiledMsg,
    GrammarVerdictMsg,
    UserMsg,
    unpack_ids,
)
from minisgl.sampling_params import MAX_SEED
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.events import (
    ChunkLaunched,
    Events,
    RequestFinished,
    RequestQueued,
    RequestRetracted,
)
from minisgl.scheduler.grammars.matchers import GrammarMatchers
from minisgl.scheduler.grammars.pending import PendingGrammars
from minisgl.scheduler.outputs import OutputProcessor
from minisgl.scheduler.prefill import PrefillManager
from minisgl.scheduler.request_checks import check_request


class LiveRequests:
    """The requests that have not ended. Each is in one state.

    Args:
        seed: from which requests without a seed get theirs; equal on all ranks.
    """

    def __init__(
        self,
        *,
        limits: EngineLimits,
        cache: CacheManager,
        prefill: PrefillManager,
        decode: DecodeManager,
        grammars: GrammarMatchers,
        pending_grammars: PendingGrammars,
        outputs: OutputProcessor,
        events: Events,
        seed: int,
    ) -> None:
        self._limits = limits
        self._cache = cache
        self._prefill = prefill
        self._decode = decode
        self._grammars = grammars
        self._pending_grammars = pending_grammars
        self._outputs = outputs
        self._events = events
        self._seeds = random.Random(seed)
        self._live: dict[int, Req] = {}
        # Ended or retracted requests whose release waits for a launched step that refers to them.
        self._deferred: dict[int, Req] = {}

    def __len__(self) -> int:
        return len(self._live)

    @property
    def has_deferred(self) -> bool:
        """Whether rows and pages come back when launched steps are finished."""
        return bool(self._deferred)

    def accept(self, msg: UserMsg) -> None:
        """Queue a request, or answer at once that it cannot be served."""
        assert msg.uid not in self._live
        prompt = unpack_ids(msg.input_ids)
        params = msg.sampling
        seed = self._seeds.randint(0, MAX_SEED)  # drawn for every request, so that all ranks agree
        try:
            max_length = check_request(prompt, params, self._limits)
        except RequestError as error:
            self._outputs.add_refusal(msg.uid, error)
            return
        if params.seed is not None:
            seed = params.seed
        req = Req(msg.uid, prompt, params, max_length, seed)
        self._live[req.uid] = req
        if params.grammar is None or self._grammars.knows(params.grammar):
            self._queue_or_refuse([req])
        else:
            self._pending_grammars.add(req)

    def handle_grammar(self, msg: GrammarVerdictMsg | GrammarCompiledMsg) -> None:
        """Go on with a grammar that requests wait for, and with them if it is known now."""
        self._queue_or_refuse(self._pending_grammars.handle(msg))
        self._grammars.known.forget_refused_for_now()

    def _queue_or_refuse(self, reqs: Sequence[Req]) -> None:
        """Queue requests that need not wait for their grammar, or answer that it is refused."""
        for req in reqs:
            try:
                if req.params.grammar is not None:
                    self._grammars.open(req.uid, req.params.grammar)
            except RequestError as error:
                del self._live[req.uid]
                self._outputs.add_refusal(req.uid, error)
                continue
            self._prefill.add(req)
            if self._events.request_queued:
                self._events.request_queued.emit(RequestQueued(req.uid, req.num_prompt))

    def enter_step(self, slices: Sequence[ReqSlice]) -> None:
        """Account for a launched step. Prompts whose last chunk it has are running now."""
        running = self._decode
        for req_slice in slices:
            req = req_slice.req
            req.num_in_flight += 1
            req.num_computed = req_slice.end
            if req_slice.samples:
                req.num_tokens += 1
            if req not in running:
                self._enter_chunk(req_slice)

    def _enter_chunk(self, chunk: ReqSlice) -> None:
        if chunk.req.num_cached is None:
            chunk.req.num_cached = chunk.start
        if self._events.chunk_launched:
            event = ChunkLaunched(chunk.req.uid, chunk.start, chunk.end)
            self._events.chunk_launched.emit(event)
        if chunk.samples:
            self._decode.add(chunk.req)

    def leave_step(self, slices: Sequence[ReqSlice]) -> None:
        """Account for a finished step. Release the requests whose release waited for it."""
        for req_slice in slices:
            req = req_slice.req
            req.num_in_flight -= 1
            if req.num_in_flight == 0 and req.uid in self._deferred:
                self._release(self._deferred.pop(req.uid))

    def retract(self) -> Req:
        """Retract the least urgent request. It waits again when no launched step refers to it.

        If its prompt was partly computed it keeps its number; else others of its priority wait
        behind it.
        """
        victim = self._prefill.retract(self._decode.least_urgent.priority)
        if victim is None:
            victim = self._decode.retract()
            self._prefill.number_first(victim)
        if self._events.request_retracted:
            event = RequestRetracted(victim.uid, victim.num_known)
            self._events.request_retracted.emit(event)
        self._release_or_defer(victim)
        return victim

    def abort(self, uid: int) -> None:
        """End a request, if it lives."""
        req = self._live.get(uid)
        if req is not None:
            self._outputs.add_abort(req)
            self.end(req, "abort")

    def forget_grammar(self, msg: ForgetGrammarMsg) -> None:
        """Forget a grammar, and end the requests whose answers take too much memory with it."""
        self._grammars.known.forget(msg.grammar)
        for uid in msg.uids:
            req = self._live.get(uid)
            if req is not None:
                self.fail(req, InvalidRequest(msg.error, param="grammar"))

    def fail(self, req: Req, error: RequestError) -> None:
        """End a request with an error. If that is of the model's numbers, they are not cached."""
        if isinstance(error, NoNumbers):
            req.is_cacheable = False
        self._outputs.add_error(req, error)
        self.end(req, "abort")

    def end(self, req: Req, finish: FinishReason) -> None:
        """End a request: no later plan contains it."""
        req.finish = finish
        del self._live[req.uid]
        self._grammars.close(req.uid)
        if req in self._decode:
            self._decode.remove(req)
        elif req in self._pending_grammars:
            self._pending_grammars.remove(req)
        else:
            self._prefill.remove(req)
        if self._events.request_finished:
            event = RequestFinished(req.uid, finish, req.num_output)
            self._events.request_finished.emit(event)
        self._release_or_defer(req)

    def _release_or_defer(self, req: Req) -> None:
        if req.num_in_flight:
            self._deferred[req.uid] = req
        else:
            self._release(req)

    def _release(self, req: Req) -> None:
        """Release a request's row and pages; queue it again if it was retracted."""
        if req.row is not None:
            self._cache.release(req)
        if req.finish is None:
            self._prefill.put_back(req)

    @property
    def admitted(self) -> list[Req]:
        """The requests that have a row. Some of them have ended."""
        return [*self._prefill.partly_computed, *self._decode.running, *self._deferred.values()]
