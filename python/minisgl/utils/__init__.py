"""Tools that do not know the engine.

The machine:

    hardware.py          its devices and its memory
    driver.py            the driver of its GPUs
    cuda_toolkit.py      CUDA's compiler
    env.py               environment variables
    heap.py              the C library's heap: its options, and how much a thread takes
    garbage.py           when a process collects garbage
    bytecode.py          where compiled Python is kept
    staging.py           copies from pinned host memory to the device

Files:

    ownership.py         folders and files that no other user can write
    standard_streams.py  standard streams that were closed at the start, or cannot be written

General:

    logger.py            logging
    progress.py          a progress bar
    once.py              values that are made once per process
    shortages.py         errors that mean that the system is short of a resource
    threads.py           threads where the system may have none left
    field_types.py       whether values have the types of their fields
    excerpts.py          excerpts of values, for errors
    fair_queue.py        jobs that take turns by their cost
    signals.py           duplicates of signals
    token_names.py       renames tokens in a tokenizer.json
"""

from minisgl.utils.hardware import Hardware, detect_hardware
from minisgl.utils.logger import set_up_logging

__all__ = ["Hardware", "detect_hardware", "set_up_logging"]
