"""Errors of children, as their supervisor raises them."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import multiprocessing.heap
import multiprocessing.util
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

from minisgl.errors import ConfigError, EngineFailed
from minisgl.processes.child import Assignment, Ready, StartupReport
from minisgl.processes.failures import TICK_S, Failure
from minisgl.processes.supervisor import _CONFIRMATION_TIMEOUT_S, Supervisor
from tests.processes.orphans import ends_with_its_program


def fails(ready: Ready) -> None:
    raise RuntimeError("the consequence")


def refuses(ready: Ready) -> None:
    raise ConfigError("the cause")


def fails_when_ready(ready: Ready) -> None:
    ready(StartupReport())
    raise RuntimeError("the consequence")


def finds_the_cause(ready: Ready) -> None:
    ready(StartupReport())
    raise EngineFailed("the cause")


def waits(ready: Ready) -> None:
    ready(StartupReport())
    signal.pause()


@contextmanager
def two_children() -> Iterator[Supervisor]:
    with Supervisor("CRITICAL") as supervisor:
        for name in ("one", "two"):
            supervisor.start(name, f"{__name__}:waits")
        supervisor.wait_ready(60)
        yield supervisor


def end(name: str, number: signal.Signals) -> None:
    (child,) = (each for each in multiprocessing.active_children() if each.name == name)
    assert child.pid
    os.kill(child.pid, number)


def assert_all_end() -> None:
    for child in multiprocessing.active_children():
        child.join(60)
    assert multiprocessing.active_children() == []


def test_children_outlive_the_thread_that_asks_for_them() -> None:
    """The kernel kills a child at the end of the thread that has started it."""
    with Supervisor("CRITICAL") as supervisor:

        def start_one() -> None:
            supervisor.start("one", f"{__name__}:waits")
            supervisor.wait_ready(60)

        thread = threading.Thread(target=start_one)
        thread.start()
        thread.join()
        (child,) = multiprocessing.active_children()
        child.join(0.5)
        assert child.is_alive()
        end("one", signal.SIGKILL)
    assert_all_end()


FIRST_CHILD = """
import multiprocessing, os, signal
from minisgl.processes.supervisor import Supervisor

def send_both():
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child.pid, number)

with Supervisor("CRITICAL") as supervisor:
    supervisor.start("one", "tests.processes.test_supervisor:waits")
    [child] = multiprocessing.active_children()
    send_both()
    supervisor.wait_ready(60)
    send_both()
    child.kill()
    child.join(60)
