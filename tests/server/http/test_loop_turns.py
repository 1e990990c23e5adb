"""How much of what waits runs in one turn of the event loop."""

from __future__ import annotations

import asyncio
from functools import partial

from minisgl.server.http.loop_turns import TurnQueue
from tests.server.harness import run


def test_a_turn_runs_a_bounded_number_and_the_order_is_kept() -> None:
    async def scenario() -> None:
        queue = TurnQueue(max_runs=3)
        ran: list[int] = []
        assert [queue.run(partial(ran.append, i)) for i in range(8)] == [True] * 3 + [False] * 5
        seen = []
        for _ in range(3):
            seen.append(len(ran))
            await asyncio.sleep(0)  # one turn
        assert seen == [3, 6, 8]
        assert ran == list(range(8))

    run(scenario())


def test_a_callback_that_raises_does_not_stop_the_others() -> None:
    async def scenario() -> None:
        errors: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, error: errors.append(error))
        queue = TurnQueue(max_runs=1)
        ran: list[int] = []
        queue.run(partial(ran.append, 0))
        queue.run(partial(int, "not a number"))
        queue.run(partial(ran.append, 1))
        for _ in range(3):
            await asyncio.sleep(0)
        assert ran == [0, 1]
        assert isinstance(errors[0]["exception"], ValueError)

    run(scenario())
