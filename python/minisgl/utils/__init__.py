"""Small tools without knowledge of the engine: logging, queues between processes, hardware, registries."""

from minisgl.utils.arch import Hardware, detect_hardware, die_with_parent
from minisgl.utils.logger import set_up_logging
from minisgl.utils.registry import Registry
from minisgl.utils.staging import Numbers, Staging

__all__ = ["Hardware", "Numbers", "Registry", "Staging", "detect_hardware", "die_with_parent", "set_up_logging"]
