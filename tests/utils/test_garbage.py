"""Full collections happen when a process is idle, and cycles do not pile up."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from minisgl.utils.garbage import (
    collect_later,
    collect_when_idle,
    keep_imports,
    keep_what_lives,
    start_process,
    start_serving,
)


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def generations() -> Iterator[list[int]]:
    """The generation of each collection, in a process that serves."""
    thresholds = gc.get_threshold()
    collected: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            collected.append(info["generation"])

    start_serving()
    gc.callbacks.append(note)
    yield collected
    gc.callbacks.remove(note)
    gc.set_threshold(*thresholds)


def test_nothing_is_collected_while_a_process_starts(generations: list[int]) -> None:
    """Before the fixture, that is; here it starts once more."""
    start_process()
    make_garbage(100_000)
    assert not generations
    start_serving()
    assert generations == [2]
    make_garbage(100_000)
    assert len(generations) > 1


def make_garbage(num: int) -> None:
    for _ in range(num):
        Cycle()


def test_requests_that_come_cause_no_full_collection(generations: list[int]) -> None:
    kept = [[i] for i in range(300_000)]

    assert set(generations) == {0, 1}
    assert len(kept) == 300_000


def test_garbage_does_not_pile_up_in_a_process_that_is_never_idle(generations: list[int]) -> None:
    start = len(gc.get_objects())
    make_garbage(300_000)

    assert 2 not in generations
    assert len(gc.get_objects()) - start < 150_000


def test_little_garbage_waits_where_connections_leave_some(generations: list[int]) -> None:
    """What waits is memory that grows for minutes where few requests come."""
    start_serving(has_connections=True)
    start = len(gc.get_objects())
    for _ in range(500):
        make_garbage(100)
        assert len(gc.get_objects()) - start < 5_000


def test_old_cycles_are_collected_when_nothing_is_to_do(generations: list[int]) -> None:
    cycle = Cycle()
    seen = weakref.ref(cycle)
    gc.collect(0)
    gc.collect(1)  # it is old now
    del cycle
    gc.collect(0)
    assert seen() is not None

    collect_when_idle()
    assert seen() is None
    assert generations[-1] == 2


def test_who_is_idle_again_and_again_does_not_collect_again(generations: list[int]) -> None:
    make_garbage(200_000)
    for _ in range(100):
        collect_when_idle()

    assert generations.count(2) == 1


def test_what_lived_at_the_start_is_not_walked(generations: list[int]) -> None:
    assert gc.get_freeze_count() > 10_000
    assert len(gc.get_objects()) < 10_000
    assert 2 not in generations


@pytest.mark.parametrize("is_on", [False, True])
def test_collections_wait_for_the_end(is_on: bool) -> None:
    """Of an error, too. Who has switched them off finds them so."""
    was_on = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        with pytest.raises(KeyError), collect_later():
            assert not gc.isenabled()
            with collect_later():
                pass
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was_on else gc.disable)()


def test_an_interrupt_just_behind_the_switch_leaves_collections_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python runs handlers of signals after a call, too."""
    disable = gc.disable
    was_on = gc.isenabled()

    def disable_and_interrupt() -> None:
        disable()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "disable", disable_and_interrupt)
    try:
        gc.enable()
        with pytest.raises(KeyboardInterrupt), collect_later():
            pass
        assert gc.isenabled()
    finally:
        (gc.enable if was_on else disable)()


@pytest.fixture
def nothing_exempt() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_exempt")
def test_imports_are_walked_neither_meanwhile_nor_later(generations: list[int]) -> None:
    gc.unfreeze()
    generations.clear()
    with keep_imports():
        imported = [[i] for i in range(300_000)]
    assert not generations
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(imported)
    gc.unfreeze()


@pytest.mark.usefixtures("nothing_exempt")
def test_what_lives_is_exempt_until_the_end_and_garbage_is_not_kept() -> None:
    cycle = Cycle()
    seen = weakref.ref(cycle)
    del cycle
    with keep_what_lives():
        assert seen() is None
        assert gc.get_freeze_count() > 10_000
        with keep_what_lives():
            pass
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_exempt")
def test_what_python_exempts_itself_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python 3.12 that is 375 objects."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    with keep_what_lives():
        assert len(gc.get_objects()) < 10_000
    assert len(gc.get_objects()) > 10_000


@pytest.mark.usefixtures("nothing_exempt")
def test_who_has_exempted_objects_keeps_them_so() -> None:
    gc.freeze()
    with keep_what_lives():
        cycle = Cycle()
        seen = weakref.ref(cycle)
    assert gc.get_freeze_count() > 10_000
    del cycle
    gc.collect()
    assert seen() is None
