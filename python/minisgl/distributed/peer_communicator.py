"""Sums through peer memory where that is faster than NCCL; all other collectives by NCCL.

Next to read: `protocol_table.py`, `peer_memory.py`, then `kernel/all_reduce.py`.
"""

# Dimensions: D model width, T tokens of a step.

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from minisgl.distributed.communicator import DistributedCommunicator
from minisgl.distributed.peer_memory import PeerMemory, PeerMemoryError
from minisgl.distributed.protocol_table import ProtocolTable, Route, seconds_a_call
from minisgl.errors import ConfigError
from minisgl.kernel import PeerSum, Protocol, memory_bytes, peer_sum_kernels

logger = logging.getLogger(__name__)

_MAX_RANKS = 8
_PATIENCE_S = 60.0
_MEASURED_BYTES = tuple(1 << 10 << i for i in (3, 5, 7, 8, 9, 10, 11, 13))  # 8 KiB to 8 MiB


class PeerCommunicator(DistributedCommunicator):
    """Adds up tensors of a size that `table` gives to a protocol, and leaves the rest to NCCL.

    It owns both. All calls are ordered, as if they were on one stream.
    """

    def __init__(
        self,
        nccl: DistributedCommunicator,
        memory: PeerMemory,
        peer_sum: PeerSum,
        table: ProtocolTable,
    ) -> None:
        super().__init__(nccl.info)
        self._nccl = nccl
        self._memory = memory
        self._peer_sum = peer_sum
        self._table = table

    def all_reduce(self, x: Tensor) -> Tensor:
        protocol = self._table.route(x.nbytes)
        if protocol is None or not self._peer_sum.takes(x, protocol):
            return self._nccl.all_reduce(x)
        self._peer_sum.add_up(x, protocol)
        return x

    def add_up_and_norm(
        self, x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        protocol = self._table.route(x_TD.nbytes)
        if protocol is None or not self._peer_sum.takes_rows(x_TD, protocol):
            return super().add_up_and_norm(x_TD, residual_TD, weight_D, eps)
        return self._peer_sum.add_up_and_norm(x_TD, residual_TD, weight_D, eps, protocol)

    def all_reduce_min(self, x: Tensor) -> Tensor:
        return self._nccl.all_reduce_min(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._nccl.all_gather(x)

    def gather(self, x: Tensor) -> Tensor | None:
        return self._nccl.gather(x)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._nccl.broadcast(x)

    def close(self) -> None:
        self._memory.close()
        self._nccl.close()


def with_peer_memory(
    nccl: DistributedCommunicator, device: torch.device, *, is_required: bool
) -> DistributedCommunicator:
    """Return a communicator that adds up over peer memory, if it works and is faster than NCCL.

    All ranks decide alike.

    Args:
        nccl: the result owns it, or is it.
        is_required: whether all sums that fit go through peer memory, even where NCCL is faster.

    Raises:
        ConfigError: peer memory is required and does not work.
    """
    try:
        memory, peer_sum = share_memory(nccl, device)
    except PeerMemoryError as error:
        if is_required:
            raise ConfigError(f"--comm peer does not work here: {error}") from None
        logger.info("sums go through NCCL: %s", error)
        return nccl

    table = measure_routes(nccl, peer_sum, device, with_nccl=not is_required)
    if not table.uses_peer_memory:
        logger.info("sums go through NCCL: it is faster than peer memory")
        memory.close()
        return nccl
    logger.info("sums of the ranks: %s", table)
    return PeerCommunicator(nccl, memory, peer_sum, table)


def share_memory(nccl: DistributedCommunicator, device: torch.device) -> tuple[PeerMemory, PeerSum]:
    """Share memory with the other ranks, and make the `PeerSum` that adds up there.

    Raises:
        PeerMemoryError: on all ranks alike.
    """
    if nccl.info.size > _MAX_RANKS:
        raise PeerMemoryError(f"{nccl.info.size} ranks are more than {_MAX_RANKS}")
    kernels = peer_sum_kernels(device)
    num_bytes = memory_bytes(kernels) if kernels else 0
    if not nccl.all_reduce_min(torch.tensor([num_bytes], device=device)).item():
        raise PeerMemoryError("the kernels cannot be compiled")
    memory = PeerMemory(nccl, device, num_bytes)
    return memory, PeerSum(kernels, memory.addresses, nccl.info.rank, patience_s=_PATIENCE_S)


def measure_routes(
    nccl: DistributedCommunicator, peer_sum: PeerSum, device: torch.device, *, with_nccl: bool
) -> ProtocolTable:
    """Measure sums of some sizes on all routes, together with the other ranks.

    Rank 0's times count.
    """
    routes: list[Route] = [*Protocol, None] if with_nccl else [*Protocol]
    rows = []
    for num_bytes in _MEASURED_BYTES:
        x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
        rows.append([_seconds_of_sum(nccl, peer_sum, x, route) for route in routes])
    seconds = torch.tensor(rows, dtype=torch.float64, device=device)
    return ProtocolTable.of_fastest(_MEASURED_BYTES, nccl.broadcast(seconds).tolist(), routes)


def _seconds_of_sum(
    nccl: DistributedCommunicator, peer_sum: PeerSum, x: Tensor, route: Route
) -> float:
    if route is None:
        return seconds_a_call(lambda: nccl.all_reduce(x))
    if not peer_sum.takes(x, route):
        return math.inf
    return seconds_a_call(lambda: peer_sum.add_up(x, route))
