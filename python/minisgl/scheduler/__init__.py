"""Chooses what runs next. One `Scheduler` a rank, each with its engine.

The step and its requests:

    scheduler.py         the step: receive, plan, launch, finish, send
    step_planner.py      what a step computes
    executor.py          the methods of an engine that the scheduler calls
    live_requests.py     the life of a request, from its message to its release
    request_checks.py    which requests are refused
    prefill.py           requests that wait for admission or whose prompt is not computed yet
    request_queue.py     those that wait, in one or several orders
    decode.py            running requests
    cache.py             pages: who holds which
    prefix_groups.py     which decodes attend to a prefix together
    table.py             rows of the page table and the token pool
    outputs.py           sampled tokens become outputs: finish reasons, messages
    pacing/              how much a step computes: a budget in time
    grammars/            structured output: grammars of requests, and their matches

Other processes, and what goes to them:

    worker.py            what runs in the process of a rank
    io.py                where messages come from and go to; how ranks see the same ones
    step_digest.py       a check that all ranks plan the same step
    events.py            what happens to requests and steps; counts and a log of it
    statistics.py        numbers for /metrics
    prefill_watch.py     how long prefills take, by rank 0's clock

Read `scheduler.py` first.
"""

from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.io import FollowerLink, LeaderLink, ZmqInbox, ZmqOutbox
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.table import TableManager
from minisgl.scheduler.worker import scheduler_worker

__all__ = [
    "CacheManager",
    "FollowerLink",
    "LeaderLink",
    "Scheduler",
    "TableManager",
    "ZmqInbox",
    "ZmqOutbox",
    "scheduler_worker",
]
