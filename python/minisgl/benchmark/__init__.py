"""Measuring: figures with everything needed to repeat them (`perf.py`), and load for any OpenAI-compatible server
(`client.py`). The scripts that use them are in the repository's `benchmark/`."""

from minisgl.benchmark.client import Load, RequestTrace, run_load
from minisgl.benchmark.perf import Figure, append_figures, machine, median_of, versions

__all__ = [
    "Figure",
    "Load",
    "RequestTrace",
    "append_figures",
    "machine",
    "median_of",
    "run_load",
    "versions",
]
