"""What tokenizers and the scheduler were asked, and have not answered.

Owns the open questions of an API process. Who asks counts as an open request; that, and the queues,
are the frontend's. A question may be sent twice and then be answered twice: the second answer is
nobody's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minisgl.errors import EngineFailed, Unavailable
from minisgl.message import TokenizerMsg


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
    """Questions by their uids. Everything runs in one event loop."""

    def __init__(self) -> None:
        self._open: dict[int, _Question] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, uid: int, msg: TokenizerMsg) -> asyncio.Future[Any]:
        """Note a question that was sent, until `end`; returns what will have its answer."""
        answer = asyncio.get_running_loop().create_future()
        self._open[uid] = _Question(msg, answer)
        return answer

    def end(self, uid: int) -> None:
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
        """Those that are to be sent again. Each is once; after that it ends with the error.

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
