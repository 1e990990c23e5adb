"""Open requests: from a prompt to a stream of replies.

Owns the table of open uids on the API server's side. A request leaves it with its last reply, or when its reader goes
away, which aborts it. Everything runs in one event loop. Next to read: `tokenizer/server.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from minisgl.core import SamplingParams
from minisgl.errors import EngineFailed, InvalidRequest, QueueFull, RequestError
from minisgl.message import (
    AbortMsg,
    BatchFrontendMsg,
    CodecReply,
    Conversation,
    DecodeMsg,
    EncodeMsg,
    FrontendMsg,
    Prompt,
    ReplyError,
    ShutdownMsg,
    TokenIds,
    TokenizeMsg,
    TokenizerMsg,
    UserReply,
    pack_ids,
    unpack_ids,
)
from minisgl.sampling_params import MAX_SEED
from minisgl.server.http.metrics import Metrics, Stopwatch
from minisgl.utils.mp import AsyncPullQueue, PushQueue

logger = logging.getLogger(__name__)


class Generation:
    """The replies of one API request, which may have several prompts, each with a uid of its own.

    Who holds it must `close` it; if it has not ended by then, that aborts it.
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
        """Wait for the next reply and its index: prompt by prompt, each with all its answers.

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
            self.error = _request_error(reply.error)
            raise self.error
        return index, reply

    async def __aiter__(self) -> AsyncIterator[tuple[int, UserReply]]:
        while not self.has_ended:
            yield await self.next()

    async def collect(self) -> list[tuple[int, UserReply]]:
        """All replies that are left, with their indexes; raises as `next` does."""
        return [news async for news in self]

    def close(self) -> None:
        """Abort what has not ended. May be called more than once."""
        for uid in self._index_of:
            self._frontend.abort(uid)
        self._index_of.clear()


class Frontend:
    """Sends prompts to the tokenizers and hands the replies to those who wait for them."""

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
        self._questions: dict[int, asyncio.Future[CodecReply]] = {}
        self._uids = itertools.count()
        self._failure: EngineFailed | None = None
        self.metrics = Metrics()

    @property
    def failure(self) -> EngineFailed | None:
        """Why no request is accepted any more, if that is so."""
        return self._failure

    @property
    def num_open(self) -> int:
        return len(self._open) + len(self._questions)

    def submit(self, prompts: list[Prompt], sampling: SamplingParams, n: int = 1) -> Generation:
        """Send a request on its way.

        Args:
            n: answers to each prompt, side by side; if there is a seed, the next ones have the seeds after it.

        Raises:
            QueueFull: too many are open.
            EngineFailed: the engine is gone.
        """
        if n * len(prompts) > self._max_open:
            raise InvalidRequest(
                f"{n * len(prompts)} answers in one request; this server takes at most {self._max_open}",
                param=None if n == 1 else "n",
            )
        self._make_sure_of_room(n * len(prompts))
        seeds = [_seed_after(sampling.seed, i) for i in range(n)]
        each = [(prompt, replace(sampling, seed=seed)) for prompt in prompts for seed in seeds]
        uids = [next(self._uids) for _ in each]
        generation = Generation(self, uids)
        for uid, (prompt, own) in zip(uids, each, strict=True):
            self._tokenizer_of(uid).put(TokenizeMsg(uid, prompt, own))
            self._open[uid] = (generation, Stopwatch(self.metrics))
        return generation

    def _make_sure_of_room(self, num_requests: int) -> None:
        if self._failure:
            raise self._failure
        if self.num_open + num_requests > self._max_open:
            raise QueueFull(self.num_open, self._max_open)

    async def encode(
        self, prompt: str | Conversation, *, add_special_tokens: bool | None = None
    ) -> list[int]:
        """The tokens of a text or a conversation; see `EncodeMsg`.

        Raises:
            RequestError: the template refuses the conversation, or too many requests are open.
            EngineFailed: the engine is gone.
        """
        reply = await self._ask(lambda uid: EncodeMsg(uid, prompt, add_special_tokens))
        ids: list[int] = unpack_ids(reply.ids).tolist()
        return ids

    async def decode(self, ids: list[int]) -> str:
        """The text of tokens, special ones included.

        Raises:
            RequestError: an id is not of the vocabulary, or too many requests are open.
            EngineFailed: the engine is gone.
        """
        return (await self._ask(lambda uid: DecodeMsg(uid, pack_ids(ids)))).text

    async def texts(self, prompts: list[Prompt]) -> list[str]:
        """What prompts of texts or ids say; raises as `decode` does."""
        ids = {
            i: unpack_ids(prompt.raw).tolist()
            for i, prompt in enumerate(prompts)
            if isinstance(prompt, TokenIds)
        }
        return [
            await self.decode(ids[i]) if i in ids else str(prompt)
            for i, prompt in enumerate(prompts)
        ]

    async def _ask(self, question: Callable[[int], EncodeMsg | DecodeMsg]) -> CodecReply:
        """Ask a tokenizer. Who stops waiting leaves nothing behind."""
        self._make_sure_of_room(1)
        uid = next(self._uids)
        self._tokenizer_of(uid).put(question(uid))
        self._questions[uid] = asyncio.get_running_loop().create_future()
        try:
            reply = await self._questions[uid]
        finally:
            self._questions.pop(uid, None)
        if reply.error is not None:
            raise _request_error(reply.error)
        return reply

    def abort(self, uid: int) -> None:
        """Give a request up; its remaining replies are dropped."""
        if self._open.pop(uid, None) and not self._failure:
            self.metrics.aborts.inc()
            self._tokenizer_of(uid).put(AbortMsg(uid))

    async def run(self) -> None:
        """Hand out replies, for ever."""
        while True:
            match await self._incoming.get():
                case BatchFrontendMsg(replies, stats):
                    if stats:
                        self.metrics.take(stats)
                    for reply in replies:
                        self._hand_out(reply)
                case UserReply() as refusal:
                    self._hand_out(refusal)
                case CodecReply() as answer:
                    self._answer(answer)

    def _answer(self, reply: CodecReply) -> None:
        question = self._questions.get(reply.uid)
        if question and not question.done():
            question.set_result(reply)

    def _hand_out(self, reply: UserReply) -> None:
        if reply.uid not in self._open:  # given up by its reader
            return
        generation, watch = self._open[reply.uid]
        watch.see(reply)
        if reply.is_final:
            del self._open[reply.uid]
        generation.put(reply)

    def fail(self, reason: str) -> None:
        """Tell every open request that there will be no answer, and refuse new ones."""
        self._failure = EngineFailed(reason)
        for generation in {generation for generation, _ in self._open.values()}:
            generation.put(self._failure)
        self._open.clear()
        for question in self._questions.values():
            if not question.done():
                question.set_exception(self._failure)

    def shut_down(self) -> None:
        """Ask the workers to end."""
        for i, queue in enumerate(self._tokenizers):
            queue.put(ShutdownMsg(pass_on=i == 0))
            queue.close()
        self._incoming.close()

    def _tokenizer_of(self, uid: int) -> PushQueue[TokenizerMsg]:
        return self._tokenizers[uid % len(self._tokenizers)]


def _seed_after(seed: int | None, i: int) -> int | None:
    """The i-th after a seed; the smallest follows the largest."""
    return None if seed is None else (seed + i + MAX_SEED) % (2 * MAX_SEED + 1) - MAX_SEED


def _request_error(error: ReplyError) -> RequestError:
    rebuilt = RequestError(error.message, param=error.param, code=error.code)
    rebuilt.status = error.status
    return rebuilt
