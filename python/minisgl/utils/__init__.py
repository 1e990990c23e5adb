"""Tools that do not know the engine.

The machine:

    hardware.py          its devices and its memory
    driver.py            the driver of its GPUs
    cuda_toolkit.py      CUDA's compiler
    env.py               environment variables
    heap.py              the C library's heap: its options, and what a thread takes
    garbage.py           when a process collects garbage
    staging.py           copies from pinned host memory to the device

Processes:

    supervisor.py        child processes: they start together, and are ready together
    child_process.py     one of them, as its parent sees it
    child_failures.py    which has failed first, and why
    child.py             what a child does: it reports, beats, and ends with its parent
    queues.py            queues between processes
    addresses.py         their addresses, and which process has a request
    shared_numbers.py    numbers that several processes change
    private_folder.py    the folder of their sockets
    ownership.py         folders and files that no other user can write
    fair_queue.py        jobs that take turns by their cost
    standard_streams.py  standard streams that were closed when the program was started

For all:

    logger.py            logging
    progress.py          a progress bar
    once.py              what is made once, whichever thread asks first
    registry.py          tables of named backends and models
    field_types.py       whether values have the types of their fields
"""

from minisgl.utils.child import die_with_parent
from minisgl.utils.hardware import Hardware, detect_hardware
from minisgl.utils.logger import set_up_logging
from minisgl.utils.registry import Registry

__all__ = ["Hardware", "Registry", "detect_hardware", "die_with_parent", "set_up_logging"]
