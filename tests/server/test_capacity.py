"""How many connections fit into the descriptors of a process."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from minisgl.errors import ConfigError
from minisgl.server.capacity import NUM_RESERVED, fit_api_workers, fit_connections


@pytest.mark.parametrize(
    ("num_cores", "expected"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 8), (128, 8)]
)
def test_half_of_the_cores_get_an_api_process_up_to_eight(num_cores: int, expected: int) -> None:
    assert fit_api_workers(num_cores) == expected


@pytest.mark.parametrize("limit", [256, 1024, 20_000, 1 << 20])
def test_some_descriptors_are_left_for_all_else(limit: int) -> None:
    num_connections = fit_connections(None, 3, limit)
    assert 1 <= num_connections <= limit - NUM_RESERVED - 64


def test_more_workers_take_more_descriptors() -> None:
    assert fit_connections(None, 10, 1024) < fit_connections(None, 3, 1024)


def test_auto_is_bounded_where_descriptors_are_not() -> None:
    unbounded = fit_connections(None, 3, resource.RLIM_INFINITY)
    assert fit_connections(None, 3, 1 << 30) == unbounded
    assert unbounded < 1 << 20


def test_a_given_number_is_taken() -> None:
    assert fit_connections(7, 3, 1024) == 7
    assert fit_connections(1 << 20, 3, resource.RLIM_INFINITY) == 1 << 20


@pytest.mark.parametrize(("wanted", "limit"), [(1000, 1024), (None, 64)])
def test_what_does_not_fit_is_refused_with_both_numbers(wanted: int | None, limit: int) -> None:
    with pytest.raises(ConfigError, match=rf"3 processes and --max-connections.* {limit}.*ulimit"):
        fit_connections(wanted, 3, limit)


def test_the_limit_is_raised_as_far_as_it_may() -> None:
    script = (
        "import resource; from minisgl.server.capacity import raise_descriptor_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))\n"
        "print(raise_descriptor_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["200", "200", "200"]
