"""Compiles the kernels of a device side by side, while the weights are loaded."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from minisgl.utils.progress import ProgressBar

logger = logging.getLogger(__name__)

_BLINK_S = 0.5  # how often the bar counts the seconds
_MOST = 8  # builds at a time; there are fewer


class KernelBuilds:
    """Runs builds side by side, each in a thread of its own. A second start finds them done.

    Args:
        builds: those that can start now, by names that a person reads.
    """

    def __init__(self, builds: Mapping[str, Callable[[], object]]) -> None:
        self._pool = ThreadPoolExecutor(_MOST, thread_name_prefix="minisgl-build")
        self._names: dict[Future[object], str] = {}
        self.start(builds)

    def start(self, builds: Mapping[str, Callable[[], object]]) -> None:
        """Start further builds, before `wait`."""
        for name, build in builds.items():
            self._names[self._pool.submit(build)] = name

    def wait(self) -> None:
        """Return when all are done. A bar says for what it waits.

        Raises:
            ConfigError: something cannot be compiled.
        """
        done, unfinished = concurrent.futures.wait(self._names, timeout=_BLINK_S)
        if unfinished:
            logger.info("waiting for %s; what is compiled is kept", self._names_of(unfinished))
            self._show_progress(len(done))
        self._pool.shutdown()
        for build in self._names:
            build.result()

    def _show_progress(self, num_done: int) -> None:
        with ProgressBar(total=len(self._names), initial=num_done, unit="build") as bar:
            while bar.n < bar.total:
                done, unfinished = concurrent.futures.wait(self._names, timeout=_BLINK_S)
                bar.set_description(f"Waiting for {self._names_of(unfinished)}", refresh=False)
                bar.n = len(done)
                bar.refresh()

    def _names_of(self, builds: Iterable[Future[object]]) -> str:
        return ", ".join(sorted(self._names[build] for build in builds))
