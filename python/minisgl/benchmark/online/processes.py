"""The processor time of a server's processes, if the server runs on this machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address

import psutil

from minisgl.benchmark.online.client import Endpoint
from minisgl.errors import ConfigError


def find_server(endpoint: Endpoint, pid: int | None) -> list[psutil.Process]:
    """Find the processes of a server: those of `pid`, or of the listener at the local port.

    Returns:
        an empty list for a server on another machine, or of another user.

    Raises:
        ConfigError: there is no process with this pid.
    """
    roots = {pid} if pid is not None else _listeners(endpoint)
    try:
        return [each for root in roots if root for each in _family(root)]
    except psutil.NoSuchProcess as error:
        raise ConfigError(f"--server-pid is {pid}; there is no such process") from error


def _listeners(endpoint: Endpoint) -> set[int | None]:
    if not _is_local(endpoint.host):
        return set()
    with suppress(psutil.AccessDenied):
        sockets = psutil.net_connections("tcp")
        listening = [each for each in sockets if each.status == psutil.CONN_LISTEN]
        return {each.pid for each in listening if each.laddr.port == endpoint.port}
    return set()


def _is_local(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _family(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


class CpuMeter:
    """Measures the share of a core that each process uses, from now on."""

    def __init__(self, processes: Iterable[psutil.Process]) -> None:
        self._before_s = {process: _cpu_s(process) for process in set(processes)}
        self._began_s = time.monotonic()

    def shares(self) -> dict[str, float]:
        """The share of each process by its name; processes of one name are numbered by age."""
        wall_s = time.monotonic() - self._began_s
        num_of_name: Counter[str] = Counter()
        found = {}
        for process in sorted(self._before_s, key=lambda process: process.pid):
            name = _name(process)
            num_of_name[name] += 1
            label = name if num_of_name[name] == 1 else f"{name} {num_of_name[name]}"
            found[label] = (_cpu_s(process) - self._before_s[process]) / wall_s
        return found


def _name(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return str(process.name())
    return "ended"


def _cpu_s(process: psutil.Process) -> float:
    """Seconds of processor time; not a number if the process has ended."""
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return float("nan")
