"""Tools that do not know the engine.

arch.py            the hardware; memory; a process that ends with its parent
cuda_toolkit.py    CUDA's compiler
env.py             environment variables
logger.py          logging
mp.py              queues between processes
private_folder.py  the folder of their sockets
progress.py        a progress bar
registry.py        tables of named backends and models
shared_numbers.py  numbers that several processes change
staging.py         copies from pinned host memory to the device
supervisor.py      child processes
"""

from minisgl.utils.arch import Hardware, detect_hardware, die_with_parent
from minisgl.utils.logger import set_up_logging
from minisgl.utils.registry import Registry

__all__ = ["Hardware", "Registry", "detect_hardware", "die_with_parent", "set_up_logging"]
