"""Memory that ranks share, over a driver that stands in for CUDA's; and what happens without it."""

from __future__ import annotations

import ctypes
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.distributed import DistributedCommunicator, peer_communicator, peer_memory
from minisgl.distributed.peer_communicator import PeerCommunicator, with_peer_memory
from minisgl.distributed.peer_memory import PeerMemory, PeerMemoryError
from minisgl.distributed.protocol_table import ProtocolTable
from minisgl.errors import ConfigError
from minisgl.kernel import Protocol
from tests.distributed.groups import in_group

SIZE = 3
NUM_BYTES = 1000
FUNCTIONS = ["cuMemAlloc_v2", "cuMemsetD8_v2", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2"]


class HostDriver:
    """The functions of CUDA's driver, over the memory of this process.

    Attributes:
        allocated: what is allocated, by address.
        opened: an address for each mapping that is open.
        failing: the function that fails on the last rank, if any.
    """

    def __init__(self) -> None:
        self.allocated: dict[int, Any] = {}
        self.opened: list[int] = []
        self.failing: str | None = None
        self.rank = threading.local()

    def __call__(self, function: str, *arguments: Any) -> None:
        if function == self.failing and self.rank.number == SIZE - 1:
            raise PeerMemoryError(f"{function} failed with error 1 of CUDA")
        getattr(self, function)(*arguments)

    def cuMemAlloc_v2(self, address: Any, size: ctypes.c_size_t) -> None:
        memory = ctypes.create_string_buffer(b"\xff" * size.value)
        address._obj.value = ctypes.addressof(memory)
        self.allocated[ctypes.addressof(memory)] = memory

    def cuMemsetD8_v2(self, address: Any, value: Any, size: Any) -> None:
        ctypes.memset(address.value, value.value, size.value)

    def cuMemcpyDtoH_v2(self, to: Any, address: Any, size: Any) -> None:
        ctypes.memmove(to, address.value, size.value)

    def cuIpcGetMemHandle(self, handle: Any, address: Any) -> None:
        ctypes.memmove(ctypes.addressof(handle._obj), ctypes.byref(address), 8)

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> None:
        ctypes.memmove(ctypes.byref(address._obj), ctypes.addressof(handle), 8)
        self.opened.append(address._obj.value)

    def cuIpcCloseMemHandle(self, address: Any) -> None:
        self.opened.remove(address.value)

    def cuMemFree_v2(self, address: Any) -> None:
        assert address.value not in self.opened
        del self.allocated[address.value]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    driver = HostDriver()
    monkeypatch.setattr(peer_memory, "_driver", driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: True)
    return driver


def share(driver: HostDriver, comm: DistributedCommunicator) -> PeerMemory:
    driver.rank.number = comm.info.rank
    return PeerMemory(comm, torch.device("cpu", comm.info.rank), NUM_BYTES)


def test_every_rank_sees_the_memory_of_all_and_it_is_zero(
    driver: HostDriver, tmp_path: Path
) -> None:
    def work(comm: DistributedCommunicator) -> list[int]:
        memory = share(driver, comm)
        contents = [ctypes.string_at(address, NUM_BYTES) for address in memory.addresses]
        assert contents == [bytes(NUM_BYTES)] * SIZE
        memory.close()
        return memory.addresses

    one, *others = in_group(SIZE, tmp_path / "rendezvous", work)
    assert len(set(one)) == SIZE
    assert others == [one] * (SIZE - 1)
    assert driver.allocated == {}
    assert driver.opened == []


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_failure_of_one_rank_fails_all_and_leaves_nothing(
    driver: HostDriver, tmp_path: Path, function: str
) -> None:
    driver.failing = function

    def work(comm: DistributedCommunicator) -> str:
        with pytest.raises(PeerMemoryError) as raised:
            share(driver, comm)
        return str(raised.value)

    *others, last = in_group(SIZE, tmp_path / "rendezvous", work)
    assert last == f"{function} failed with error 1 of CUDA"
    assert others == ["another rank cannot share memory"] * (SIZE - 1)
    assert driver.allocated == {}
    assert driver.opened == []


def test_gpus_that_cannot_reach_each_other_share_nothing(
    driver: HostDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: own < peer)

    def work(comm: DistributedCommunicator) -> str:
        with pytest.raises(PeerMemoryError) as raised:
            share(driver, comm)
        return str(raised.value)

    assert in_group(SIZE, tmp_path / "rendezvous", work) == [
        "another rank cannot share memory",
        "GPU 1 cannot access the memory of GPU 0",
        "GPU 2 cannot access the memory of GPU 0",
    ]
    assert driver.allocated == {}


def test_writes_that_do_not_arrive_are_found(
    driver: HostDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_marks(address: Any, value: Any, size: Any) -> None:
        if not value.value:
            ctypes.memset(address.value, 0, size.value)

    monkeypatch.setattr(driver, "cuMemsetD8_v2", lose_marks)

    def work(comm: DistributedCommunicator) -> str:
        with pytest.raises(PeerMemoryError) as raised:
            share(driver, comm)
        return str(raised.value)

    assert (
        in_group(SIZE, tmp_path / "rendezvous", work)
        == ["what other ranks write does not arrive: [0, 0, 0]"] * SIZE
    )


# ---- the communicator


def test_without_peer_memory_sums_go_through_nccl_unless_it_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_communicator, "peer_sum_kernels", lambda device: None)
    caplog.set_level(logging.INFO)

    def work(comm: DistributedCommunicator) -> bool:
        device = torch.device("cpu")
        with pytest.raises(ConfigError, match="--comm peer does not work here: the kernels cannot"):
            with_peer_memory(comm, device, is_required=True)
        return with_peer_memory(comm, device, is_required=False) is comm

    assert in_group(2, tmp_path / "rendezvous", work) == [True, True]
    assert "sums go through NCCL: the kernels cannot be compiled" in caplog.text


class Recorded:
    """Records which sums it gets, and takes floats only."""

    def __init__(self) -> None:
        self.log: list[tuple[int, Protocol]] = []

    def takes(self, x: torch.Tensor, protocol: Protocol) -> bool:
        return x.dtype == torch.float32

    def add_up(self, x: torch.Tensor, protocol: Protocol) -> None:
        self.log.append((x.nbytes, protocol))

    def takes_rows(self, x_TD: torch.Tensor, protocol: Protocol) -> bool:
        return self.takes(x_TD, protocol) and protocol != Protocol.PUSH

    def add_up_and_norm(self, x_TD: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.log.append((x_TD.nbytes, rest[-1]))
        return x_TD, x_TD


class Closed:
    """Memory that knows whether it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_a_norm_is_computed_with_the_sum_where_the_protocol_takes_rows(tmp_path: Path) -> None:
    """Otherwise the sum comes first, and then the norm."""
    table = ProtocolTable((8, 16, 32), (Protocol.PUSH, Protocol.ONE_SHOT, None))

    def work(group: DistributedCommunicator) -> Any:
        peer_sum: Any = Recorded()
        nothing: Any = None
        comm = PeerCommunicator(group, nothing, peer_sum, table)
        weight = torch.ones(1)
        for num_rows in (1, 2, 3):
            comm.add_up_and_norm(torch.ones(num_rows, 1), None, weight, 0.0)
        normed, total = comm.add_up_and_norm(torch.ones(5, 1), torch.ones(5, 1), weight, 0.0)
        halves = comm.add_up_and_norm(torch.ones(2, 1).half(), None, weight.half(), 0.0)
        return peer_sum.log, normed.tolist(), total.tolist(), halves[1].tolist()

    for log, normed, total, halves in in_group(2, tmp_path / "rendezvous", work):
        assert log == [(4, Protocol.PUSH), (8, Protocol.PUSH), (12, Protocol.ONE_SHOT)]
        assert normed == [[1.0]] * 5
        assert total == [[3.0]] * 5
        assert halves == [[2.0]] * 2


def test_sums_go_where_the_table_says(tmp_path: Path) -> None:
    """The sums of peer memory are not computed here; those of the group are."""
    table = ProtocolTable((8, 16), (Protocol.PUSH, Protocol.ONE_SHOT))

    def work(group: DistributedCommunicator) -> Any:
        memory: Any = Closed()
        peer_sum: Any = Recorded()
        comm = PeerCommunicator(group, memory, peer_sum, table)
        assert comm.info is group.info
        sums = [comm.all_reduce(torch.ones(num)).tolist() for num in (1, 2, 3, 5)]
        sums.append(comm.all_reduce(torch.ones(2, dtype=torch.int32)).tolist())
        x = torch.tensor([comm.info.rank])
        others = [
            int(comm.all_reduce_min(x.clone())),
            comm.all_gather(x).tolist(),
            int(comm.broadcast(x.clone())),
        ]
        gathered = comm.gather(x)
        assert (gathered is None) == (comm.info.rank > 0)
        memory.close()
        assert memory.is_closed
        return peer_sum.log, sums, others

    for log, sums, others in in_group(2, tmp_path / "rendezvous", work):
        assert log == [(4, Protocol.PUSH), (8, Protocol.PUSH), (12, Protocol.ONE_SHOT)]
        assert sums == [[1.0], [1.0] * 2, [1.0] * 3, [2.0] * 5, [2, 2]]
        assert others == [0, [0, 1], 0]
