"""Tools that do not know the engine.

The machine:

    hardware.py          its devices and its memory
    driver.py            the driver of its GPUs
    cuda_toolkit.py      CUDA's compiler
    env.py               environment variables
    heap.py              the C library's heap: its options, and what a thread takes
    garbage.py           when a process collects garbage
    bytecode.py          where compiled Python is kept
    staging.py           copies from pinned host memory to the device

Files:

    ownership.py         folders and files that no other user can write
    standard_streams.py  standard streams that were closed at the start, or cannot be written

For all:

    logger.py            logging
    progress.py          a progress bar
    once.py              what is made once, whichever thread asks first
    shortages.py         errors of a system that is short of something
    threads.py           threads where the system may have none left
    field_types.py       whether values have the types of their fields
    excerpts.py          values in errors, whatever their size
    fair_queue.py        jobs that take turns by their cost
    signals.py           signals that come twice for one wish
    token_names.py       other names for tokens of a tokenizer.json
"""

from minisgl.utils.hardware import Hardware, detect_hardware
from minisgl.utils.logger import set_up_logging

__all__ = ["Hardware", "detect_hardware", "set_up_logging"]
