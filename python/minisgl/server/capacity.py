"""How many connections an API process takes, and how many API processes a machine is good for."""

from __future__ import annotations

import resource

from minisgl.errors import ConfigError

BACKLOG = 2048  # connections that wait to be accepted
NUM_RESERVED = 32  # connections above the limit, which are there for /health
# Descriptors of files, of queues, and of connections that are accepted but not yet counted.
_OTHER_DESCRIPTORS = 96
_DESCRIPTORS_PER_WORKER = 8
_MOST_CONNECTIONS = 16384  # if the user does not say how many

_CORES_PER_API_WORKER = 2  # the engine and the tokenizers need some of them
_MAX_API_WORKERS = 8


def fit_api_workers(num_cores: int) -> int:
    """The number of API processes for these cores. One writes some 30,000 chunks a second."""
    return min(_MAX_API_WORKERS, max(1, num_cores // _CORES_PER_API_WORKER))


def raise_descriptor_limit() -> int:
    """Raise the limit of open descriptors to the highest that is allowed; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # some systems refuse what they report as allowed
        return soft
    return hard


def fit_connections(wanted: int | None, num_workers: int, max_descriptors: int) -> int:
    """The number of connections that may be open; `wanted` is None for "auto".

    Args:
        max_descriptors: how many a process may have open, as `raise_descriptor_limit` says.

    Raises:
        ConfigError: the limit of descriptors is too low.
    """
    if max_descriptors == resource.RLIM_INFINITY:
        return wanted or _MOST_CONNECTIONS
    others = NUM_RESERVED + _OTHER_DESCRIPTORS + _DESCRIPTORS_PER_WORKER * num_workers
    most = max_descriptors - others
    if most < (wanted or 1):
        raise ConfigError(
            f"{num_workers} processes and --max-connections {wanted or 1} need "
            f"{others + (wanted or 1)} descriptors, the limit is {max_descriptors}; see ulimit -n, "
            "--tp, --num-tokenizer and --api-workers"
        )
    return wanted or min(most, _MOST_CONNECTIONS)
