"""The trial of a chat template at the start: what takes too much ends it, with the file's name."""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from minisgl.errors import CheckpointError, EngineFailed
from minisgl.tokenizer import template_trial
from minisgl.tokenizer.template_trial import TemplateLimits, try_template
from tests.tokenizer.test_tokenize import with_template

LIMITS = TemplateLimits(cpu_s=0.5, wall_s=30.0, num_bytes=2**26)
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TOO_SLOW = "the chat template takes more than 0.5 s to write a short chat"
TOO_LARGE = "the chat template takes more than 64 MiB of memory to write a short chat"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (ENDLESS, TOO_SLOW),
        ("{{ 9 ** (9 ** 9) }}", TOO_SLOW),  # no handler of signals runs meanwhile
        ("{% if tools %}" + ENDLESS + "{% endif %}", TOO_SLOW),
        ("{% if messages|length == 2 %}" + ENDLESS + "{% endif %}", TOO_SLOW),
        ("{{ 'x' * 10 ** 10 }}", TOO_LARGE),
        ("{{ 'x' * (10 ** 10 + messages|length) }}", TOO_LARGE),
        (
            "{% set n = namespace(t='xxxxxxxxxxxxxxxx') %}"
            "{% for i in range(40) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
            TOO_LARGE,
        ),
    ],
    ids=["loops", "power", "tools", "system", "constant", "product", "doubled"],
)
def test_a_template_that_takes_too_much_is_refused_with_its_file(
    template: str, reason: str, tmp_path: Path
) -> None:
    tokenizer = with_template(tmp_path, template)
    # To take 64 MiB may take long where another program keeps the memory busy.
    limits = replace(LIMITS, cpu_s=10.0) if reason == TOO_LARGE else LIMITS
    with pytest.raises(CheckpointError) as refusal:
        try_template(tokenizer.template, tmp_path, limits)
    assert str(refusal.value) == f"{tmp_path / 'chat_template.jinja'}: {reason}"


@pytest.mark.parametrize(
    "template",
    [None, "{{ messages }}", "{{ raise_exception('no') }}", "{% foo %}", "{{ 'x' * 10 ** 6 }}"],
)
def test_any_other_template_passes_its_trial(template: str | None, tmp_path: Path) -> None:
    try_template(with_template(tmp_path, template).template, tmp_path, LIMITS)


def test_a_template_of_the_tokenizers_options_is_named_by_their_file(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, ENDLESS)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: the chat template takes"):
        try_template(tokenizer.template, tmp_path, LIMITS)


def test_each_file_that_may_have_the_template_is_named(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, ENDLESS)
    files = [tmp_path / "chat_template.jinja", tmp_path / "additional_chat_templates/rag.jinja"]
    files[1].parent.mkdir()
    files[1].write_text(ENDLESS)
    with pytest.raises(CheckpointError) as refusal:
        try_template(tokenizer.template, tmp_path, LIMITS)
    assert str(refusal.value) == f"{files[0]} or {files[1]}: {TOO_SLOW}"


def test_a_system_that_makes_no_fork_is_not_the_templates_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(EngineFailed, match=r"cannot be tried: .* temporarily unavailable"):
        try_template(with_template(tmp_path, "-").template, tmp_path, LIMITS)


def test_a_trial_that_somebody_ends_is_not_the_templates_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = with_template(tmp_path, ENDLESS)
    fork = os.fork
    pids: list[int] = []

    def fork_and_kill() -> int:
        pid = fork()
        if pid != 0:
            os.kill(pid, signal.SIGKILL)
            pids.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", fork_and_kill)
    with pytest.raises(
        EngineFailed, match="the trial of the chat template was broken off by signal 9"
    ):
        try_template(tokenizer.template, tmp_path, LIMITS)
    assert [psutil.pid_exists(pid) for pid in pids] == [False], "nor is it left a zombie"


def test_a_trial_without_time_on_a_processor_ends(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, ENDLESS)
    limits = TemplateLimits(cpu_s=3600.0, wall_s=0.5)
    with pytest.raises(CheckpointError, match=r"jinja: the chat template does not end"):
        try_template(tokenizer.template, tmp_path, limits)


@pytest.mark.parametrize("step", ["die_with_parent", "limit_this_process"])
@pytest.mark.parametrize("error", [OSError("no\nluck"), MemoryError(), SystemExit(0)], ids=repr)
def test_a_trial_that_cannot_be_set_up_is_no_trial(
    step: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = with_template(tmp_path, "-")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(template_trial, step, fail)
    reason = str(error).replace("\n", " ") or type(error).__name__
    with pytest.raises(EngineFailed, match=f"^the chat template cannot be tried: {reason}$"):
        try_template(tokenizer.template, tmp_path, LIMITS)


@pytest.mark.parametrize("name", ["SIGABRT", "SIGBUS", "SIGILL", "SIGSEGV"])
def test_a_trial_that_crashes_is_not_said_to_lack_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = with_template(tmp_path, "-").template

    def crash() -> None:
        faulthandler.disable()  # pytest's
        os.kill(os.getpid(), signal.Signals[name])

    monkeypatch.setattr(template, "write_short_chats", crash)
    with pytest.raises(CheckpointError) as refusal:
        try_template(template, tmp_path, LIMITS)
    reason = f"the chat template ends its trial by {name}, in 64 MiB of memory"
    assert str(refusal.value) == f"{tmp_path / 'chat_template.jinja'}: {reason}"
