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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
    NewDetokenizerMsg,
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
from minisgl.server.questions import Questions
from minisgl.utils.garbage import collect_when_idle
from minisgl.utils.mp import (
    DETOKENIZER,
    Addresses,
    AsyncPullQueue,
    PushQueue,
    tokenizer_of,
    uids_of_api,
)
from minisgl.utils.shared_numbers import SharedNumbers

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


def connect_tokenizers(addresses: Addresses) -> list[PushQueue[TokenizerMsg]]:
    return [PushQueue(address, encode) for address in addresses.tokenizers]


class Frontend:
    """Sends prompts to the tokenizers and delivers replies to the generations that wait.

    Between `suspend` and `resume` there are no workers. A tokenizer or the detokenizer may be
    replaced while the others go on. What is sent again has a new uid, so that a reply to the old
    one is nobody's. Aborts may be lost with a tokenizer; such a reply aborts its request again.

    Args:
        max_open_requests: in all API processes.
        request_timeout_s: a request that takes longer ends with an error; None is no limit.
        api, num_api: which of how many API processes this is.
        shared: numbers that all of them share.
    """

    def __init__(
        self,
        tokenizers: list[PushQueue[TokenizerMsg]],
        replies: AsyncPullQueue[FrontendMsg],
        max_open_requests: int,
        request_timeout_s: float | None = None,
        *,
        api: int = 0,
        num_api: int = 1,
        shared: SharedNumbers | None = None,
    ) -> None:
        self._tokenizers = tokenizers
        self._incoming = replies
        self._max_open = max_open_requests
        self._timeout_s = request_timeout_s
        self._open: dict[int, _OpenRequest] = {}
        self._questions = Questions()
        self._first_safe_uid = 0  # messages about smaller ones may be lost with a dead worker
        self._strays: set[int] = set()  # uids that are nobody's, and were aborted once more
        self._num_api = num_api
        self._uids = uids_of_api(api, num_api)
        self._shared = shared or SharedNumbers()
        self._num_open_in_all = self._shared.array("open-requests", 1)
        # Each refused request gets an error of its own: one that is raised again keeps the frames
        # of all who raised it, and what is in them.
        self._end: Callable[[], Unavailable | EngineFailed] | None = None  # of the server
        self._outage: Callable[[], Unavailable] | None = None  # while there are no workers
        self.metrics = Metrics()

    @property
    def max_open(self) -> int:
        """The number of requests that may be open."""
        return self._max_open

    @property
    def refusal(self) -> Unavailable | EngineFailed | None:
        """An error, each time a new one, that says why no request is accepted now; or None."""
        make_error = self._end or self._outage
        return make_error and make_error()

    @property
    def num_open(self) -> int:
        """Requests and questions that are open in this process."""
        return len(self._open) + len(self._questions)

    @property
    def num_open_in_all(self) -> int:
        """Those that are open in all API processes."""
        return int(self._num_open_in_all[0])

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
        self._take_places(num_answers)
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
            generation.stopwatches.append(stopwatch)
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

    def _take_places(self, number: int) -> None:
        """Count requests or questions as open, if there may be so many more."""
        if self.refusal:
            raise self.refusal
        with self._shared.locked():
            if self.num_open_in_all + number > self._max_open:
                raise QueueFull(self.num_open_in_all, self._max_open)
            self._num_open_in_all[0] += number

    def _give_places_back(self, number: int) -> None:
        with self._shared.locked():
            self._num_open_in_all[0] -= number

    def _close(self, uid: int) -> bool:
        """Count a request as open no more; returns whether it was."""
        if self._open.pop(uid, None) is None:
            return False
        self._give_places_back(1)
        return True

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

    async def _query_tokenizer(self, make_msg: Callable[[int], TokenizerMsg]) -> CodecReply:
        """Ask a tokenizer. If the caller is cancelled, it drops a question that still waits."""
        reply: CodecReply = await self._ask(make_msg)
        if reply.error is not None:
            raise reply.error.rebuild()
        return reply

    async def flush_cache(self) -> int:
        """Drop all cached prefixes that no request uses; returns how many tokens they had.

        Raises:
            RequestError: too many requests are open, or no request is accepted now.
            EngineFailed: the engine is gone.
        """
        num_tokens: int = await self._ask(FlushCacheMsg)
        return num_tokens

    async def _ask(self, make_msg: Callable[[int], TokenizerMsg]) -> Any:
        """Send a question with a new uid, and wait for its answer."""
        self._take_places(1)
        uid = next(self._uids)
        msg = make_msg(uid)
        self._tokenizer_of(uid).put(msg)
        answer = self._questions.begin(uid, msg)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except asyncio.CancelledError:
            self._send_abort(uid)
            raise
        except TimeoutError:
            self._send_abort(uid)
            assert self._timeout_s is not None
            raise RequestTimeout(self._timeout_s) from None
        finally:
            self._questions.end(uid)
            self._give_places_back(1)

    def abort(self, uid: int) -> None:
        """Abort a request. Its remaining replies are dropped."""
        if self._close(uid):
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
                        self._take_stats(stats)
                    await self._deliver_all(replies)
                case UserReply() as refusal:
                    self._deliver(refusal)
                case CodecReply(uid) as codec_reply:
                    self._questions.answer(uid, codec_reply)
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

    def _take_stats(self, stats: EngineStats) -> None:
        if self._outage is None:  # else it comes from a scheduler that is dead
            self.metrics.update(stats)
        for uid, num_tokens in stats.flushes:
            self._questions.answer(uid, num_tokens)

    def _deliver(self, reply: UserReply) -> None:
        request = self._open.get(reply.uid)
        if self._outage is not None:  # an epoch has ended
            return
        if request is None:  # its generation was closed, or it has another uid
            self._drop_stray(reply)
            return
        request.unanswered = None
        request.stopwatch.observe(reply)
        if reply.is_final:
            self._close(reply.uid)
        request.generation.put(reply)

    def _drop_stray(self, reply: UserReply) -> None:
        """Abort whose reply it is once more, if its abort may be lost."""
        uid = reply.uid
        if reply.is_final:
            self._strays.discard(uid)
        elif uid < self._first_safe_uid and uid not in self._strays:
            self._strays.add(uid)
            self._send_abort(uid)

    def refuse(self, reason: str) -> None:
        """Refuse new requests; open ones go on."""
        self._end = partial(Unavailable, reason)

    async def drained(self) -> None:
        """Wait until no request is open, in any API process."""
        while self.num_open_in_all:
            await asyncio.sleep(_IDLE_CHECK_S)

    def fail(self, reason: str) -> None:
        """End every open request with an error, and refuse new ones."""
        self._end = partial(EngineFailed, reason)
        failure = EngineFailed(reason)
        for generation in {request.generation for request in self._open.values()}:
            generation.fail(failure)
        for uid in list(self._open):
            self._close(uid)
        self._questions.fail(failure)

    def suspend(self, reason: str, outage_s: int) -> None:
        """Cut the workers off, for about `outage_s` seconds; they are dead or will be killed.

        New requests are refused. Of the open ones, those that have begun to answer end with an
        error, and so do those that were sent twice; the others wait.
        """
        for queue in self._tokenizers:
            queue.drop()
        self._tokenizers = []
        self._outage = partial(Unavailable, f"the engine starts again: {reason}", outage_s)
        self._questions.fail(self._outage())
        self.metrics.end_epoch()
        failure = EngineFailed(f"the engine failed: {reason}")
        self._end_lost(self._open.values(), failure)

    def _end_lost(self, requests: Iterable[_OpenRequest], failure: EngineFailed) -> None:
        """End those of lost requests that cannot be sent again."""
        for generation in {each.generation for each in requests if not each.can_be_sent_again}:
            for uid in generation.uids:
                if self._close(uid):
                    self._send_abort(uid)
            generation.fail(failure)

    def resume(self, tokenizers: list[PushQueue[TokenizerMsg]]) -> None:
        """Send what waits to new workers, and accept new requests."""
        self._tokenizers = tokenizers
        self._outage = None
        waiting = self._open
        self._open = {}
        for uid, request in waiting.items():
            self._send_again(uid, request)

    def _send_again(self, uid: int, request: _OpenRequest) -> None:
        """Send a request that had this uid, with a new one."""
        new_uid = next(self._uids)
        request.generation.rename(uid, new_uid)
        assert request.unanswered is not None
        request.unanswered = msgspec.structs.replace(request.unanswered, uid=new_uid)
        request.is_second_try = True
        self._tokenizer_of(new_uid).put(request.unanswered)
        self._open[new_uid] = request

    def replace_worker(self, name: str, addresses: Addresses, reason: str) -> None:
        """Go on with the successor of a tokenizer or the detokenizer, which has failed.

        Requests without a reply that may be lost with it are aborted and sent again, as if they
        were new. With the detokenizer answers are lost that have begun; they end with an error.

        Args:
            addresses: with the successor's.
        """
        has_detokenizer = name == DETOKENIZER
        numbers = {i for i, each in enumerate(addresses.tokenizer_names) if each == name}
        for number in numbers:
            self._tokenizers[number].drop()
            self._tokenizers[number] = PushQueue(addresses.tokenizers[number], encode)
        for queue in self._tokenizers:
            queue.put(NewDetokenizerMsg(addresses.life_of(DETOKENIZER)))
        self._first_safe_uid = next(self._uids)
        self._strays.clear()
        lost = list(self._open) if has_detokenizer else self._waiting_in(numbers)
        failure = f"a worker failed: {reason}"
        self._send_lost_again(lost, EngineFailed(failure))

        def is_lost(uid: int, msg: TokenizerMsg) -> bool:
            is_flush = isinstance(msg, FlushCacheMsg)  # its answer comes through the detokenizer
            return self._number_of(uid) in numbers or (has_detokenizer and is_flush)

        for uid, msg in self._questions.try_again(is_lost, Unavailable(failure)).items():
            self._tokenizer_of(uid).put(msg)

    def _waiting_in(self, numbers: set[int]) -> list[int]:
        """The requests without a reply whose way is through these tokenizers."""
        waiting = (uid for uid, request in self._open.items() if request.unanswered is not None)
        return [uid for uid in waiting if self._number_of(uid) in numbers]

    def _send_lost_again(self, uids: list[int], failure: EngineFailed) -> None:
        """Send requests again that may be lost, or end them if that cannot be."""
        self._end_lost([self._open[uid] for uid in uids], failure)
        for uid in uids:
            request = self._open.pop(uid, None)
            if request is not None:
                self._send_abort(uid)
                self._send_again(uid, request)

    def shut_down(self) -> None:
        """Let the workers end, and close the queues."""
        for i, queue in enumerate(self._tokenizers):
            queue.put(ShutdownMsg(stops_scheduler=i == 0))
        self.close()

    def close(self) -> None:
        """Close the queues; the workers go on."""
        for queue in self._tokenizers:
            queue.close()
        self._incoming.close()

    def _tokenizer_of(self, uid: int) -> PushQueue[TokenizerMsg]:
        return self._tokenizers[self._number_of(uid)]

    def _number_of(self, uid: int) -> int:
        return tokenizer_of(uid, self._num_api, len(self._tokenizers))


def _seed_after(seed: int | None, i: int) -> int | None:
    """The i-th seed after a seed. The smallest follows the largest."""
    if seed is None:
        return None
    return (seed + i + MAX_SEED) % (2 * MAX_SEED + 1) - MAX_SEED
