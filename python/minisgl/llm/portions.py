"""The prompts of one call of an `LLM`, which become messages portion by portion.

The device waits for the first portion, which is therefore small. It computes while later ones are
made. Knows nothing of steps or outputs.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from minisgl.core import IntArray, SamplingParams
from minisgl.llm.arguments import Prompt, prompt_is_named
from minisgl.message import UserMsg, pack_ids


class Portion(NamedTuple):
    """The size of a portion.

    Attributes:
        num_prompts: at most.
        num_bytes: of packed ids; the prompt that reaches it is the portion's last.
    """

    num_prompts: int
    num_bytes: int


FIRST_PORTION = Portion(32, 1 << 18)
LATER_PORTION = Portion(128, 1 << 20)


class UnpostedPrompts:
    """The prompts of a call that are not posted yet, in order.

    Args:
        uids: of the prompts, in the same order.
        ids_of: returns the token ids of a prompt.
    """

    def __init__(
        self,
        uids: Sequence[int],
        prompts: Sequence[Prompt],
        params_list: Sequence[SamplingParams],
        ids_of: Callable[[Prompt], Sequence[int] | IntArray],
    ) -> None:
        self._unposted = deque(zip(uids, prompts, params_list, strict=True))
        self._index_of = {uid: index for index, uid in enumerate(uids)}
        self._ids_of = ids_of
        self._portion = FIRST_PORTION

    @property
    def uids(self) -> list[int]:
        return [uid for uid, _, _ in self._unposted]

    def index_of(self, uid: int) -> int:
        """Which prompt of the call has a uid, whether it is posted or not."""
        return self._index_of[uid]

    def next_msgs(self) -> list[UserMsg]:
        """Make messages of the next portion. Each prompt stays here until it is posted.

        Raises:
            RequestError: a prompt is refused.
        """
        portion = self._portion
        self._portion = LATER_PORTION
        msgs: list[UserMsg] = []
        num_bytes = 0
        for uid, prompt, params in itertools.islice(self._unposted, portion.num_prompts):
            with prompt_is_named(self._index_of[uid], len(self._index_of)):
                packed = pack_ids(self._ids_of(prompt))
            msgs.append(UserMsg(uid, packed, params))
            num_bytes += len(packed)
            if num_bytes >= portion.num_bytes:
                break
        return msgs

    def forget_first(self) -> None:
        """Forget the first prompt, because it is posted."""
        self._unposted.popleft()
