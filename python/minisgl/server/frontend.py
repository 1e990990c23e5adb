"""Open requests: from a prompt to a stream of replies.

Owns the table of open uids in the API process. A request leaves it with its last reply, or when its
generation is closed, which aborts it. Everything runs in one event loop. Next to read:
`tokenizer/server.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from minisgl.core import IntArray, SamplingParams
from minisgl.errors import (
    EngineFailed,
    InvalidRequest,
    QueueFull,
    RequestTimeout,
    Unavailable,
)
from minisgl.message import (
    AbortMsg,
    BatchFrontendMsg,
    CodecReply,
    DecodeMsg,
    EncodeMsg,
    EngineStats,
    FlushCacheMsg,
    FrontendMsg,
    Prompt,
    ShutdownMsg,
    TokenIds,
    TokenizeMsg,
    TokenizerMsg,
    UserReply,
    encode,
    open_prompt,
    pack_ids,
    unpack_ids,
)
from minisgl.sampling_params import MAX_SEED
from minisgl.server.generation import Generation
from minisgl.server.http.metrics import Metrics, Stopwatch
from minisgl.utils.garbage import collect_when_idle
from minisgl.utils.mp import Addresses, AsyncPullQueue, PushQueue

_DELIVERIES_A_TURN = 64  # of the event loop: a few milliseconds when each writes to its stream
_IDLE_CHECK_S = 0.05
_DEADLINE_CHECK_S = 0.25


@dataclass(slots=True)
class _OpenRequest:
    """A request without its final reply.

    Attributes:
        deadline: when it ends with an error, by `time.monotonic`.
        unanswered: its message, until the first reply; with it the request can be sent again.
        is_second_try: whether it was.
    """

    generation: Generation
    stopwatch: Stopwatch
    deadline: float
    unanswered: TokenizeMsg | None
    is_second_try: bool = False

    @property
    def can_be_sent_again(self) -> bool:
        return self.unanswered is not None and not self.is_second_try


class _Flushes:
    """The flushes of an epoch that were asked for; the scheduler does them in this order."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[int]] = deque()
        self._num_done = 0
        self._num_tokens = 0

    def add(self) -> asyncio.Future[int]:
        self._waiting.append(asyncio.get_running_loop().create_future())
        return self._waiting[-1]

    def take(self, stats: EngineStats) -> None:
        """Answer those that are done. Of several, the first has dropped all that there was."""
        num_tokens = stats.num_flushed_tokens - self._num_tokens
        for _ in range(stats.num_flushes - self._num_done):
            flush = self._waiting.popleft()
            if not flush.done():  # its client has not gone
                flush.set_result(num_tokens)
            num_tokens = 0
        self._num_done = stats.num_flushes
        self._num_tokens = stats.num_flushed_tokens

    def fail(self, error: Unavailable | EngineFailed) -> None:
        for flush in self._waiting:
            if not flush.done():
                flush.set_exception(error)


def connect_tokenizers(addresses: Addresses) -> list[PushQueue[TokenizerMsg]]:
    return [PushQueue(address, encode) for address in addresses.tokenizers]


