"""Queues between processes: nothing is lost or reordered, and readers wait as they say."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minisgl.processes.addresses import Addresses
from minisgl.processes.private_folder import private_folder
from minisgl.processes.queues import AsyncPullQueue, PullQueue, PushQueue
from tests.utils.test_threads import no_thread

NUM_MSGS = 100_000


@pytest.fixture
def address() -> Iterator[str]:
    with private_folder() as folder:
        yield Addresses(folder).scheduler


def to_bytes(number: int) -> bytes:
    return number.to_bytes(8, "little")


def from_bytes(raw: bytes) -> int:
    return int.from_bytes(raw, "little")


def test_nothing_is_lost_or_reordered_if_the_reader_comes_late(address: str) -> None:
    push = PushQueue(address, to_bytes)
    for number in range(NUM_MSGS):
        push.put(number)
    pull = PullQueue(address, from_bytes)

    assert [pull.get() for _ in range(NUM_MSGS)] == list(range(NUM_MSGS))
    push.close()
    pull.close()


def test_nothing_is_lost_if_the_reader_is_slow(address: str) -> None:
    """More than any default high-water mark is on its way before the reader looks."""
    push = PushQueue(address, to_bytes)
    pull = PullQueue(address, from_bytes)
    for number in range(NUM_MSGS // 5):
        push.put(number)
    got: list[int] = []
    while len(got) < NUM_MSGS // 5:
        got += pull.drain(block=True)

    assert got == list(range(NUM_MSGS // 5))
    push.close()
    pull.close()


def test_each_writer_is_read_in_its_own_order(address: str) -> None:
    pull = PullQueue(address, from_bytes)
    writers = [PushQueue(address, to_bytes) for _ in range(3)]
    for number in range(1000):
        for i, push in enumerate(writers):
            push.put(3 * number + i)
    got = [pull.get() for _ in range(3000)]

    for i, push in enumerate(writers):
        assert [number for number in got if number % 3 == i] == list(range(i, 3000, 3))
        push.close()
    pull.close()


def test_what_was_put_leaves_even_if_the_writer_closes_at_once(address: str) -> None:
    pull = PullQueue(address, from_bytes)
    push = PushQueue(address, to_bytes)
    for number in range(1000):
        push.put(number)
    push.close()

    assert [pull.get() for _ in range(1000)] == list(range(1000))
    pull.close()


def test_a_writer_without_a_reader_closes_in_bounded_time(address: str) -> None:
    push = PushQueue(address, to_bytes)
    push.put(1)
    closing = threading.Thread(target=push.close, daemon=True)
    closing.start()
    closing.join(timeout=10)

    assert not closing.is_alive()


def test_drain_waits_only_if_it_may_block(address: str) -> None:
    pull = PullQueue(address, from_bytes)
    push = PushQueue(address, to_bytes)
    assert pull.drain() == []

    threading.Timer(0.05, push.put, [1]).start()
    assert pull.drain(block=True) == [1]
    push.close()
    pull.close()


def test_an_event_loop_reads_in_order_and_is_not_blocked(address: str) -> None:
    async def main() -> list[int]:
        pull = AsyncPullQueue(address, from_bytes)
        first = asyncio.ensure_future(pull.get())
        await asyncio.sleep(0)  # the reader waits and the loop still turns
        push = PushQueue(address, to_bytes)
        for number in range(100):
            push.put(number)
        got = [await first] + [await pull.get() for _ in range(99)]
        push.close()
        pull.close()
        return got

    assert asyncio.run(asyncio.wait_for(main(), timeout=20)) == list(range(100))


@pytest.mark.parametrize("kind", [PushQueue, PullQueue, AsyncPullQueue])
def test_without_threads_a_queue_raises_where_libzmq_would_abort(
    kind: Callable[[str, Callable[[Any], Any]], object],
    address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        kind(address, to_bytes)
