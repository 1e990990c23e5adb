"""The replies to one API request, from their delivery until they are read.

Owns the replies that were delivered and not read. Everything runs in one event loop. Next to read:
`tokenizer/worker.py`, which sends the replies.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

from minisgl.errors import ClientGone, EngineFailed, InvalidRequest, RequestError, SlowReader
from minisgl.message import TextLogprobs, UserReply, join_replies
from minisgl.server.stopwatch import Stopwatch

_MAX_UNREAD = 64  # replies to a uid; they are joined then
_MAX_UNREAD_LOGPROBS = 2**17  # of a request, about 16 MiB
# Of a request's prompts, which wait for each other, and of a whole answer: about 150 MiB.
MAX_LOGPROBS = 2**20


class Generation:
    """The replies to one API request. Each of its answers to each prompt has a uid.

    A slow reader gets the text that has come for an answer as one reply. Replies with log
    probabilities are not joined, because each belongs to its piece of text; there is a limit to how
    many wait, and to how many the prompts have. The owner of a generation must `close` it. Answers
    that have not ended by then are aborted.

    It is open, and then one of these, for good:

        ended      the final reply of each answer was read
        failed     a prompt was refused, the engine has died, or a limit was passed. No reply is
                   added any more; its reader gets what is unread, and then `error`
        abandoned  the client has gone; what is unread is dropped, and its reader gets ClientGone
        broken     the function of a stream had a bug; the stream gets this exception at once

    Replies wait until they are taken. While a stream waits, each reply instead calls a function of
    the stream, so no task has to be woken for a token; see `wait_for_more`.

    Args:
        abort: is called with each uid that has not ended when the generation is closed.
        num_answers: to each prompt.
        joins_replies: whether none of them has log probabilities.

    Attributes:
        stopwatches: of its answers.
    """

    def __init__(
        self,
        abort: Callable[[int], None],
        uids: list[int],
        num_answers: int = 1,
        *,
        joins_replies: bool = True,
    ) -> None:
        self._abort = abort
        self._joins_replies = joins_replies
        self._num_answers = num_answers
        self._index_of = {uid: index for index, uid in enumerate(uids)}
        self._prompts_without_reply = set(range(len(uids) // num_answers))
        self._unread: dict[int, deque[UserReply]] = {}  # by uid, the one that waits longest first
        self._num_unread_logprobs = 0
        self._num_prompt_logprobs = 0
        self._has_changed = asyncio.Event()
        self._read: Callable[[], None] | None = None
        self._reader_bug: Exception | None = None
        # No exception is kept for it: once raised, that would refer to the frames of the reader,
        # and they to this object. Clients go often, and all of it would be left as garbage.
        self._is_abandoned = False
        self.stopwatches: list[Stopwatch] = []
        self.error: RequestError | EngineFailed | None = None  # comes after what is unread

    @property
    def has_ended(self) -> bool:
        """Whether all final replies were read; never after an error."""
        return not self._index_of and self.error is None and not self._is_abandoned

    @property
    def uids(self) -> list[int]:
        """The uids whose final reply was not read."""
        return list(self._index_of)

    def rename(self, uid: int, new_uid: int) -> None:
        """Replace a uid that has no reply yet by a new one."""
        self._index_of[new_uid] = self._index_of.pop(uid)

    def put(self, reply: UserReply) -> None:
        """Add a reply. An error ends the whole request."""
        if self.error is not None:
            return
        if reply.error is not None:
            self.fail(reply.error.rebuild())
            return
        if self._prompts_without_reply:
            self._prompts_without_reply.discard(self._index_of[reply.uid] // self._num_answers)
        unread = self._unread.setdefault(reply.uid, deque())
        unread.append(reply)
        if self._joins_replies and len(unread) >= _MAX_UNREAD:
            self._unread[reply.uid] = deque([join_replies(unread)])
        error = self._count_logprobs(reply)
        if error is not None:
            self.close()
            self.fail(error)
        if self._read is not None:
            self._call_reader(self._read)
        if self._unread or not self._index_of or self._reader_bug is not None:
            self._has_changed.set()

    def _count_logprobs(self, reply: UserReply) -> RequestError | None:
        """Count those of a reply. Returns the error if the request has too many now."""
        self._num_unread_logprobs += count_logprobs(reply.logprobs)
        if self._num_unread_logprobs > _MAX_UNREAD_LOGPROBS:
            return SlowReader(self._num_unread_logprobs, _MAX_UNREAD_LOGPROBS)
        self._num_prompt_logprobs += count_logprobs(reply.prompt_logprobs or ())
        if self._num_prompt_logprobs > MAX_LOGPROBS:
            return too_many_logprobs("its prompts")
        return None

    def _call_reader(self, read: Callable[[], None]) -> None:
        """Call the stream's function. An exception of it ends this request and no other."""
        try:
            read()
        except Exception as bug:
            self._read = None
            self._reader_bug = bug

    def fail(self, error: RequestError | EngineFailed) -> None:
        """End the request: `next` raises this after what is unread."""
        self.error = error
        self._has_changed.set()

    def abandon(self) -> None:
        """Abort what has not ended, because the client has gone: `next` raises ClientGone."""
        self.close()
        self._is_abandoned = True
        self._has_changed.set()

    async def wait_for_first_replies(self) -> None:
        """Wait until every prompt has a reply. Raises as `next` does."""
        self._raise_error()
        while self._prompts_without_reply:
            await self._wait_for_change()
            self._raise_error()

    def _raise_error(self) -> None:
        if self._is_abandoned:
            raise ClientGone
        if self.error is not None:
            raise self.error

    def unread_replies(self) -> dict[int, UserReply]:
        """A reply to each prompt, by its index, of those that wait to be read."""
        return {
            self._index_of[uid] // self._num_answers: replies[0]
            for uid, replies in self._unread.items()
        }

    async def next(self) -> tuple[int, UserReply]:
        """Wait for a reply to any of the prompts, and return its index with it.

        The index is that of the prompt times `num_answers`, plus that of the answer to it.

        Raises:
            RequestError: a prompt is refused, or its reader is far too slow.
            EngineFailed: the engine died.
            ClientGone: it was abandoned.
        """
        while not self._unread:
            self._raise_error()
            await self._wait_for_change()
        return self.take()

    async def wait_for_more(self, read: Callable[[], None]) -> None:
        """Wait until there is a reply to take, or all have ended.

        Args:
            read: is called, while this waits, as soon as a reply has come. It may take it.

        Raises:
            RequestError, EngineFailed, ClientGone: as `next`.
        """
        self._read = read
        try:
            while not self._unread and not self.has_ended:
                self._raise_error()
                await self._wait_for_change()
                if self._reader_bug is not None:
                    raise self._reader_bug
        finally:
            self._read = None

    @property
    def has_unread(self) -> bool:
        return bool(self._unread)

    def take(self) -> tuple[int, UserReply]:
        """The reply that waits longest, with its index as from `next`. There must be one."""
        uid = next(iter(self._unread))
        reply = self._take(uid)
        index = self._index_of[uid]
        if reply.is_final:
            del self._index_of[uid]
        return index, reply

    def _take(self, uid: int) -> UserReply:
        unread = self._unread.pop(uid)
        if self._joins_replies:
            return join_replies(unread)
        reply = unread.popleft()
        self._num_unread_logprobs -= count_logprobs(reply.logprobs)
        if unread:
            self._unread[uid] = unread  # behind the other answers
        return reply

    async def _wait_for_change(self) -> None:
        """Wait for a reply that is not taken at once, an error, or the end."""
        self._has_changed.clear()
        await self._has_changed.wait()

    async def __aiter__(self) -> AsyncIterator[tuple[int, UserReply]]:
        while not self.has_ended:
            yield await self.next()

    async def collect(self) -> list[tuple[int, UserReply]]:
        """All remaining replies with their indexes. Raises as `next` does."""
        return [indexed_reply async for indexed_reply in self]

    def close(self) -> None:
        """Abort what has not ended. May be called more than once."""
        for uid in self._index_of:
            self._abort(uid)
        self._index_of.clear()
        self._unread.clear()


def count_logprobs(tokens: Iterable[TextLogprobs]) -> int:
    """How many log probabilities tokens have, with those of the likeliest at their positions."""
    return sum(1 + len(token.top) for token in tokens)


def too_many_logprobs(where: str) -> InvalidRequest:
    """The error of a request whose log probabilities would take too much memory."""
    return InvalidRequest(
        f"there are more than {MAX_LOGPROBS} log probabilities in {where}, which is the limit of a "
        "request; ask for fewer of them, or in several requests",
        param="logprobs",
        code="too_many_logprobs",
    )
