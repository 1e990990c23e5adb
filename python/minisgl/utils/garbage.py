"""When a server's process looks for garbage: not while streams wait for it.

Reference counts free nearly all that a process makes. Cycles are left to Python's collector, and a
full collection walks every container: beside torch and transformers that takes 128 to 244 ms, in
which no stream gets a token. Therefore, in a process that is ready to serve:

* Until then nothing is collected. Nearly all that a start makes stays, and to walk it again and
  again takes a tenth of the time in which torch is imported.
* What lives by then is frozen. It would live to the end, and is not walked again.
* Young objects are collected as before, in bounded portions. A step frees what it makes, so that
  they become many only while requests come.
* A full collection waits until there is nothing to do. It frees cycles that had lived too long to
  be young: of requests that failed or were cancelled, mostly.
* A process that always has something to do must not grow for ever. After very many young
  collections it makes a full one. That walks what was made since the start, which is little.
"""

from __future__ import annotations

import gc

# Containers that may be made, and not freed, before the youngest are walked.
_YOUNG = 10_000
# Such collections before their survivors are walked: 50,000 containers, some milliseconds.
_YOUNG_COLLECTIONS = 5
# Collections of survivors before a full one: five million containers.
_SURVIVOR_COLLECTIONS = 100


def start_process() -> None:
    """Collect nothing until `start_serving`."""
    gc.disable()


def start_serving() -> None:
    """Exempt all that lives now from collections; make full collections rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _YOUNG_COLLECTIONS, _SURVIVOR_COLLECTIONS)
    gc.enable()


def collect_when_idle() -> None:
    """Collect all garbage if much was made since the last time; costs nothing otherwise."""
    _, _, num_survivor_collections = gc.get_count()
    if num_survivor_collections > 0:
        gc.collect()
