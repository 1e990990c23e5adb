"""How many connections the API process takes: those that its descriptors allow, and a queue."""

from __future__ import annotations

import resource

from minisgl.errors import ConfigError

BACKLOG = 2048  # connections that wait to be accepted
NUM_RESERVED = 32  # connections above the limit, which are there for /health
_OTHERS = 96  # files, queues, and connections that are accepted but not yet counted
_PER_WORKER = 8
_AUTO = 16384


def raise_limit() -> int:
    """Raise the limit of open descriptors to the highest that is allowed; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # some systems refuse what they report as allowed
        return soft
    return hard


def fit_connections(wanted: int | None, num_workers: int, limit: int) -> int:
    """The number of connections that may be open; `wanted` is None for "auto".

    Raises:
        ConfigError: the limit of descriptors is too low.
    """
    reserve = NUM_RESERVED + _OTHERS + _PER_WORKER * num_workers
    most = limit - reserve if limit != resource.RLIM_INFINITY else _AUTO
    if most < (wanted or 1):
        raise ConfigError(
            f"--max-connections {wanted or 1} needs {reserve + (wanted or 1)} descriptors, "
            f"the limit is {limit}; see ulimit -n"
        )
    return wanted or min(most, _AUTO)
