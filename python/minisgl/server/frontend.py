"""From a prompt to a stream of replies.

Sends prompts to the tokenizers, and delivers the replies. A request is open until its last reply
has come, or until its generation is closed, which aborts it. Everything runs in one event loop.
Next to read: `open_requests.py`, `generation.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace

from minisgl.core import SamplingParams
from minisgl.errors import (
    EngineFailed,
    InvalidRequest,
    RequestTimeout,
    Unavailable,
)
from minisgl.message import (
    BatchFrontendMsg,
    CodecReply,
    EngineStats,
    FlushCacheMsg,
    FrontendMsg,
    Prompt,
    TokenizeMsg,
    TokenizerMsg,
    UserReply,
    num_encoded_bytes,
)
from minisgl.processes.addresses import DETOKENIZER, Addresses, uids_of_api
from minisgl.processes.queues import AsyncPullQueue
from minisgl.processes.shared_numbers import SharedNumbers
from minisgl.sampling_params import MAX_SEED, MIN_SEED
from minisgl.server.acceptance import Acceptance
from minisgl.server.generation import Generation
from minisgl.server.metrics import Metrics
from minisgl.server.open_requests import OpenRequest, OpenRequests
from minisgl.server.questions import Questions
from minisgl.server.stopwatch import PromptCount, Stopwatch
from minisgl.server.tokenizer_queues import TokenizerQueues
from minisgl.utils.garbage import collect_when_idle

# Of a request's large prompts and its grammar: they are sent once for each answer.
_MAX_SENT_BYTES = 2**27
_DELIVERIES_PER_TURN = 64  # of the event loop: a few milliseconds when each writes to its stream
_IDLE_CHECK_S = 0.05
_DEADLINE_CHECK_S = 0.25


class Frontend:
    """Sends prompts to the tokenizers and delivers replies to the generations that wait.

    Between `suspend` and `resume` there are no workers. A tokenizer or the detokenizer may be
    replaced while the others go on. A request that is sent again has a new uid, so that a reply to
    the old one matches no request. Aborts may be lost with a tokenizer; such a reply aborts its
    request again.

    Args:
        addresses: of the workers.
        replies: what workers send to this process.
        max_open_requests: in all API processes.
        request_timeout_s: a request that takes longer ends with an error; None is no limit.
        api: which of the API processes this is.
        shared: numbers that all of them share.
    """

    def __init__(
        self,
        addresses: Addresses,
        replies: AsyncPullQueue[FrontendMsg],
        max_open_requests: int,
        request_timeout_s: float | None = None,
        *,
        api: int = 0,
        shared: SharedNumbers | None = None,
    ) -> None:
        self._epoch = addresses.epoch
        self._tokenizers = TokenizerQueues(addresses)
        self._incoming = replies
        self._timeout_s = request_timeout_s
        self._uids = uids_of_api(api, addresses.num_api)
        self.acceptance = Acceptance(max_open_requests, shared or SharedNumbers())
        self._requests = OpenRequests(self.acceptance.places)
        self.questions = Questions(self._tokenizers, self.acceptance, self._uids, request_timeout_s)
        self.metrics = Metrics()

    @property
    def max_open(self) -> int:
        """The number of requests that may be open."""
        return self.acceptance.places.limit

    @property
    def refusal(self) -> Unavailable | EngineFailed | None:
        """An error, each time a new one, that says why no request is accepted now; or None."""
        return self.acceptance.refusal

    @property
    def num_open(self) -> int:
        """Requests and questions that are open in this process."""
        return len(self._requests) + len(self.questions)

    @property
    def num_open_in_all(self) -> int:
        """Requests and questions that are open in all API processes."""
        return self.acceptance.places.num_taken

    def new_deadline(self) -> float:
        """When a request that begins now ends with an error, as `time.monotonic` counts."""
        return math.inf if self._timeout_s is None else time.monotonic() + self._timeout_s

    def submit(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams,
        num_answers: int = 1,
        *,
        deadline: float | None = None,
    ) -> Generation:
        """Send prompts to the tokenizers.

        Args:
            num_answers: to each prompt. If there is a seed, answer i has the i-th seed after it.
            deadline: from `new_deadline`, of a request that has begun before.

        Raises:
            InvalidRequest: the request alone has more answers than may be open, or its prompts or
                its grammar are too large for that many.
            QueueFull: too many requests are open.
            Unavailable: no request is accepted now.
            EngineFailed: the engine is gone.
        """
        self.check_num_answers(len(prompts), num_answers)
        _check_sent_bytes(prompts, sampling, num_answers)
        num_requests = num_answers * len(prompts)
        self.acceptance.take_places(num_requests)
        seeds = [_seed_after(sampling.seed, i) for i in range(num_answers)]
        samplings = [replace(sampling, seed=seed) for seed in seeds]
        prompt_counts = [PromptCount(self.metrics) for _ in prompts]
        uids = [next(self._uids) for _ in range(num_requests)]
        generation = Generation(
            self.abort, uids, num_answers, joins_replies=sampling.logprobs is None
        )
        if deadline is None:
            deadline = self.new_deadline()
        num_places = num_requests  # that no request has yet
        try:
            for index, (uid, (prompt, uid_sampling)) in enumerate(
                zip(uids, itertools.product(prompts, samplings), strict=True)
            ):
                msg = TokenizeMsg(uid, prompt, uid_sampling, uids[0])
                self._tokenizers.send(uid, msg)
                stopwatch = Stopwatch(self.metrics, prompt_counts[index // num_answers])
                generation.stopwatches.append(stopwatch)
                self._requests.begin(uid, OpenRequest(generation, stopwatch, deadline, msg))
                num_places -= 1
        except BaseException:  # a message cannot be encoded, as half a surrogate pair
            self.acceptance.places.give_back(num_places)
            generation.close()
            raise
        return generation

    def check_num_answers(self, num_prompts: int, num_answers: int) -> None:
        """
        Raises:
            InvalidRequest: a request with these prompts has more answers than may be open.
        """
        num_requests = num_answers * num_prompts
        if num_requests > self.max_open:
            raise InvalidRequest(
                f"{num_requests} answers in one request; this server takes at most {self.max_open}",
                param=None if num_answers == 1 else "n",
            )

    def abort(self, uid: int) -> None:
        """Abort a request. Of its remaining replies only the prompt's tokens count."""
        if self._requests.abort(uid):
            self.metrics.aborts.inc()
            self._tokenizers.abort(uid)

    async def run(self) -> None:
        """Deliver replies, and end requests at their deadlines, for ever."""
        deadlines = asyncio.create_task(self._end_late_requests())
        try:
            await self._deliver_replies()
        finally:
            deadlines.cancel()

    async def _end_late_requests(self) -> None:
        while self._timeout_s is not None:
            await asyncio.sleep(_DEADLINE_CHECK_S)
            for generation in self._requests.late(time.monotonic()):
                generation.close()
                generation.fail(RequestTimeout(self._timeout_s))

    async def _deliver_replies(self) -> None:
        while True:
            msg = await self._incoming.get()
            if self.acceptance.outage:  # it is of an earlier epoch
                continue
            match msg:
                case BatchFrontendMsg(replies, stats):
                    if stats and stats.epoch == self._epoch:
                        self._take_stats(stats)
                    await self._deliver_all(replies)
                case UserReply() as refusal:
                    self._deliver(refusal)
                case CodecReply(uid) as codec_reply:
                    self.questions.answer(uid, codec_reply)
            if self.num_open == 0:
                collect_when_idle()
            # `get` does not wait while messages are there. Tasks that wait for this one go first.
            await asyncio.sleep(0)

    async def _deliver_all(self, replies: Sequence[UserReply]) -> None:
        """Deliver the replies of a step, a bounded number in each turn of the event loop."""
        for begin in range(0, len(replies), _DELIVERIES_PER_TURN):
            if begin:
                await asyncio.sleep(0)
            for reply in replies[begin : begin + _DELIVERIES_PER_TURN]:
                self._deliver(reply)

    def _take_stats(self, stats: EngineStats) -> None:
        self.metrics.engine.update(stats)
        for uid, num_tokens in stats.flushes:
            self.questions.answer(uid, num_tokens)

    def _deliver(self, reply: UserReply) -> None:
        if self.acceptance.outage:  # an epoch has ended
            return
        request = self._requests.find(reply.uid)
        if request is None:  # its generation was closed, or it has another uid
            if self._requests.note_stray(reply):
                self._tokenizers.abort(reply.uid)
            return
        request.unanswered = None
        request.stopwatch.observe(reply)
        if reply.is_final:
            self._requests.end(reply.uid)
        request.generation.put(reply)

    def refuse(self, reason: str) -> None:
        """Refuse new requests; open ones go on."""
        self.acceptance.refuse(reason)

    async def drained(self) -> None:
        """Wait until no request is open, in any API process."""
        while self.num_open_in_all:
            await asyncio.sleep(_IDLE_CHECK_S)

    def fail(self, reason: str) -> None:
        """End every open request with an error, and refuse new ones."""
        self.acceptance.fail(reason)
        failure = EngineFailed(reason)
        self._requests.fail(failure)
        self.questions.fail(failure)

    def suspend(self, reason: str, outage_s: int) -> None:
        """Cut the workers off, for about `outage_s` seconds; they are dead or will be killed.

        New requests are refused. Of the open ones, those that have begun to answer end with an
        error, and so do those that were sent twice; the others wait.
        """
        self._tokenizers.drop()
        self.questions.fail(self.acceptance.suspend(reason, outage_s))
        self.metrics.engine.end_epoch()
        self._requests.end_lost(self._requests.uids, EngineFailed(f"the engine failed: {reason}"))

    def resume(self, addresses: Addresses) -> None:
        """Send what waits to the workers of a new epoch, and accept new requests."""
        self._epoch = addresses.epoch
        self._tokenizers.connect(addresses)
        self.acceptance.resume()
        self._requests.forget_aborted()  # also of clients that left during the outage
        for uid in self._requests.uids:
            self._send_again(uid)

    def replace_worker(self, name: str, addresses: Addresses, reason: str) -> None:
        """Go on with the successor of a tokenizer or the detokenizer, which has failed.

        Requests without a reply that may be lost with it are aborted and sent again, as if they
        were new. With the detokenizer answers are lost that have begun; they end with an error.

        Args:
            addresses: with the successor's.
        """
        has_detokenizer = name == DETOKENIZER
        numbers = self._tokenizers.replace(name, addresses)
        self._requests.doubt_aborts(first_safe_uid=next(self._uids))

        def went_there(uid: int) -> bool:
            return self._tokenizers.number_of(uid) in numbers

        def is_lost(uid: int, msg: TokenizerMsg) -> bool:
            is_flush = isinstance(msg, FlushCacheMsg)  # its answer comes through the detokenizer
            return went_there(uid) or (has_detokenizer and is_flush)

        lost = self._requests.uids
        if not has_detokenizer:
            lost = [uid for uid in self._requests.waiting if went_there(uid)]
        failure = f"a worker failed: {reason}"
        ended = self._requests.end_lost(lost, EngineFailed(failure))
        for uid in ended:
            self._tokenizers.abort(uid)
        for uid in lost:
            if self._requests.find(uid):
                self._tokenizers.abort(uid)
                self._send_again(uid)
        for uid, msg in self.questions.try_again(is_lost, Unavailable(failure)).items():
            self._tokenizers.send(uid, msg)

    def _send_again(self, uid: int) -> None:
        """Send a request again that had this uid, with a new one."""
        new_uid = next(self._uids)
        self._tokenizers.send(new_uid, self._requests.rename(uid, new_uid))

    def shut_down(self) -> None:
        """Let the workers end, and close the queues."""
        self._tokenizers.shut_down()
        self.close()

    def close(self) -> None:
        """Close the queues; the workers go on."""
        self._tokenizers.close()
        self._incoming.close()


def _check_sent_bytes(prompts: list[Prompt], sampling: SamplingParams, num_answers: int) -> None:
    num_requests = num_answers * len(prompts)
    num_bytes = num_answers * sum(map(num_encoded_bytes, prompts))
    if sampling.grammar is not None:
        num_bytes += num_requests * len(sampling.grammar.text.encode(errors="surrogatepass"))
    if num_requests > 1 and num_bytes > _MAX_SENT_BYTES:
        raise InvalidRequest(
            f"the prompts and the grammar of {num_requests} answers have {num_bytes} bytes, each "
            f"counted as often as it has answers; this server takes at most {_MAX_SENT_BYTES}",
            param=None if num_answers == 1 else "n",
        )


def _seed_after(seed: int | None, i: int) -> int | None:
    """The i-th seed after a seed. The smallest follows the largest."""
    if seed is None:
        return None
    return (seed + i - MIN_SEED) % (MAX_SEED - MIN_SEED + 1) + MIN_SEED
