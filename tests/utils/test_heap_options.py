"""The C library's heap. Each test has a process of its own: what is set holds for all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_freed_memory_is_kept_for_the_next_allocation() -> None:
    script = """
import ctypes, resource
from minisgl.utils.heap import keep_freed_memory
keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def touch():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(ctypes.c_size_t(2**24))
    ctypes.memset(block, 1, 2**24)
    libc.free(ctypes.c_void_p(block))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first, second = touch(), touch()
assert first > 4 * second and second < 100, (first, second)
"""
    run(script)


@pytest.mark.parametrize("uses_one", [True, False])
def test_threads_share_one_heap(uses_one: bool) -> None:
    script = f"""
import ctypes, threading
from minisgl.utils.heap import use_one_heap
if {uses_one}:
    use_one_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
kept = []
threads = [
    threading.Thread(target=lambda: kept.append(libc.malloc(ctypes.c_size_t(10_000))))
    for _ in range(4)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.fopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
"""
    num_heaps = run(script).count("<heap ")
    assert (num_heaps == 1) == uses_one


def test_gaps_between_blocks_go_back_to_the_kernel() -> None:
    script = """
import ctypes, resource, time
from minisgl.utils.heap import return_free_memory_regularly

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
blocks = [libc.malloc(ctypes.c_size_t(10_000)) for _ in range(6_000)]
for block in blocks:
    ctypes.memset(block, 1, 10_000)
before = resident()
for block in blocks[1::2]:
    libc.free(ctypes.c_void_p(block))
assert resident() > before - 5_000_000, "the blocks between them keep the gaps"
return_free_memory_regularly(every_s=0.01)
deadline = time.monotonic() + 30
while resident() > before - 10_000_000:
    assert time.monotonic() < deadline, (before, resident())
    time.sleep(0.01)
"""
    run(script)
