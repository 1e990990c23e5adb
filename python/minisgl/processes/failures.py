"""Which child has failed first, and why: it died, or it hung and is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait

from minisgl.processes.child_process import ChildProcess

TICK_S = 0.5  # between two looks at a beat
_SPREAD_TICKS = 3  # after which those that wait for a child that hangs have stopped, too


@dataclass(frozen=True, slots=True)
class Failure:
    """A child that died or hung: its name, and what happened, as a clause.

    Attributes:
        is_at_start: whether it was not ready yet.
    """

    name: str
    reason: str
    is_at_start: bool = False


def sentinels_of(children: Iterable[ChildProcess]) -> list[int]:
    """A descriptor for each child, which can be read when the child has died."""
    return [child.process.sentinel for child in children]


def dead_children(children: Iterable[ChildProcess]) -> list[ChildProcess]:
    listed = list(children)
    dead = set(wait(sentinels_of(listed), timeout=0))
    return [child for child in listed if child.process.sentinel in dead]


def first_death(children: Iterable[ChildProcess]) -> ChildProcess:
    """The child that probably died first, of which at least one has died.

    Others may have failed since, because they need it. A child that was killed comes before one
    that failed, since what lacks another child fails. Of those that failed, one that can explain
    its failure comes first.
    """
    return min(dead_children(children), key=_order_of_death)


def _order_of_death(child: ChildProcess) -> tuple[int, bool]:
    child.look_for_reports()
    return child.exit_code(), not (child.failure and child.failure.is_explained)


async def next_failure(
    children: Mapping[str, ChildProcess],
    hang_timeout_s: float,
    start_timeout_s: float,
    at_tick: Callable[[], None],
) -> Failure:
    """Wait until a child dies, or hangs for `hang_timeout_s` and is killed.

    Children may be starting. This function reads their reports: a report of a failure gives its
    reason, any other says that the child is ready. Time counts only while this process runs too: a
    machine may sleep.

    Args:
        children: by name; there may be others after a call of `at_tick`.
        start_timeout_s: until a child that is starting must be ready.
        at_tick: is called twice a second.
    """
    hang_reasons: dict[str, str] = {}
    while not dead_children(children.values()):
        await _wait_for_a_death(children.values())
        for child in children.values():
            child.look_for_reports()
            child.tick()
            limit_s = start_timeout_s if child.is_starting else hang_timeout_s
            if child.num_still_ticks * TICK_S >= limit_s:
                names = " and ".join(_still_beside(child, children.values()))
                hang_reasons[child.name] = f"{names} did nothing for {limit_s:g} s"
                child.process.kill()
        at_tick()
    first = first_death(children.values())
    reason = hang_reasons.get(first.name) or first.describe_death()
    return Failure(first.name, reason, first.is_starting)


async def _wait_for_a_death(children: Iterable[ChildProcess]) -> None:
    """Return after a tick at the latest."""
    loop = asyncio.get_running_loop()
    has_died = asyncio.Event()
    sentinels = sentinels_of(children)
    for sentinel in sentinels:
        loop.add_reader(sentinel, has_died.set)
    try:
        async with asyncio.timeout(TICK_S):
            await has_died.wait()
    except TimeoutError:
        pass
    finally:
        for sentinel in sentinels:
            loop.remove_reader(sentinel)


def _still_beside(hung: ChildProcess, children: Iterable[ChildProcess]) -> list[str]:
    """The names of the children that stand still since about the same time.

    Ranks wait for one that hangs, so any of them may be the one.
    """
    since = hung.num_still_ticks - _SPREAD_TICKS
    alike = [child for child in children if child.is_starting == hung.is_starting]
    return [child.name for child in alike if child.num_still_ticks > since]
