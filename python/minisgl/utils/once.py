"""Values that are made once per process, by the thread that asks first."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

ArgumentsT = TypeVarTuple("ArgumentsT")
ResultT = TypeVar("ResultT")


def made_once(make: Callable[[*ArgumentsT], ResultT]) -> Callable[[*ArgumentsT], ResultT]:
    """Cache the results of a function by its arguments, which must be hashable.

    Other threads that call meanwhile wait for the same result. `functools.cache` lets each of them
    make its own. The function may not call itself: the lock is not reentrant.
    """
    made: dict[tuple[*ArgumentsT], ResultT] = {}
    lock = threading.Lock()

    @functools.wraps(make)
    def get(*arguments: *ArgumentsT) -> ResultT:
        if arguments not in made:
            with lock:
                if arguments not in made:
                    made[arguments] = make(*arguments)
        return made[arguments]

    return get
