"""Kernels are compiled beside the main thread, all at once."""

from __future__ import annotations

import logging
from threading import Barrier, Event

import pytest

from minisgl.engine import kernel_builds
from minisgl.engine.kernel_builds import KernelBuilds, fastest_attention
from minisgl.errors import ConfigError


def test_builds_run_side_by_side_while_others_work() -> None:
    both = Barrier(3, timeout=60)
    builds = KernelBuilds({"one": both.wait, "another": both.wait})
    both.wait()
    builds.wait()


def test_builds_that_start_later_run_beside_the_others() -> None:
    both = Barrier(2, timeout=60)
    builds = KernelBuilds({"one": both.wait})
    builds.start({"another": both.wait})
    builds.wait()


def test_what_takes_long_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = Event()
    monkeypatch.setattr(kernel_builds, "_BLINK_S", 0.01)
    show_progress = KernelBuilds._show_progress

    def finish_and_show(self: KernelBuilds, num_done: int) -> None:
        finished.set()
        show_progress(self, num_done)

    monkeypatch.setattr(KernelBuilds, "_show_progress", finish_and_show)
    builds = KernelBuilds({"long": lambda: finished.wait(60)})
    with caplog.at_level(logging.INFO):
        builds.wait()
    assert "waiting for long; what is compiled is kept" in caplog.text


@pytest.mark.parametrize(("head_dim", "expected"), [(64, "fi"), (80, "triton"), (96, "triton")])
def test_heads_that_flashinfer_does_not_take_attend_in_torch(
    head_dim: int,
    expected: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_builds, "find_cuda_toolkit", lambda: "a toolkit")
    assert fastest_attention(head_dim, pytest.fail) == expected
    warning = f"have {head_dim} numbers, and FlashInfer takes heads of 64, 128, 256"
    assert (warning in caplog.text) == (expected == "triton")


def test_what_fails_is_raised_when_it_is_waited_for() -> None:
    def fail() -> None:
        raise ConfigError("no compiler")

    builds = KernelBuilds({"kernels": fail, "others": lambda: None})
    with pytest.raises(ConfigError, match="no compiler"):
        builds.wait()
