"""The processor time of a server's processes, if the server runs on this machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

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
        return [each for root in roots for each in _family(root)]
    except psutil.NoSuchProcess as error:
        raise ConfigError(f"--server-pid is {pid}; there is no such process") from error


def _listeners(endpoint: Endpoint) -> set[int]:
    if not _is_local(endpoint.host):
        return set()
    with suppress(psutil.AccessDenied):
        sockets = psutil.net_connections("tcp")
        pids = {each.pid for each in sockets if _is_listener(each, endpoint.port)}
        return {_eldest_listener(pid, endpoint.port) for pid in pids if pid is not None}
    return set()


def _is_listener(connection: Any, port: int) -> bool:
    return bool(connection.status == psutil.CONN_LISTEN and connection.laddr.port == port)


def _eldest_listener(pid: int, port: int) -> int:
    """Find the process that a listener at `port` got its socket from.

    Processes may share a socket, of which psutil names one.
    """
    eldest = psutil.Process(pid)
    for parent in eldest.parents():
        if not _listens(parent, port):
            break
        eldest = parent
    return int(eldest.pid)


def _listens(process: psutil.Process, port: int) -> bool:
    with suppress(psutil.AccessDenied):  # a process of another user
        return any(_is_listener(each, port) for each in process.net_connections("tcp"))
    return False


def _is_local(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _family(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


class CpuMeter:
    """Measures the share of a core that each process uses, from now on.

    A process that ends meanwhile is left out: its processor time cannot be read any more.
    """

    def __init__(self, processes: Iterable[psutil.Process]) -> None:
        self._before_s: dict[str, tuple[psutil.Process, float]] = {}  # by label
        num_of_name: Counter[str] = Counter()
        for process in sorted(set(processes), key=lambda process: process.pid):
            with suppress(psutil.NoSuchProcess):
                name = process.name()
                cpu_s = _cpu_s(process)
                num_of_name[name] += 1
                label = name if num_of_name[name] == 1 else f"{name} {num_of_name[name]}"
                self._before_s[label] = (process, cpu_s)
        self._began_s = time.monotonic()

    def shares(self) -> dict[str, float]:
        """
        Returns:
            the share of each process by its name; processes of one name are numbered by age.
        """
        wall_s = time.monotonic() - self._began_s
        found = {}
        for label, (process, before_s) in self._before_s.items():
            with suppress(psutil.NoSuchProcess):
                found[label] = (_cpu_s(process) - before_s) / wall_s
        return found


def _cpu_s(process: psutil.Process) -> float:
    """Seconds of processor time.

    Raises:
        psutil.NoSuchProcess: the process has ended, even if another one has its number now.
    """
    times = process.cpu_times()
    if not process.is_running():
        raise psutil.NoSuchProcess(process.pid)
    return float(times.user + times.system)
