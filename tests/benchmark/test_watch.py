"""What the watchers of an attack make of what they saw."""

from __future__ import annotations

from minisgl.benchmark.stress.target import Server
from minisgl.benchmark.stress.watch import HealthWatch, MachineWatch, Span, quantile_s


def test_checks_during_a_stall_of_the_machine_are_told_from_the_others() -> None:
    health = HealthWatch(Server("127.0.0.1", 1, "none"))
    health.checks = [Span(0, 1), Span(2, 9), Span(4, 5), Span(10, 11)]

    undisturbed = health.undisturbed([Span(1, 2), Span(8, 8.5), Span(11, 12)])

    assert undisturbed == [Span(0, 1), Span(4, 5), Span(10, 11)]
    assert quantile_s(undisturbed, 1.0) == 1
    assert quantile_s(health.checks, 1.0) == 7
    assert quantile_s([], 0.99) == 0


def test_the_longest_stall_is_zero_where_the_machine_never_stood_still() -> None:
    machine = MachineWatch()
    assert machine.longest_s == 0
    machine.stalls = [Span(1, 2), Span(5, 5.5)]
    assert machine.longest_s == 1