class Frontend:
    """Sends prompts to the tokenizers and delivers replies to the generations that wait.

    Between `suspend` and `resume` there are no workers. A uid belongs to one epoch of them: what is
    sent again has a new one, so that a reply to the old uid is nobody's.

    Args:
        request_timeout_s: a request that takes longer ends with an error; None is no limit.
    """

    def __init__(
        self,
        tokenizers: list[PushQueue[TokenizerMsg]],
        replies: AsyncPullQueue[FrontendMsg],
        max_open_requests: int,
        request_timeout_s: float | None = None,
    ) -> None:
        self._tokenizers = tokenizers
        self._incoming = replies
        self._max_open = max_open_requests
        self._timeout_s = request_timeout_s
        self._open: dict[int, _OpenRequest] = {}
        self._codec_replies: dict[int, asyncio.Future[CodecReply]] = {}
        self._flushes = _Flushes()
        self._uids = itertools.count()
        self._end: Unavailable | EngineFailed | None = None  # of the server
        self._outage: Unavailable | None = None  # while there are no workers
        self.metrics = Metrics()

    @property
    def max_open(self) -> int:
        """The number of requests that may be open."""
        return self._max_open

    @property
    def refusal(self) -> Unavailable | EngineFailed | None:
        """Why no request is accepted now, or None."""
        return self._end or self._outage

    @property
    def num_open(self) -> int:
        return len(self._open) + len(self._codec_replies)

    def submit(self, prompts: list[Prompt], sampling: SamplingParams, n: int = 1) -> Generation:
        """Send prompts to the tokenizers.

        Args:
            n: answers to each prompt, side by side. If there is a seed, answer i has the i-th seed
                after it.

        Raises:
            InvalidRequest: the request alone has more answers than may be open.
            QueueFull: too many requests are open.
            Unavailable: no request is accepted now.
            EngineFailed: the engine is gone.
        """
        self.check_num_answers(len(prompts), n)
        num_answers = n * len(prompts)
        self._check_capacity(num_answers)
        samplings = [replace(sampling, seed=_seed_after(sampling.seed, i)) for i in range(n)]
        uids = [next(self._uids) for _ in range(num_answers)]
        generation = Generation(self.abort, uids, n, joins_replies=sampling.logprobs is None)
        deadline = math.inf if self._timeout_s is None else time.monotonic() + self._timeout_s
        for uid, (prompt, uid_sampling) in zip(
            uids, itertools.product(prompts, samplings), strict=True
        ):
            msg = TokenizeMsg(uid, prompt, uid_sampling, uids[0])
            self._tokenizer_of(uid).put(msg)
            stopwatch = Stopwatch(self.metrics)
            self._open[uid] = _OpenRequest(generation, stopwatch, deadline, msg)
        return generation

    def check_num_answers(self, num_prompts: int, n: int) -> None:
        """
        Raises:
            InvalidRequest: a request of so many prompts alone has more answers than may be open.
        """
        num_answers = n * num_prompts
        if num_answers > self._max_open:
            raise InvalidRequest(
                f"{num_answers} answers in one request; this server takes at most {self._max_open}",
                param=None if n == 1 else "n",
            )

    def _check_capacity(self, num_requests: int) -> None:
        if self.refusal:
            raise self.refusal
        if self.num_open + num_requests > self._max_open:
            raise QueueFull(self.num_open, self._max_open)

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool | None = None) -> list[int]:
        """The tokens of a text or a conversation; see `EncodeMsg`.

        Raises:
            RequestError: the template refuses the conversation, the text cannot fit the context, or
                too many requests are open.
            EngineFailed: the engine is gone.
        """
        reply = await self._query_tokenizer(lambda uid: EncodeMsg(uid, prompt, add_special_tokens))
        ids: list[int] = unpack_ids(reply.ids).tolist()
        return ids

    async def decode(self, ids: Sequence[int] | IntArray) -> str:
        """The text of tokens, special ones included.

        Raises:
            RequestError: an id is not of the vocabulary, or too many requests are open.
            EngineFailed: the engine is gone.
        """
        reply = await self._query_tokenizer(lambda uid: DecodeMsg(uid, pack_ids(ids)))
        return reply.text

    async def prompt_texts(self, prompts: list[Prompt]) -> list[str]:
        """The texts of prompts that are texts or ids. Raises as `decode` does."""
        texts = []
        for prompt in map(open_prompt, prompts):
            if isinstance(prompt, TokenIds):
                texts.append(await self.decode(unpack_ids(prompt.raw)))
            else:
                texts.append(str(prompt))
        return texts

    async def _query_tokenizer(
        self, make_msg: Callable[[int], EncodeMsg | DecodeMsg]
    ) -> CodecReply:
        """Send a message to a tokenizer and wait for its reply.

        If the caller is cancelled, the tokenizer drops a question that still waits there.
        """
        self._check_capacity(1)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._query_without_limit(make_msg)
        except TimeoutError:
            assert self._timeout_s is not None
            raise RequestTimeout(self._timeout_s) from None

    async def _query_without_limit(
        self, make_msg: Callable[[int], EncodeMsg | DecodeMsg]
    ) -> CodecReply:
        uid = next(self._uids)
        self._tokenizer_of(uid).put(make_msg(uid))
        self._codec_replies[uid] = asyncio.get_running_loop().create_future()
        try:
            reply = await self._codec_replies[uid]
        except asyncio.CancelledError:
            self._send_abort(uid)
            raise
        finally:
            self._codec_replies.pop(uid, None)
        if reply.error is not None:
            raise reply.error.rebuild()
        return reply

    async def flush_cache(self) -> int:
        """Drop all cached prefixes that no request uses; returns how many tokens they had.

        Raises:
            Unavailable: no request is accepted now.
            EngineFailed: the engine is gone.
        """
        if self.refusal:
            raise self.refusal
        self._tokenizers[0].put(FlushCacheMsg())
        return await self._flushes.add()

    def abort(self, uid: int) -> None:
        """Abort a request. Its remaining replies are dropped."""
        if self._open.pop(uid, None):
            self.metrics.aborts.inc()
            self._send_abort(uid)

    def _send_abort(self, uid: int) -> None:
        if self._outage is None:
            self._tokenizer_of(uid).put(AbortMsg(uid))

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
            now = time.monotonic()
            requests = self._open.values()
            for generation in {each.generation for each in requests if each.deadline < now}:
                generation.close()
                generation.fail(RequestTimeout(self._timeout_s))

    async def _deliver_replies(self) -> None:
        while True:
            msg = await self._incoming.get()
            if self._outage is not None:  # it is of an earlier epoch
                continue
            match msg:
                case BatchFrontendMsg(replies, stats):
                    if stats:
                        self.metrics.update(stats)
                        self._flushes.take(stats)
                    await self._deliver_all(replies)
                case UserReply() as refusal:
                    self._deliver(refusal)
                case CodecReply() as codec_reply:
                    self._deliver_codec_reply(codec_reply)
            if self.num_open == 0:
                collect_when_idle()
            # `get` does not wait while messages are there. Who waits for this one goes first.
            await asyncio.sleep(0)

    async def _deliver_all(self, replies: Sequence[UserReply]) -> None:
        """Deliver the replies of a step; a turn of the event loop takes a bounded number."""
        for begin in range(0, len(replies), _DELIVERIES_A_TURN):
            if begin:
                await asyncio.sleep(0)
            for reply in replies[begin : begin + _DELIVERIES_A_TURN]:
                self._deliver(reply)

    def _deliver_codec_reply(self, reply: CodecReply) -> None:
        future = self._codec_replies.get(reply.uid)
        if future and not future.done():
            future.set_result(reply)

    def _deliver(self, reply: UserReply) -> None:
        request = self._open.get(reply.uid)
        if request is None or self._outage:  # its generation was closed, or an epoch has ended
            return
        request.unanswered = None
        request.stopwatch.observe(reply)
        if reply.is_final:
            del self._open[reply.uid]
        request.generation.put(reply)

    async def drain(self, reason: str) -> None:
        """Refuse new requests, and wait until all open ones have ended."""
        self._end = Unavailable(reason)
        while self.num_open:
            await asyncio.sleep(_IDLE_CHECK_S)

    def fail(self, reason: str) -> None:
        """End every open request with an error, and refuse new ones."""
        failure = EngineFailed(reason)
        self._end = failure
        self._flushes.fail(failure)
        for generation in {request.generation for request in self._open.values()}:
            generation.fail(failure)
        self._open.clear()
        self._fail_questions(failure)

    def _fail_questions(self, error: Unavailable | EngineFailed) -> None:
        for future in self._codec_replies.values():
            if not future.done():
                future.set_exception(error)

    def suspend(self, reason: str, outage_s: int) -> None:
        """Cut the workers off, for about `outage_s` seconds; they are dead or will be killed.

        New requests are refused. Of the open ones, those that have begun to answer end with an
        error, and so do those that were sent twice; the others wait.
        """
        for queue in self._tokenizers:
            queue.drop()
        self._tokenizers = []
        self._outage = Unavailable(f"the engine starts again: {reason}", outage_s)
        self._fail_questions(self._outage)
        self._flushes.fail(self._outage)
        failure = EngineFailed(f"the engine failed: {reason}")
        requests = self._open.values()
        for generation in {each.generation for each in requests if not each.can_be_sent_again}:
            for uid in generation.uids:
                self._open.pop(uid, None)
            generation.fail(failure)

    def resume(self, tokenizers: list[PushQueue[TokenizerMsg]]) -> None:
        """Send what waits to new workers, and accept new requests."""
        self._tokenizers = tokenizers
        self._outage = None
        self.metrics.begin_epoch()
        self._flushes = _Flushes()
        waiting = self._open
        self._open = {}
        for uid, request in waiting.items():
            new_uid = next(self._uids)
            request.generation.rename(uid, new_uid)
            self._send_again(new_uid, request)

    def _send_again(self, uid: int, request: _OpenRequest) -> None:
        assert request.unanswered is not None
        request.unanswered = msgspec.structs.replace(request.unanswered, uid=uid)
        request.is_second_try = True
        self._tokenizer_of(uid).put(request.unanswered)
        self._open[uid] = request

    def shut_down(self) -> None:
        """Let the workers end, and close the queues."""
        for i, queue in enumerate(self._tokenizers):
            queue.put(ShutdownMsg(stops_scheduler=i == 0))
            queue.close()
        self._incoming.close()

    def _tokenizer_of(self, uid: int) -> PushQueue[TokenizerMsg]:
        return self._tokenizers[uid % len(self._tokenizers)]


def _seed_after(seed: int | None, i: int) -> int | None:
    """The i-th seed after a seed. The smallest follows the largest."""
    if seed is None:
        return None
    return (seed + i + MAX_SEED) % (2 * MAX_SEED + 1) - MAX_SEED
