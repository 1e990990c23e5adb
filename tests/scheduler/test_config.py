"""The scheduler's options: what is refused, and what "auto" becomes."""

from __future__ import annotations

import pytest

from minisgl.errors import ConfigError
from minisgl.scheduler import SchedulerConfig
from minisgl.utils import Hardware

CPU, GPU = Hardware("cpu", True, 0), Hardware("cuda", True, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "lru"}, "unknown prefix cache 'lru'; there is naive, radix"),
        ({"max_prefill_length": 0}, "--max-prefill-length must be >= 1, got 0"),
        ({"page_size": 0}, "--page-size must be >= 1, got 0"),
        ({"max_running_requests": 0}, "--max-running-requests must be >= 1, got 0"),
    ],
)
def test_an_option_that_cannot_work_is_named_with_its_bound(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**options)  # type: ignore[arg-type]


def test_overlap_is_on_for_gpus_unless_it_is_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINISGL_DISABLE_OVERLAP_SCHEDULING", raising=False)

    assert SchedulerConfig().resolve(GPU).overlap is True
    assert SchedulerConfig().resolve(CPU).overlap is False
    assert SchedulerConfig(overlap=True).resolve(CPU).overlap is True
    assert SchedulerConfig(overlap=False).resolve(GPU).overlap is False


@pytest.mark.parametrize(("value", "overlap"), [("1", False), ("true", False), ("0", True), ("", True)])
def test_the_environment_can_switch_overlap_off(monkeypatch: pytest.MonkeyPatch, value: str, overlap: bool) -> None:
    monkeypatch.setenv("MINISGL_DISABLE_OVERLAP_SCHEDULING", value)

    assert SchedulerConfig().resolve(GPU).overlap is overlap


def test_a_seed_is_drawn_if_none_is_given() -> None:
    drawn = {SchedulerConfig().resolve(CPU).seed for _ in range(5)}

    assert None not in drawn
    assert len(drawn) > 1
    assert SchedulerConfig(seed=0).resolve(CPU).seed == 0
