"""The table of routes: the fastest one that was measured takes a sum."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.distributed.protocol_table import ProtocolTable, Route
from minisgl.kernel import Protocol

ROUTES: list[Route] = [*Protocol, None]
seconds = st.sampled_from([1e-6, 2e-6, 5e-6, math.inf])
times = st.dictionaries(
    st.integers(1, 1000), st.lists(seconds, min_size=len(ROUTES), max_size=len(ROUTES)), max_size=6
)


@given(times=times, num_bytes=st.integers(0, 1100))
def test_a_sum_takes_the_fastest_route_of_the_next_larger_size(
    times: dict[int, list[float]], num_bytes: int
) -> None:
    sizes = sorted(times)
    table = ProtocolTable.of_fastest(sizes, [times[size] for size in sizes], ROUTES)
    route = table.route(num_bytes)
    larger = [size for size in sizes if size >= num_bytes]
    if not larger:
        assert route is None
        return
    measured = times[larger[0]]
    if math.isinf(min(measured)):
        assert route is None
    else:
        assert measured[ROUTES.index(route)] == min(measured)


@given(times=times)
def test_peer_memory_is_used_if_any_size_has_a_protocol(times: dict[int, list[float]]) -> None:
    sizes = sorted(times)
    table = ProtocolTable.of_fastest(sizes, [times[size] for size in sizes], ROUTES)
    assert table.uses_peer_memory == any(table.route(size) is not None for size in sizes)


@pytest.mark.parametrize(
    ("routes", "text"),
    [
        ((), "NCCL beyond"),
        ((Protocol.PUSH, Protocol.PUSH), "push up to 32 KiB, NCCL beyond"),
        (
            (Protocol.PUSH, Protocol.TWO_SHOT, None),
            "push up to 8 KiB, two_shot up to 32 KiB, NCCL up to 64 KiB, NCCL beyond",
        ),
    ],
)
def test_the_log_has_a_row_for_each_route(routes: tuple[Route, ...], text: str) -> None:
    sizes = (8 << 10, 32 << 10, 64 << 10)[: len(routes)]
    assert str(ProtocolTable(sizes, routes)) == text
