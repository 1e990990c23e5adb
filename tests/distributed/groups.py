"""Tensor-parallel groups without processes, for units smaller than an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

from minisgl.distributed import (
    DistributedCommunicator,
    DistributedInfo,
    SingleCommunicator,
    create_communicator,
)

T = TypeVar("T")


class Alone(SingleCommunicator):
    """A rank without its group: it can load its shards, but its collectives do nothing."""

    def __init__(self, rank: int = 0, size: int = 1, *, ep: bool = False) -> None:
        super().__init__()
        self.info = DistributedInfo(rank, size, ep)


def in_group(
    size: int,
    rendezvous: Path,
    work: Callable[[DistributedCommunicator], T],
    *,
    ep: bool = False,
) -> list[T]:
    """What `work` returns on each rank; the ranks are threads.

    No rank closes its connections while another may still make them.
    """
    all_done = threading.Barrier(size)

    def join(rank: int) -> T:
        try:
            comm = create_communicator(
                DistributedInfo(rank, size, ep), torch.device("cpu"), rendezvous, timeout_s=60
            )
            try:
                result = work(comm)
                with suppress(threading.BrokenBarrierError):  # another rank has failed
                    all_done.wait()
                return result
            finally:
                comm.close()
        except BaseException:
            all_done.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size)))
