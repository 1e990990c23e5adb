"""When a process collects garbage: not while streams wait for it.

Reference counts free nearly all that a process makes. Cycles are left to Python's collector, and a
full collection walks every container: with torch and transformers imported that takes 128 to
244 ms, in which no stream gets a token. Therefore, in a process that serves:

* During the start nothing is collected; in the first API process, not while it imports. Nearly all
  that a start makes stays, and walking it again and again takes a tenth of the time in which torch
  is imported.
* Objects that live when the process is ready are frozen. They would live to the end, and are not
  walked again.
* Young objects are collected as before, in bounded portions. A step frees its own objects, so their
  number grows only while requests come.
* A full collection waits until there is nothing to do. It frees cycles that have survived young
  collections, mostly those of requests that failed or were cancelled.
* Each connection that a client closes leaves a cycle, because asyncio's transports refer to
  themselves. A process that has connections collects young objects five times as often. Otherwise
  the waiting objects would be megabytes, and look like a leak for many minutes.
* A process that always has something to do must not grow forever. After very many young
  collections it makes a full one. That walks only objects made since the start, which are few.

An `LLM` works in a process that is not its own, where Python decides when to collect. There it only
exempts the objects that live when it is ready (`keep_what_lives`), and lets collections wait for
the end of a step (`collect_later`). Otherwise each batch of prompts would be walked before its
first step: a list has thousands of ids, and is young.
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
# More than Python exempts itself (375 objects in Python 3.12), and fewer than any other exemption:
# an interpreter alone has thousands.
_PYTHONS_OWN = 1_000


def start_process() -> None:
    """Collect nothing until `start_serving`."""
    gc.disable()


@contextmanager
def keep_imports() -> Iterator[None]:
    """Import modules within: no collection walks their objects, neither meanwhile nor later.

    Walking torch's takes 0.1 s, and an engine collects several times as it starts. Walking those of
    the HTTP server again and again takes a fifth of its import.
    """
    with collect_later():
        yield
        gc.freeze()


@contextmanager
def keep_what_lives() -> Iterator[None]:
    """Exempt all objects that live now from collections, until the end, or until this is dropped.

    Where objects are exempt already, nothing changes: only the code that did that knows when to
    end it.
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
    """Defer automatic collections to the end; nothing changes where they are switched off."""
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()  # an interrupt just after this must not leave it so
        yield
    finally:
        gc.enable()


def start_serving(*, has_connections: bool = False) -> None:
    """Exempt all objects that live now from collections; make full collections rare.

    Args:
        has_connections: whether clients open and close connections of this process.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*(_THRESHOLDS_WITH_CONNECTIONS if has_connections else _THRESHOLDS))
    gc.enable()


def collect_when_idle() -> None:
    """Collect all garbage if many objects were made since the last time; free otherwise."""
    _, _, num_survivor_collections = gc.get_count()
    if num_survivor_collections > 0:
        gc.collect()
