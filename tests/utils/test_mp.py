"""Queues between processes: nothing is lost or reordered, and no other user can connect."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.utils.mp import (
    DETOKENIZER,
    Addresses,
    AsyncPullQueue,
    PullQueue,
    PushQueue,
    api_of,
    tokenizer_of,
    uids_of_api,
)
from minisgl.utils.private_folder import private_folder

NUM_MSGS = 100_000


@pytest.fixture
def address() -> Iterator[str]:
    with private_folder() as folder:
        yield Addresses(folder).backend


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


def test_every_queue_has_an_address_of_its_own(tmp_path: Path) -> None:
    addresses = Addresses(tmp_path, num_tokenizer=3, num_api=2)
    names = [*addresses.frontends, *addresses.peers, addresses.backend, addresses.detokenizer]
    names += [*addresses.tokenizers, addresses.rank(1), addresses.rank(2)]

    assert len(set(names)) == len(names) == 11


def test_a_successor_has_an_address_of_its_own_until_all_start_again(tmp_path: Path) -> None:
    first = Addresses(tmp_path, num_tokenizer=2)
    later = first.in_life("tokenizer-1", 1).in_life(DETOKENIZER, 2)

    assert later.tokenizers[0] == first.tokenizers[0]
    assert later.tokenizers[1] != first.tokenizers[1]
    assert later.detokenizer != first.in_life(DETOKENIZER, 1).detokenizer
    assert [later.life_of(name) for name in later.tokenizer_names] == [0, 1]
    assert (later.backend, later.frontends) == (first.backend, first.frontends)
    assert later.in_epoch(1) == first.in_epoch(1) != first


def test_a_uid_says_which_api_process_and_which_tokenizer_have_its_request() -> None:
    uids = {api: list(itertools.islice(uids_of_api(api, 3), 6)) for api in range(3)}

    assert sorted(itertools.chain(*uids.values())) == list(range(18))
    for api, its_uids in uids.items():
        assert {api_of(uid, 3) for uid in its_uids} == {api}
        assert [tokenizer_of(uid, 3, 2) for uid in its_uids] == [0, 1] * 3


def test_without_tokenizers_the_detokenizer_takes_their_messages(tmp_path: Path) -> None:
    addresses = Addresses(tmp_path)

    assert addresses.tokenizers == [addresses.detokenizer]
