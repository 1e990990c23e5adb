"""Memory, descriptors and threads of a server's processes, sampled each second.

Memory is the part that no file backs: `Pss_Anon` and `Pss_Shmem` of Linux's smaps_rollup. Leaks are
there. Resident memory (RSS) also counts pages of libraries and weights, which come and go with the
page cache, and all pages that a fork shares with its parent. The whole PSS divides shared pages
among their processes, so it changes with every other process that maps the same library.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from minisgl.benchmark.stress.trends import Sample
from minisgl.benchmark.stress.watch import Span, Watch

MEASURES = ("memory_mib", "descriptors", "threads")
_EVERY_S = 1.0
_KINDS_OF_MEMORY = ("Pss_Anon:", "Pss_Shmem:")


def memory_mib(pid: int) -> float:
    """The memory of a process that no file backs, in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kib = sum(int(line.split()[1]) for line in lines if line.startswith(_KINDS_OF_MEMORY))
    return kib / 1024


def numbers_of(process: psutil.Process) -> dict[str, float]:
    """The numbers of a process by their names in `MEASURES`; none if it has ended."""
    with suppress(psutil.Error, OSError):
        values = (memory_mib(process.pid), process.num_fds(), process.num_threads())
        return dict(zip(MEASURES, values, strict=True))
    return {}


class ProcessWatch(Watch):
    """Samples a server's first process, here called `server`, and all its descendants.

    Attributes:
        samples: by the name of a process and of a measure, at times of `time.perf_counter`.
        seen: all processes that have run.
    """

    def __init__(self, server: psutil.Process) -> None:
        super().__init__()
        self._server = server
        self.samples: dict[tuple[str, str], list[Sample]] = defaultdict(list)
        self.seen: set[psutil.Process] = set()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            with suppress(psutil.NoSuchProcess):
                self.look()

    def look(self) -> dict[str, dict[str, float]]:
        """Take a sample now; returns it by the names of processes."""
        processes = {"server": self._server}
        for child in self._server.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                processes[child.name()] = child
                self.seen.add(child)
        self.seen.add(self._server)
        found = {name: numbers_of(process) for name, process in processes.items()}
        now = time.perf_counter()
        for name, numbers in found.items():
            for measure, value in numbers.items():
                sample = Sample(processes[name].pid, now, value)
                self.samples[name, measure].append(sample)
        return found

    def samples_without(self, spans: Iterable[Span]) -> dict[tuple[str, str], list[Sample]]:
        """The samples that were taken outside of the spans."""
        without = list(spans)

        def is_inside(sample: Sample) -> bool:
            return any(span.begin <= sample.at_s <= span.end for span in without)

        return {
            key: [sample for sample in samples if not is_inside(sample)]
            for key, samples in self.samples.items()
        }
