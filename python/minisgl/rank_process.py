"""How the process of a tensor-parallel rank begins, before it runs `scheduler/worker.py`.

torch takes seconds to import. Meanwhile a thread makes the context of the rank's GPU, and compilers
make what the cache folder lacks. The engine finds what they have made in that folder, as on a later
start. If the thread fails, the engine does the same work, and reports the failure.

A process that stands by for a rank has imported torch before (`import_scheduler`).
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from minisgl.builds import Library, library_folder, needed_libraries
from minisgl.checkpoint import ModelConfig
from minisgl.config import SchedulerConfig
from minisgl.processes.addresses import Addresses
from minisgl.processes.child import Ready
from minisgl.utils.driver import GpuDriver
from minisgl.utils.garbage import keep_imports
from minisgl.utils.hardware import guess_hardware, short_waits
from minisgl.utils.logger import adopt_loggers

logger = logging.getLogger(__name__)


def run_rank(ready: Ready, config: SchedulerConfig, rank: int, addresses: Addresses) -> None:
    """Body of a process: see `scheduler_worker`."""
    # Before the thread: libcuda reads the environment that `short_waits` changes.
    with short_waits(), keep_imports():
        threading.Thread(target=prepare, args=(config, rank), name="prepare", daemon=True).start()
        from minisgl.scheduler import scheduler_worker  # here, while the thread runs

    adopt_loggers("torch")
    logger.debug("torch and the scheduler are imported")
    scheduler_worker(ready, config, rank, addresses)


def import_scheduler() -> None:
    """Import all that `run_rank` does, before it is known which rank this process will be."""
    with short_waits():
        import minisgl.scheduler  # noqa: F401 - it stays imported


def prepare(config: SchedulerConfig, rank: int) -> None:
    """Start to compile what a rank will load, and make the context of its GPU."""
    driver = None if config.device == "cpu" else GpuDriver.load()
    try:
        start_compilers(config, rank, driver)
    except Exception:  # the engine meets and reports it
        logger.debug("nothing is compiled while torch is imported", exc_info=True)
    if driver is not None and rank < driver.num_gpus:
        driver.make_context(rank)


def start_compilers(config: SchedulerConfig, rank: int, driver: GpuDriver | None) -> None:
    """Compile in threads what is not kept yet.

    Raises:
        ConfigError, CheckpointError: options or model cannot work.
        OSError: nothing can be kept.
    """
    config = config.resolve(guess_hardware(driver))
    assert config.model
    model = ModelConfig.from_folder(Path(config.model))
    capability = None if driver is None else driver.capability(rank)
    folder = library_folder()
    for library in needed_libraries(config, model, capability):
        logger.debug("%s is needed", library.name)
        threading.Thread(target=_make, args=(library, folder), name="compile", daemon=True).start()


def _make(library: Library, folder: Path) -> None:
    try:
        library.make_in(folder)
    except (OSError, RuntimeError) as error:  # who loads it tries again, and says why it fails
        logger.debug("%s is not compiled: %s", library.name, error)