print(child.exitcode, signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def test_a_child_is_born_deaf_to_signals_that_all_processes_get() -> None:
    """The parent ends it in order. The first child of a process is started a little otherwise."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", FIRST_CHILD]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{-signal.SIGKILL} set()\n", done.stderr


def test_children_that_nobody_ends_do_not_keep_a_program_from_its_end() -> None:
    program = f"""
from minisgl.processes.supervisor import Supervisor
supervisor = Supervisor("CRITICAL")
supervisor.start("one", "{__name__}:waits")
supervisor.wait_ready(60)
print("ready", flush=True)
raise SystemExit(3)
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("ready\n", 3), done.stderr


def test_a_child_ends_with_its_program_even_if_that_is_killed() -> None:
    program = f"""
import multiprocessing, signal
from minisgl.processes.supervisor import Supervisor
supervisor = Supervisor("CRITICAL")
supervisor.start("one", "{__name__}:waits")
supervisor.wait_ready(60)
[child] = multiprocessing.active_children()
print(child.pid, flush=True)
signal.pause()
"""
    assert ends_with_its_program(program)


def test_children_live_as_long_as_functions_that_run_at_the_end_of_a_program() -> None:
    program = f"""
import atexit, multiprocessing, time
from minisgl.processes.supervisor import Supervisor
supervisor = Supervisor("CRITICAL")
supervisor.start("one", "{__name__}:waits")
supervisor.wait_ready(60)
[child] = multiprocessing.active_children()
atexit.register(lambda: print(child.join(0.2), child.is_alive()))
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("None True\n", 0), done.stderr


def test_a_child_whose_start_two_signals_have_broken_off_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spawn = multiprocessing.util.spawnv_passfds
    is_spawning = threading.Event()
    may_spawn = threading.Event()

    def spawn_late(*args: Any) -> int:
        is_spawning.set()
        may_spawn.wait(60)
        return spawn(*args)

    def break_off(*_: Any) -> None:
        is_spawning.wait(60)
        raise KeyboardInterrupt

    resource_tracker.ensure_running()
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", spawn_late)
    with pytest.raises(KeyboardInterrupt), Supervisor("CRITICAL") as supervisor:
        monkeypatch.setattr(futures.Future, "result", break_off)
        monkeypatch.setattr(futures, "wait", break_off)
        try:
            supervisor.start("one", f"{__name__}:waits")
        finally:
            monkeypatch.undo()
            threading.Timer(0.1, may_spawn.set).start()
    assert multiprocessing.active_children() == []


def test_when_a_child_dies_the_others_are_killed_without_a_call() -> None:
    with two_children() as supervisor:
        supervisor.end_together()
        end("two", signal.SIGKILL)
        assert_all_end()
        assert supervisor.death() == "two died with exit code -9 (SIGKILL)"


def test_the_exit_code_is_told_though_another_thread_collects_it() -> None:
    """Eight threads call what collects the exit codes of all children of this process."""
    is_over = threading.Event()

    def collect() -> None:
        while not is_over.is_set():
            multiprocessing.active_children()

    with two_children() as supervisor, ThreadPoolExecutor(8) as pool:
        supervisor.end_together()
        for _ in range(8):
            pool.submit(collect)
        end("one", signal.SIGKILL)
        death = supervisor.death()
        is_over.set()
        assert death == "one died with exit code -9 (SIGKILL)"


def next_failure(supervisor: Supervisor, hang_timeout_s: float) -> Failure:
    return asyncio.run(asyncio.wait_for(supervisor.next_failure(hang_timeout_s, 3600), 60))


def test_a_child_that_dies_is_a_failure_and_the_others_live_until_they_are_killed() -> None:
    with two_children() as supervisor:
        end("one", signal.SIGKILL)
        failure = next_failure(supervisor, 3600)
        assert failure == Failure("one", "one died with exit code -9 (SIGKILL)")
        assert [child.name for child in multiprocessing.active_children()] == ["two"]
        supervisor.kill()
        assert_all_end()
        supervisor.remove()


def beats(ready: Ready) -> None:
    ready(StartupReport())
    while True:
        ready.beat()
        time.sleep(0.01)


def test_a_child_that_does_not_beat_is_killed_and_one_that_beats_is_not() -> None:
    with Supervisor("CRITICAL") as supervisor:
        supervisor.start("alive", f"{__name__}:beats")
        supervisor.start("stopped", f"{__name__}:beats")
        supervisor.wait_ready(60)
        end("stopped", signal.SIGSTOP)
        failure = next_failure(supervisor, 2)
        assert failure == Failure("stopped", "stopped did nothing for 2 s")
        supervisor.kill()


def test_children_that_stop_together_are_all_named() -> None:
    """One of them may only wait for the other."""
    with Supervisor("CRITICAL") as supervisor:
        for name in ("alive", "waits", "stopped"):
            supervisor.start(name, f"{__name__}:beats")
        supervisor.wait_ready(60)
        end("waits", signal.SIGSTOP)
        end("stopped", signal.SIGSTOP)
        assert next_failure(supervisor, 3).reason == "waits and stopped did nothing for 3 s"
        supervisor.kill()


def test_a_child_that_fails_before_it_is_ready_is_a_failure_at_its_start() -> None:
    with two_children() as supervisor:
        end("one", signal.SIGKILL)
        assert next_failure(supervisor, 3600).name == "one"
        supervisor.remove_one("one")
        supervisor.start("one", f"{__name__}:fails")
        assert next_failure(supervisor, 3600) == Failure(
            "one", "one died with exit code 1: one: RuntimeError: the consequence", is_at_start=True
        )
        supervisor.kill()


def beats_when_told(ready: Ready, start: Event) -> None:
    start.wait()
    beats(ready)


def test_a_child_may_start_while_others_are_watched_and_is_watched_when_it_is_ready() -> None:
    """It has more time to start than one that is ready has to beat."""
    hang_timeout_s = 1.5
    start = multiprocessing.get_context("spawn").Event()

    async def watch_until_ready() -> None:
        watching = asyncio.create_task(supervisor.next_failure(hang_timeout_s, 3600))
        child = supervisor._children["new"]
        while child.is_starting:
            if child.num_still_ticks * TICK_S > hang_timeout_s:
                start.set()
            await asyncio.sleep(0.01)
        assert not watching.done()
        watching.cancel()

    with Supervisor("CRITICAL") as supervisor:
        supervisor.start("other", f"{__name__}:beats")
        supervisor.wait_ready(60)
        supervisor.start("new", f"{__name__}:beats_when_told", start)
        asyncio.run(asyncio.wait_for(watch_until_ready(), 60))
        end("new", signal.SIGSTOP)
        assert next_failure(supervisor, 2) == Failure("new", "new did nothing for 2 s")
        supervisor.kill()


def prepare() -> None:
    os.environ["PREPARED"] = "7"


def cannot_prepare() -> None:
    raise RuntimeError("no memory")


def counts(ready: Ready, number: int) -> None:
    """Reports a sum, and takes its name as the program's."""
    name = Path("/proc/self/comm").read_text().strip()
    assert name == multiprocessing.current_process().name == "worker"
    ready(StartupReport(info=b"%d" % (int(os.environ["PREPARED"]) + number)))
    signal.pause()


def lacks_threads(ready: Ready) -> None:
    raise RuntimeError("can't start new thread")


def test_a_child_without_threads_says_where_to_look() -> None:
    with Supervisor("CRITICAL") as supervisor:
        supervisor.start("one", f"{__name__}:lacks_threads")
        with pytest.raises(EngineFailed, match=r"^the system starts no more threads; .*ulimit -u"):
            supervisor.wait_ready(60)


def test_a_child_that_stands_by_takes_the_place_of_another() -> None:
    with Supervisor("CRITICAL") as supervisor:
        supervisor.start_standby("standby", f"{__name__}:prepare")
        assert not supervisor.is_prepared("standby")
        supervisor.wait_ready(60)
        assert supervisor.is_prepared("standby")
        (standby,) = multiprocessing.active_children()
        supervisor.assign({"standby": Assignment("worker", f"{__name__}:counts", (4,))})
        [report] = supervisor.wait_ready(60)
        assert report.info == b"11"
        (worker,) = multiprocessing.active_children()
        assert (worker.name, worker.pid) == ("worker", standby.pid)
        assert not supervisor.has_child("standby")
        end("worker", signal.SIGKILL)
        assert next_failure(supervisor, 3600).name == "worker"
        supervisor.kill()


def test_the_failure_of_one_that_stood_by_has_its_new_name() -> None:
    with Supervisor("CRITICAL") as supervisor:
        supervisor.start_standby("standby", f"{__name__}:prepare")
        supervisor.wait_ready(60)
        supervisor.assign({"standby": Assignment("worker", f"{__name__}:fails", ())})
        with pytest.raises(EngineFailed, match=r"^worker: RuntimeError: the consequence$"):
            supervisor.wait_ready(60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_where_one_that_stands_by_does_not_take_over_another_process_does(
    number: signal.Signals,
) -> None:
    with Supervisor("CRITICAL") as supervisor:
        supervisor.start_standby("standby", f"{__name__}:prepare")
        supervisor.wait_ready(60)
        end("standby", number)
        supervisor.assign({"standby": Assignment("worker", f"{__name__}:waits", ())})
        supervisor.wait_ready(60)
        (worker,) = multiprocessing.active_children()
        assert worker.name == "worker"
        supervisor.kill()


def test_all_that_shall_take_over_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three are stopped, and the last one takes over though the deadline has passed."""
    waits_s: list[float] = []
    poll = Connection.poll

    def noted_poll(self: Connection, timeout: float = 0.0) -> bool:
        waits_s.append(timeout)
        return poll(self, timeout)

    names = ["a", "b", "c", "d"]
    with Supervisor("CRITICAL") as supervisor:
        for name in names:
            supervisor.start_standby(name, f"{__name__}:prepare")
        supervisor.wait_ready(60)
        for name in "abc":
            end(name, signal.SIGSTOP)
        (last,) = (child for child in multiprocessing.active_children() if child.name == "d")
        monkeypatch.setattr(Connection, "poll", noted_poll)
        supervisor.assign(
            {name: Assignment(f"worker-{name}", f"{__name__}:waits", ()) for name in names}
        )
        assert 0 < sum(waits_s) <= _CONFIRMATION_TIMEOUT_S
        supervisor.wait_ready(60)
        workers = {child.name: child.pid for child in multiprocessing.active_children()}
        assert workers.keys() == {"worker-a", "worker-b", "worker-c", "worker-d"}
        assert workers["worker-d"] == last.pid
        supervisor.kill()


def test_a_child_that_stands_by_is_watched() -> None:
    with Supervisor("CRITICAL") as supervisor:
        supervisor.start_standby("dies", f"{__name__}:prepare")
        supervisor.start_standby("stops", f"{__name__}:prepare")
        supervisor.wait_ready(60)
        end("dies", signal.SIGKILL)
        assert next_failure(supervisor, 3600).name == "dies"
        assert not supervisor.is_prepared("dies")
        supervisor.remove_one("dies")
        end("stops", signal.SIGSTOP)
        assert next_failure(supervisor, 2) == Failure("stops", "stops did nothing for 2 s")
        supervisor.remove_one("stops")
        supervisor.start_standby("fails", f"{__name__}:cannot_prepare")
        failure = next_failure(supervisor, 3600)
        assert failure.is_at_start
        assert failure.reason.endswith("fails: RuntimeError: no memory")


def test_the_end_does_not_wait_for_a_child_that_stands_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.processes.supervisor._EXIT_TIMEOUT_S", 3600.0)
    with Supervisor("CRITICAL") as supervisor:
        supervisor.start_standby("standby", f"{__name__}:prepare")
        supervisor.wait_ready(60)
    assert_all_end()


def test_children_that_end_with_their_supervisor_have_not_died() -> None:
    with two_children() as supervisor:
        supervisor.end_together()
        with pytest.raises(KeyError), supervisor:
            raise KeyError
        assert supervisor.death() == ""


@pytest.mark.parametrize("has_children", [False, True])
def test_a_signal_just_after_a_start_leaves_no_child(
    has_children: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = SpawnProcess.start

    def start_with_a_signal_after_it(process: SpawnProcess) -> None:
        start(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(SpawnProcess, "start", start_with_a_signal_after_it)
    with pytest.raises(KeyboardInterrupt), Supervisor("CRITICAL") as supervisor:
        supervisor.start("child", f"{__name__}:waits", has_children=has_children)
    assert multiprocessing.active_children() == []


def test_a_signal_just_before_a_start_is_no_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def signal_before_it(process: SpawnProcess) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SpawnProcess, "start", signal_before_it)
    with pytest.raises(KeyboardInterrupt), Supervisor("CRITICAL") as supervisor:
        supervisor.start("child", f"{__name__}:waits")


@contextmanager
def descriptors_left(num_left: int) -> Iterator[None]:
    """Let this process open `num_left` descriptors, and no others."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path(os.devnull).open() as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno() + num_left, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_where_shared_memory_cannot_be_written_the_error_names_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And does not send its reader to limits that are not the cause."""

    def mkstemp(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/dev/shm/pym-1")

    with two_children() as supervisor:
        monkeypatch.setattr(multiprocessing.heap.Heap, "malloc", mkstemp)
        with pytest.raises(EngineFailed) as caught:
            supervisor.start("three", f"{__name__}:waits")
        assert str(caught.value) == (
            "three cannot be started: Read-only file system: /dev/shm/pym-1"
        )


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE])
def test_where_a_limit_may_be_the_cause_the_error_names_those_of_the_shell(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with two_children() as supervisor:
        monkeypatch.setattr(multiprocessing.heap.Heap, "malloc", fails)
        with pytest.raises(EngineFailed, match=r"^three cannot .*; see ulimit -u and ulimit -n$"):
            supervisor.start("three", f"{__name__}:waits")


@pytest.mark.parametrize("num_left", [0, 3])
def test_where_no_process_can_be_started_the_error_names_it(num_left: int) -> None:
    with two_children() as supervisor:
        with descriptors_left(num_left):
            with pytest.raises(EngineFailed, match="three cannot be started: Too many open files"):
                supervisor.start("three", f"{__name__}:waits")
            with pytest.raises(OSError, match="Too many open files"):
                supervisor.start_standby("four", f"{__name__}:prepare")
        assert not supervisor.has_child("three")
        assert not supervisor.has_child("four")
        supervisor.start("three", f"{__name__}:waits")
        supervisor.wait_ready(60)
        supervisor.kill()


def never_reports(ready: Ready) -> None:
    signal.pause()


def test_the_time_of_a_start_counts_from_the_start_and_not_from_the_wait() -> None:
    refusal = pytest.raises(EngineFailed, match="one not ready after 60 s")
    with refusal, Supervisor("CRITICAL") as supervisor:
        supervisor.start("one", f"{__name__}:never_reports")
        supervisor._children["one"].started_at -= 60
        began_at = time.monotonic()
        try:
            supervisor.wait_ready(60)
        finally:
            assert time.monotonic() - began_at < 30  # not another minute


@pytest.mark.parametrize(
    "bodies", [["fails", "refuses"], ["refuses", "fails"], ["fails", "fails", "refuses"]]
)
def test_of_several_failures_a_config_error_is_raised(bodies: list[str]) -> None:
    with pytest.raises(ConfigError, match="the cause"), Supervisor("CRITICAL") as supervisor:
        for i, body in enumerate(bodies):
            supervisor.start(f"child-{i}", f"{__name__}:{body}")
        for child in multiprocessing.active_children():
            child.join()
        supervisor.wait_ready(60)


def refuses_half_a_pair(ready: Ready) -> None:
    raise ConfigError("the value is \ud800")


def test_a_failure_is_said_whatever_characters_its_reason_has() -> None:
    with (
        pytest.raises(ConfigError, match=r"^the value is \\ud800$"),
        Supervisor("CRITICAL") as supervisor,
    ):
        supervisor.start("child", f"{__name__}:refuses_half_a_pair")
        supervisor.wait_ready(60)


def test_a_failure_names_its_process() -> None:
    with (
        pytest.raises(EngineFailed, match="child: RuntimeError: the consequence"),
        Supervisor("CRITICAL") as supervisor,
    ):
        supervisor.start("child", f"{__name__}:fails")
        supervisor.wait_ready(60)


@pytest.mark.parametrize(
    "bodies", [["fails_when_ready", "finds_the_cause"], ["finds_the_cause", "fails_when_ready"]]
)
def test_of_several_deaths_the_one_with_a_known_cause_is_told(bodies: list[str]) -> None:
    with Supervisor("CRITICAL") as supervisor:
        for body in bodies:
            supervisor.start(body, f"{__name__}:{body}")
        supervisor.wait_ready(60)
        assert_all_end()
        supervisor.end_together()
        assert supervisor.death() == "finds_the_cause died with exit code 1: the cause"
