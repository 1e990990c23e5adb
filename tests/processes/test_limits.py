"""Limits of a process, and of a block: they end what takes too much, and nothing beside it."""

from __future__ import annotations

import math
import mmap
import resource
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from minisgl.processes import limits
from minisgl.processes.limits import OUT_OF_TIME, bounded, memory_bytes
from minisgl.processes.queues import PullQueue, PushQueue

NUM_BYTES = 2**26
NUM_MSGS = 4
MSG_BYTES = 2**25


def loop(cpu_s: float = math.inf) -> None:
    """Use time of a processor."""
    end_s = time.process_time() + cpu_s
    while time.process_time() < end_s:
        pass


def test_a_process_with_a_lower_limit_of_its_own_keeps_it() -> None:
    """As after `ulimit -v`. Nor does it keep its parent's mind about the signal."""
    program = """
import resource, signal
from minisgl.processes.limits import OUT_OF_TIME, limit_this_process

signal.signal(OUT_OF_TIME, signal.SIG_IGN)
own = 2**30
resource.setrlimit(resource.RLIMIT_AS, (own, own))
limit_this_process(0.1, 2**31)
assert resource.getrlimit(resource.RLIMIT_AS) == (own, own)
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
while True:
    pass
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-OUT_OF_TIME, "")


def test_a_block_lowers_the_limit_of_its_process_for_a_time_and_never_raises_it() -> None:
    """Beyond the hard one the system would refuse it. In a process of its own: it would stay."""
    program = """
import resource
from minisgl.processes.limits import bounded

before = resource.getrlimit(resource.RLIMIT_AS)
with bounded(60.0, 2**26):
    assert resource.getrlimit(resource.RLIMIT_AS) != before
assert resource.getrlimit(resource.RLIMIT_AS) == before
for own in ((2**30, resource.RLIM_INFINITY), (2**30, 2**30)):
    resource.setrlimit(resource.RLIMIT_AS, own)
    with bounded(60.0, 2**31):
        assert resource.getrlimit(resource.RLIMIT_AS) == own
    assert resource.getrlimit(resource.RLIMIT_AS) == own
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_block_that_takes_memory_bit_by_bit_is_ended() -> None:
    held: list[mmap.mmap] = []  # bytes could lie where something was freed before
    reason = "it takes more than 64 MiB of memory"
    with pytest.raises(MemoryError, match=reason), bounded(60.0, NUM_BYTES):
        while True:
            held.append(mmap.mmap(-1, 2**16))
            sum(range(10**4))  # some time, as a template takes for so much
    assert NUM_BYTES / 2 < len(held) * 2**16 < 4 * NUM_BYTES


@pytest.mark.parametrize("error", [None, KeyError])
def test_a_block_leaves_no_limits(error: type[Exception] | None) -> None:
    limit = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.getsignal(OUT_OF_TIME)
    try:
        with bounded(60.0, NUM_BYTES):
            assert signal.getitimer(signal.ITIMER_PROF)[0] > 0
            if error is not None:
                raise error
    except KeyError:
        pass
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert signal.getsignal(OUT_OF_TIME) == handler
    assert resource.getrlimit(resource.RLIMIT_AS) == limit


def test_a_block_that_is_ended_is_not_hit_again_while_it_cleans_up() -> None:
    has_cleaned_up = False
    reason = r"it takes more than 0\.1 s of a processor"
    with pytest.raises(TimeoutError, match=reason), bounded(0.1, NUM_BYTES):
        try:
            loop()
        finally:
            loop(0.2)
            has_cleaned_up = True
    assert has_cleaned_up


def test_code_that_swallows_its_errors_is_ended_all_the_same() -> None:
    errors: list[TimeoutError] = []
    with pytest.raises(TimeoutError), bounded(0.1, NUM_BYTES):
        for _ in range(2):
            try:
                loop(5.0)
            except TimeoutError as error:
                errors.append(error)
        loop(5.0)
    assert len(errors) == 2


def test_a_block_has_the_time_that_its_limit_says() -> None:
    start_s = time.process_time()
    with pytest.raises(TimeoutError), bounded(0.4, NUM_BYTES):
        loop(5.0)
    assert 0.4 <= time.process_time() - start_s < 0.7


def test_the_time_of_threads_of_a_block_counts() -> None:
    thread = threading.Thread(target=loop, args=(1.0,))
    with pytest.raises(TimeoutError), bounded(0.1, 2**30):  # its stack and its heap count, too
        thread.start()
        while thread.is_alive():
            thread.join(0.01)
    thread.join()


def test_pages_of_files_are_not_memory_of_a_process(tmp_path: Path) -> None:
    """A library whose code is used for the first time is no memory of a grammar."""
    path = tmp_path / "file"
    path.write_bytes(bytes(NUM_BYTES))
    num_bytes = memory_bytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        assert sum(pages[:: mmap.PAGESIZE]) == 0
        assert memory_bytes() - num_bytes < NUM_BYTES / 2
    with mmap.mmap(-1, NUM_BYTES, flags=mmap.MAP_PRIVATE) as pages:
        pages[:: mmap.PAGESIZE] = b"x" * (NUM_BYTES // mmap.PAGESIZE)
        assert memory_bytes() - num_bytes > NUM_BYTES / 2


def _send(address: str) -> None:
    queue = PushQueue[bytes](address, bytes)
    for i in range(NUM_MSGS):
        queue.put(bytes([i]) * MSG_BYTES)
    queue.close()


def test_messages_that_come_while_a_block_has_taken_its_memory_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of libzmq reads them: without memory it drops them, and their connection."""
    monkeypatch.setattr(limits, "_CHECK_S", 60.0)  # a look would end the block meanwhile
    address = f"ipc://{tmp_path}/queue"
    queue = PullQueue(address, lambda raw: (raw[0], len(raw)))
    sender = get_context("spawn").Process(target=_send, args=(address,))
    try:
        with bounded(60.0, NUM_BYTES):
            held = mmap.mmap(-1, NUM_BYTES - 2**22)
            sender.start()
            sender.join()
            held.close()
        assert [queue.get() for _ in range(NUM_MSGS)] == [(i, MSG_BYTES) for i in range(NUM_MSGS)]
    finally:
        queue.close()
