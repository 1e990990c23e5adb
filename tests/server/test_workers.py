"""Which processes stand by for schedulers, and when they are started.

What they do is tested with real processes in tests/processes/test_supervisor.py and
tests/system/test_replacement.py.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from minisgl.processes.child import Assignment, StartupReport
from minisgl.processes.failures import Failure
from minisgl.server.args import ServerConfig
from minisgl.server.workers import Workers
from minisgl.worker_info import SchedulerInfo, encode_info


class RecordingSupervisor:
    """Notes which children are started; all are ready at once."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.children: set[str] = set()
        self.assigned: list[str] = []
        self.hung: set[str] = set()
        self.lacks_memory = False

    def start(self, name: str, body: str, *args: Any, has_children: bool = False) -> None:
        self.children.add(name)

    def start_standby(self, name: str, preparation: str) -> None:
        if self.lacks_memory:
            raise OSError(errno.ENOMEM, "no memory")
        self.children.add(name)

    def has_child(self, name: str) -> bool:
        return name in self.children

    def is_prepared(self, name: str) -> bool:
        return name in self.children - self.hung

    def assign(self, assignments: Mapping[str, Assignment]) -> None:
        for standby, assignment in assignments.items():
            self.children.remove(standby)
            self.children.add(assignment.name)
            self.assigned.append(standby)

    def wait_ready(self, timeout_s: float) -> list[StartupReport]:
        info = encode_info(SchedulerInfo(64, self.device))
        return [StartupReport(info=info), StartupReport()]

    def kill(self, keep: Collection[str] = ()) -> None:
        pass

    def remove(self, keep: Collection[str] = ()) -> None:
        self.children &= set(keep)

    def remove_one(self, name: str) -> None:
        self.children.remove(name)

    @property
    def standbys(self) -> set[str]:
        return {name for name in self.children if name.startswith("standby")}


class Clock:
    """`time.monotonic`, by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def serving(device: str, **options: Any) -> tuple[Workers, RecordingSupervisor]:
    """Workers that are ready."""
    supervisor = RecordingSupervisor(device)
    config = ServerConfig(model="/model", api_workers=1, **options)
    workers = Workers(config, supervisor, Path("/folder"), max_seq_len=64)  # type: ignore[arg-type]
    workers.start()
    workers.wait_ready()
    return workers, supervisor


@pytest.mark.parametrize(
    ("device", "wanted", "expected"),
    [
        ("cuda", None, {"standby-0", "standby-1"}),
        ("cpu", None, set()),
        ("cuda", False, set()),
        ("cpu", True, {"standby-0", "standby-1"}),
    ],
)
def test_one_stands_by_for_each_rank_once_they_have_served(
    device: str, wanted: bool | None, expected: set[str], clock: Clock
) -> None:
    workers, supervisor = serving(device, tp=2, keep_standbys=wanted)
    clock.now += 1
    workers._add_standbys()
    assert supervisor.standbys == set()
    clock.now += 2
    workers._add_standbys()
    assert supervisor.standbys == expected


def restart(workers: Workers) -> None:
    workers.kill()
    workers.end_epoch()
    workers.start()
    workers.wait_ready()


def test_those_that_beat_take_over_and_others_take_their_place_later(clock: Clock) -> None:
    workers, supervisor = serving("cuda", tp=3)
    clock.now += 6
    workers._add_standbys()
    supervisor.hung = {"standby-1"}
    restart(workers)
    assert supervisor.assigned == ["standby-0", "standby-2"]
    assert {"scheduler-0", "scheduler-1", "scheduler-2"} <= supervisor.children
    assert supervisor.standbys == set()
    workers._add_standbys()
    assert supervisor.standbys == set()
    clock.now += 6
    workers._add_standbys()
    assert supervisor.standbys == {"standby-0", "standby-1", "standby-2"}


def test_after_a_death_the_next_one_comes_a_minute_later(clock: Clock) -> None:
    workers, supervisor = serving("cuda")
    clock.now += 6
    workers._add_standbys()
    assert workers.is_standby("standby-0")
    workers.drop_standby(Failure("standby-0", "standby-0 died"))
    clock.now += 59
    workers._add_standbys()
    assert supervisor.standbys == set()
    clock.now += 2
    workers._add_standbys()
    assert supervisor.standbys == {"standby-0"}


@pytest.mark.parametrize("fails", ["in the system", "as it prepares"])
def test_none_is_started_any_more_when_one_could_not_start(fails: str, clock: Clock) -> None:
    workers, supervisor = serving("cuda")
    supervisor.lacks_memory = fails == "in the system"
    clock.now += 6
    workers._add_standbys()
    if fails == "as it prepares":
        workers.drop_standby(Failure("standby-0", "standby-0 died", is_at_start=True))
    supervisor.lacks_memory = False
    restart(workers)
    clock.now += 600
    workers._add_standbys()
    assert supervisor.standbys == set()
