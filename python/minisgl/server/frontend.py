"""Open requests: from a prompt to a stream of replies.

Owns the table of open uids in the API process. A request leaves it with its last reply, or when its
generation is closed, which aborts it. Everything runs in one event loop. Next to read:
`tokenizer/server.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from minisgl.core import IntArray, SamplingParams
from minisgl.errors import EngineFailed, InvalidRequest, QueueFull, RequestError
from minisgl.message import (
    AbortMsg,
    BatchFrontendMsg,
    CodecReply,
    DecodeMsg,
    EncodeMsg,
    FrontendMsg,
    Prompt,
    ShutdownMsg,
    TokenIds,
    TokenizeMsg,
    TokenizerMsg,
    UserReply,
    open_prompt,
    pack_ids,
    unpack_ids,
)
from minisgl.sampling_params import MAX_SEED
from minisgl.server.http.metrics import Metrics, Stopwatch
from minisgl.utils.mp import AsyncPullQueue, PushQueue

logger = logging.getLogger(__name__)


class Generation:
    """The replies to one API request. Each of its answers to each prompt has a uid.

    Whoever holds it must `close` it. What has not ended by then is aborted.
    """

    def __init__(self, frontend: Frontend, uids: list[int]) -> None:
        self._frontend = frontend
        self._index_of = {uid: index for index, uid in enumerate(uids)}
        self._replies: asyncio.Queue[UserReply | EngineFailed] = asyncio.Queue()
        self.error: RequestError | EngineFailed | None = None  # what `next` raised

    @property
    def has_ended(self) -> bool:
        """Whether all final replies were read."""
        return not self._index_of

    def put(self, reply: UserReply | EngineFailed) -> None:
        self._replies.put_nowait(reply)

    async def next(self) -> tuple[int, UserReply]:
        """Wait for the next reply. Its index counts prompt by prompt, each with all its answers.

        Raises:
            RequestError: a prompt is refused.
            EngineFailed: the engine died.
        """
        reply = await self._replies.get()
        if isinstance(reply, EngineFailed):
            self._index_of.clear()
            self.error = reply
            raise self.error
        index = self._index_of[reply.uid]
        if reply.is_final:
            del self._index_of[reply.uid]
        if reply.error is not None:
            self.error = reply.error.rebuild()
            raise self.error
        return index, reply

    async def __aiter__(self) -> AsyncIterator[tuple[int, UserReply]]:
        while not self.has_ended:
            yield await self.next()

    async def collect(self) -> list[tuple[int, UserReply]]:
        """All remaining replies with their indexes. Raises as `next` does."""
        return [indexed_reply async for indexed_reply in self]

    def close(self) -> None:
        """Abort what has not ended. May be called more than once."""
        for uid in self._index_of:
            self._frontend.abort(uid)
        self._index_of.clear()


class Frontend:
    """Sends prompts to the tokenizers and delivers replies to the generations that wait."""

    def __init__(
        self,
        tokenizers: list[PushQueue[TokenizerMsg]],
        replies: AsyncPullQueue[FrontendMsg],
        max_open_requests: int,
    ) -> None:
        self._tokenizers = tokenizers
        self._incoming = replies
        self._max_open = max_open_requests
        self._open: dict[int, tuple[Generation, Stopwatch]] = {}
        self._codec_replies: dict[int, asyncio.Future[CodecReply]] = {}
        self._uids = itertools.count()
        self._failure: EngineFailed | None = None
        self.metrics = Metrics()

    @property
    def max_open(self) -> int:
        """The number of requests that may be open."""
        return self._max_open

    @property
    def failure(self) -> EngineFailed | None:
        """Why no request is accepted any more, or None."""
        return self._failure

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
            EngineFailed: the engine is gone.
        """
        num_answers = n * len(prompts)
        if num_answers > self._max_open:
            raise InvalidRequest(
                f"{num_answers} answers in one request; this server takes at most {self._max_open}",
                param=None if n == 1 else "n",
            )
        self._check_capacity(num_answers)
        samplings = [replace(sampling, seed=_seed_after(sampling.seed, i)) for i in range(n)]
        uids = [next(self._uids) for _ in range(num_answers)]
        generation = Generation(self, uids)
        for uid, (prompt, uid_sampling) in zip(
            uids, itertools.product(prompts, samplings), strict=True
        ):
            self._tokenizer_of(uid).put(TokenizeMsg(uid, prompt, uid_sampling, uids[0]))
            self._open[uid] = (generation, Stopwatch(self.metrics))
        return generation

    def _check_capacity(self, num_requests: int) -> None:
        if self._failure:
            raise self._failure
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
        uid = next(self._uids)
        self._tokenizer_of(uid).put(make_msg(uid))
        self._codec_replies[uid] = asyncio.get_running_loop().create_future()
        try:
            reply = await self._codec_replies[uid]
        except asyncio.CancelledError:
            self._tokenizer_of(uid).put(AbortMsg(uid))
            raise
        finally:
            self._codec_replies.pop(uid, None)
        if reply.error is not None:
            raise reply.error.rebuild()
        return reply

    def abort(self, uid: int) -> None:
        """Abort a request. Its remaining replies are dropped."""
        if self._open.pop(uid, None) and not self._failure:
            self.metrics.aborts.inc()
            self._tokenizer_of(uid).put(AbortMsg(uid))

    async def run(self) -> None:
        """Deliver replies, for ever."""
        while True:
            match await self._incoming.get():
                case BatchFrontendMsg(replies, stats):
                    if stats:
                        self.metrics.update(stats)
                    for reply in replies:
                        self._deliver(reply)
                case UserReply() as refusal:
                    self._deliver(refusal)
                case CodecReply() as codec_reply:
                    self._deliver_codec_reply(codec_reply)

    def _deliver_codec_reply(self, reply: CodecReply) -> None:
        future = self._codec_replies.get(reply.uid)
        if future and not future.done():
            future.set_result(reply)

    def _deliver(self, reply: UserReply) -> None:
        if reply.uid not in self._open:  # its generation was closed
            return
        generation, stopwatch = self._open[reply.uid]
        stopwatch.observe(reply)
        if reply.is_final:
            del self._open[reply.uid]
        generation.put(reply)

    def fail(self, reason: str) -> None:
        """End every open request with an error, and refuse new ones."""
        self._failure = EngineFailed(reason)
        for generation in {generation for generation, _ in self._open.values()}:
            generation.put(self._failure)
        self._open.clear()
        for future in self._codec_replies.values():
            if not future.done():
                future.set_exception(self._failure)

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
