"""Errors of children, as their supervisor raises them."""

from __future__ import annotations

import multiprocessing

import pytest

from minisgl.errors import ConfigError, EngineFailed
from minisgl.utils.supervisor import Ready, Supervisor


def fails(ready: Ready) -> None:
    raise RuntimeError("the consequence")


def refuses(ready: Ready) -> None:
    raise ConfigError("the cause")


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


def test_a_failure_names_its_process() -> None:
    with (
        pytest.raises(EngineFailed, match="child: RuntimeError: the consequence"),
        Supervisor("CRITICAL") as supervisor,
    ):
        supervisor.start("child", f"{__name__}:fails")
        supervisor.wait_ready(60)
