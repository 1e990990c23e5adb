"""`benchmark/offline/scheduler_steps.py`: its executor is one that the scheduler can use."""

from __future__ import annotations

import runpy
from pathlib import Path

STEPS = Path(__file__).parents[2] / "benchmark" / "offline" / "scheduler_steps.py"


def test_steps_of_decodes_are_timed() -> None:
    row = runpy.run_path(str(STEPS))["decodes"](num_running=4, num_queued=10, num_steps=3)
    assert len(row.times_ms) == 3
    assert "decode, 4 running, 10 queued" in str(row)
