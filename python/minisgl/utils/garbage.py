"""When a process collects garbage: not while streams wait for it.

Reference counts free nearly all that a process makes. Cycles are left to Python's collector, and a
full collection walks every container: beside torch and transformers that takes 128 to 244 ms, in
which no stream gets a token. Therefore, in a process that is ready to serve:

* Until then nothing is collected. Nearly all that a start makes stays, and walking it again and
  again takes a tenth of the time in which torch is imported.
* What lives by then is frozen. It would live to the end, and is not walked again.
* Young objects are collected as before, in bounded portions. A step frees what it makes, so that
  they become many only while requests come.
* A full collection waits until there is nothing to do. It frees cycles that had lived too long to
  be young: of requests that failed or were cancelled, mostly.
* Each connection that a client closes leaves a cycle, because asyncio's transports refer to
  themselves. A process that has connections collects young objects five times as often. Otherwise
  the waiting objects would be megabytes, and look like a leak for many minutes.
* A process that always has something to do must not grow for ever. After very many young
  collections it makes a full one. That walks what was made since the start, which is little.

An `LLM` works in a process that is not its own, where Python decides when to collect. There it only
exempts what lives when it is ready (`keep_what_lives`), and lets collections wait for the end of a
step (`collect_later`). Otherwise each batch of prompts would be walked before its first step: a
list has thousands of ids, and is young.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# The first number: containers that may be made, and not freed, before the youngest are walked. The
# second: such collections before their survivors are walked, which takes some milliseconds at most.
# The third: collections of survivors before a full one, after five million containers.
_THRESHOLDS = (10_000, 5, 100)
_THRESHOLDS_WITH_CONNECTIONS = (2_000, 5, 500)
# More than Python exempts itself, 375 objects in Python 3.12, and less than anyone else does: an
# interpreter alone has thousands.
_PYTHONS_OWN = 1_000


def start_process() -> None:
    """Collect nothing until `start_serving`."""
    gc.disable()


def keep_imports() -> None:
    """Exempt from collections what lives now, which is what was imported.

    To walk torch takes 0.1 s, and an engine that starts collects several times.
    """
    gc.freeze()


@contextmanager
def keep_what_lives() -> Iterator[None]:
    """Exempt from collections what lives now, until the end, or until this is dropped.

    Where something is exempt already, nothing changes: who did that can tell when it ends.
    """
    if gc.get_freeze_count() > _PYTHONS_OWN:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def collect_later() -> Iterator[None]:
    """Let automatic collections wait for the end; nothing changes where they are switched off."""
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()  # an interrupt just behind this must not leave it so
        yield
    finally:
        gc.enable()


def start_serving(*, has_connections: bool = False) -> None:
    """Exempt all that lives now from collections; make full collections rare.

    Args:
        has_connections: whether clients open and close connections of this process.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*(_THRESHOLDS_WITH_CONNECTIONS if has_connections else _THRESHOLDS))
    gc.enable()


def collect_when_idle() -> None:
    """Collect all garbage if much was made since the last time; costs nothing otherwise."""
    _, _, num_survivor_collections = gc.get_count()
    if num_survivor_collections > 0:
        gc.collect()
