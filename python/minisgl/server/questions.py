"""Questions to the tokenizers and the scheduler, such as for the tokens of a text.

Owns the open questions of an API process. Each counts as an open request. A question may be sent
twice and then be answered twice; the second answer is ignored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.core import IntArray
from minisgl.errors import EngineFailed, RequestTimeout, Unavailable
from minisgl.message import (
    CodecReply,
    DecodeMsg,
    EncodeMsg,
    FlushCacheMsg,
    Prompt,
    TokenIds,
    TokenizerMsg,
    open_prompt,
    pack_ids,
    unpack_ids,
)
from minisgl.server.acceptance import Acceptance
from minisgl.server.tokenizer_queues import TokenizerQueues


@dataclass(slots=True)
class _Question:
    """A message that waits for its answer.

    Attributes:
        is_second_try: whether it was sent again.
    """

    msg: TokenizerMsg
    answer: asyncio.Future[Any]
    is_second_try: bool = False

    def fail(self, error: Unavailable | EngineFailed) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Questions:
    """Sends questions, and keeps the open ones by their uids. Everything runs in one event loop.

    Args:
        uids: of this API process, for questions and requests.
        timeout_s: a question that takes longer ends with an error; None is no limit.
    """

    def __init__(
        self,
        tokenizers: TokenizerQueues,
        acceptance: Acceptance,
        uids: Iterator[int],
        timeout_s: float | None,
    ) -> None:
        self._tokenizers = tokenizers
        self._acceptance = acceptance
        self._uids = uids
        self._timeout_s = timeout_s
        self._open: dict[int, _Question] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool | None = None) -> list[int]:
        """The tokens of a text or a conversation; see `EncodeMsg`.

        Raises:
            RequestError: the template refuses the conversation, the text cannot fit the context, or
                too many requests are open.
            EngineFailed: the engine is gone.
        """
        reply = await self._ask_tokenizer(lambda uid: EncodeMsg(uid, prompt, add_special_tokens))
        ids: list[int] = unpack_ids(reply.ids).tolist()
        return ids

    async def decode(self, ids: Sequence[int] | IntArray) -> str:
        """The text of tokens, special ones included.

        Raises:
            RequestError: an id is not of the vocabulary, or too many requests are open.
            EngineFailed: the engine is gone.
        """
        reply = await self._ask_tokenizer(lambda uid: DecodeMsg(uid, pack_ids(ids)))
        return reply.text

    async def prompt_texts_until(self, deadline: float, prompts: list[Prompt]) -> list[str]:
        """The texts of the prompts of a request, if they come before its deadline.

        Args:
            deadline: from `Frontend.new_deadline`.

        Raises:
            RequestTimeout: they do not; otherwise as `decode`.
        """
        left_s = None if self._timeout_s is None else max(0.0, deadline - time.monotonic())
        try:
            async with asyncio.timeout(left_s):
                return await self.prompt_texts(prompts)
        except TimeoutError:
            assert self._timeout_s is not None
            raise RequestTimeout(self._timeout_s) from None

    async def prompt_texts(self, prompts: list[Prompt]) -> list[str]:
        """The texts of prompts that are texts or ids. Raises as `decode` does."""
        texts = []
        for prompt in map(open_prompt, prompts):
            if isinstance(prompt, TokenIds):
                texts.append(await self.decode(unpack_ids(prompt.raw)))
            else:
                texts.append(str(prompt))
        return texts

    async def flush_cache(self) -> int:
        """Drop all cached prefixes that no request uses; returns how many tokens they had.

        Raises:
            RequestError: too many requests are open, or no request is accepted now.
            EngineFailed: the engine is gone.
        """
        num_tokens: int = await self._ask(FlushCacheMsg)
        return num_tokens

    async def _ask_tokenizer(self, make_msg: Callable[[int], TokenizerMsg]) -> CodecReply:
        """Ask a tokenizer. If the caller is cancelled, it drops a question that still waits."""
        reply: CodecReply = await self._ask(make_msg)
        if reply.error is not None:
            raise reply.error.rebuild()
        return reply

    async def _ask(self, make_msg: Callable[[int], TokenizerMsg]) -> Any:
        """Send a question with a new uid, and wait for its answer."""
        self._acceptance.take_places(1)
        try:
            return await self._answer_to(make_msg)
        finally:
            self._acceptance.places.give_back(1)

    async def _answer_to(self, make_msg: Callable[[int], TokenizerMsg]) -> Any:
        """The answer to a question that has a place."""
        uid = next(self._uids)
        msg = make_msg(uid)
        self._tokenizers.send(uid, msg)
        question = _Question(msg, asyncio.get_running_loop().create_future())
        self._open[uid] = question
        try:
            async with asyncio.timeout(self._timeout_s):
                return await question.answer
        except asyncio.CancelledError:
            self._tokenizers.abort(uid)
            raise
        except TimeoutError:
            self._tokenizers.abort(uid)
            assert self._timeout_s is not None
            raise RequestTimeout(self._timeout_s) from None
        finally:
            del self._open[uid]

    def answer(self, uid: int, answer: object) -> None:
        """Answer a question, if it is one of this process and its client has not gone."""
        question = self._open.get(uid)
        if question and not question.answer.done():
            question.answer.set_result(answer)

    def fail(self, error: Unavailable | EngineFailed) -> None:
        """End all of them with an error."""
        for question in self._open.values():
            question.fail(error)

    def try_again(
        self, is_lost: Callable[[int, TokenizerMsg], bool], error: Unavailable
    ) -> dict[int, TokenizerMsg]:
        """Choose the questions that are to be sent again.

        Each is sent again once. If it is lost a second time, it ends with the error.

        Args:
            is_lost: whether a question may be lost, by its uid and message.
        """
        again: dict[int, TokenizerMsg] = {}
        for uid, question in self._open.items():
            if not is_lost(uid, question.msg):
                continue
            if question.is_second_try:
                question.fail(error)
            else:
                question.is_second_try = True
                again[uid] = question.msg
        return again
