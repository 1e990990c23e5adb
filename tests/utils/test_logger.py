"""Warnings that clients can cause at any rate do not fill the log."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from minisgl.utils.logger import JsonFormatter, RepeatLimit, limit_repeats


class Records(logging.Handler):
    """Keeps the lines that are written."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("tests.repeats")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    yield logger
    logger.filters.clear()
    logger.handlers.clear()


def test_of_many_warnings_of_one_line_one_is_written(logger: logging.Logger) -> None:
    records = Records()
    logger.addHandler(records)
    logger.addFilter(RepeatLimit(interval_s=1000))
    for number in range(100):
        logger.warning("refused: %d", number)
        logger.error("broken: %d", number)
        logger.info("served")
    assert records.lines[:3] == ["refused: 0", "broken: 0", "served"]
    assert records.lines[3:] == ["served"] * 99


def test_the_next_one_counts_those_that_were_left_out(logger: logging.Logger) -> None:
    records = Records()
    logger.addHandler(records)
    limit = RepeatLimit(interval_s=1000)
    logger.addFilter(limit)
    for number in range(4):
        if number == 3:
            limit._next_time.clear()  # the interval is over
        logger.warning("refused: %d", number)
    assert records.lines == ["refused: 0", "refused: 3 (2 more before this one)"]


def test_a_logger_is_limited_once(logger: logging.Logger) -> None:
    limit_repeats(logger.name)
    limit_repeats(logger.name)
    assert len(logger.filters) == 1


def test_a_line_of_json_has_a_records_own_fields_and_its_exception(logger: logging.Logger) -> None:
    lines: list[str] = []
    formatter = JsonFormatter("scheduler-0")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(formatter.format(record))  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.info('of "%s"\n', "x", extra={"fields": {"status": 200}})
    try:
        raise KeyError("a")
    except KeyError:
        logger.exception("broken")
    first, second = [json.loads(line) for line in lines]
    assert not any("\n" in line for line in lines)
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "INFO",
        "process": "scheduler-0",
        "logger": "tests.repeats",
        "message": 'of "x"\n',
        "status": 200,
    }
    assert second["exception"].endswith("KeyError: 'a'")


RUN = """
import logging
import sys
import warnings

from minisgl.utils.logger import rename_in_log, set_up_logging

set_up_logging("early", sys.argv[1], as_json=sys.argv[2] == "json")
rename_in_log("late")
logging.getLogger("minisgl.of.ours").info("ours")
logging.getLogger("of.others").info("too much")
logging.getLogger("of.others").warning("theirs: %d", 5)
warnings.warn("of Python")
logging.getLogger("of.others").error("broken")
"""


# Libraries bring handlers that write to stderr: some alone, as those of torch, and some beside
# those of the root, as that of huggingface_hub.
LIBRARIES = """
import logging
import sys

import huggingface_hub.file_download
import torch

from minisgl.utils.logger import adopt_loggers, set_up_logging

others = logging.NullHandler()
logging.getLogger().addHandler(others)
elsewhere = logging.StreamHandler(sys.stdout)
logging.getLogger("torch.distributed").addHandler(elsewhere)
if sys.argv[1] != "not set up":
    set_up_logging("scheduler-0", sys.argv[1], as_json=sys.argv[2] == "json")
adopt_loggers("torch", "huggingface_hub")
logging.getLogger("torch.distributed").warning("of a group of ranks")
logging.getLogger("torch.__trace").debug("a trace that nobody asked for")
logging.getLogger("huggingface_hub.utils").warning("of the hub")
logging.getLogger("torch").error("broken")
assert others in logging.getLogger().handlers
assert elsewhere in logging.getLogger("torch.distributed").handlers
"""


TRACED = """
import logging

import torch._dynamo

from minisgl.utils.logger import adopt_loggers, set_up_logging

set_up_logging("scheduler-0", "INFO", as_json=True)
adopt_loggers("torch")
logging.getLogger("torch._dynamo").debug("wanted")
logging.getLogger("torch.distributed").info("not wanted")
"""


def written(level: str, form: str, program: str = RUN) -> list[str]:
    """The lines that a process writes, with a level and in a form."""
    command = [sys.executable, "-c", program, level, form]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return ended.stderr.splitlines()


def test_what_libraries_log_is_json_too_and_has_the_name_of_the_process() -> None:
    lines = [json.loads(line) for line in written("INFO", "json")]
    assert {line["process"] for line in lines} == {"late"}
    assert [line["level"] for line in lines] == ["INFO", "WARNING", "WARNING", "ERROR"]
    messages = [line["message"] for line in lines]
    assert messages[:2] == ["ours", "theirs: 5"]
    assert "UserWarning: of Python" in messages[2]
    assert messages[3] == "broken"


def test_what_libraries_log_obeys_the_level() -> None:
    (line,) = written("ERROR", "text")
    assert re.fullmatch(r"[-0-9]{10} [:0-9]{8} \[late\] ERROR broken", line)


def test_libraries_with_handlers_of_their_own_write_each_line_once_and_as_json() -> None:
    lines = [json.loads(line) for line in written("INFO", "json", LIBRARIES)]
    assert [line["message"] for line in lines] == ["of a group of ranks", "of the hub", "broken"]
    assert {line["process"] for line in lines} == {"scheduler-0"}


def test_libraries_with_handlers_of_their_own_obey_the_level() -> None:
    (line,) = written("ERROR", "text", LIBRARIES)
    assert line.endswith("[scheduler-0] ERROR broken")


def test_what_the_user_wants_to_read_of_a_library_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    lines = written("INFO", "json", TRACED)
    messages = [json.loads(line)["message"] for line in lines]  # at its end dynamo writes more
    assert messages[0] == "wanted"
    assert "not wanted" not in messages


def test_a_program_that_sets_up_no_logging_keeps_what_libraries_write() -> None:
    lines = written("not set up", "text", LIBRARIES)
    assert [line.rpartition("] ")[2] for line in lines] == [
        "of a group of ranks",
        "of the hub",
        "broken",
    ]
