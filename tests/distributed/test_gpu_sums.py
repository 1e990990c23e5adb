"""Sums over peer memory on several GPUs, against sums that every rank computes for itself."""

# Dimensions: D model width, T tokens of a step.

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import Tensor

from minisgl.distributed import (
    DistributedInfo,
    PeerCommunicator,
    TorchCommunicator,
    create_communicator,
)
from minisgl.distributed.peer_communicator import share_memory
from minisgl.kernel import (
    PeerSum,
    Protocol,
    peer_sum_kernels,
    rms_norm_reference,
    sum_reference,
)
from tests.distributed.harness import in_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs more GPUs"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NUM_BYTES = [2, 16, 18, 1000, 1024, 10240, 65534, 131072, 262144, 500002, 1 << 20, 3000006, 8 << 20]
BEYOND = [(8 << 20) + 4, 16 << 20]
sizes = pytest.mark.parametrize(
    "size", [size for size in (2, 3, 4, 8) if size <= torch.cuda.device_count()]
)


class Numbers:
    """The random numbers of all ranks, equal in each process."""

    def __init__(self, info: DistributedInfo, device: torch.device) -> None:
        self._info = info
        self._device = device
        self._random = [torch.Generator(device).manual_seed(rank) for rank in range(info.size)]

    def draw(self, num: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Those of this rank, and the sum of all."""
        of_ranks = [
            torch.randn(num, generator=each, device=self._device).to(dtype) for each in self._random
        ]
        return of_ranks[self._info.rank].clone(), sum_reference(of_ranks)


def join(info: DistributedInfo, rendezvous: Path) -> tuple[torch.device, TorchCommunicator]:
    device = torch.device("cuda", info.rank)
    torch.cuda.set_device(device)
    return device, TorchCommunicator(info, device, rendezvous, timeout_s=60)


def num_different(x: Tensor, y: Tensor) -> Tensor:
    return (x.view(torch.uint8) != y.view(torch.uint8)).sum()


def pieces(num_bytes: int, dtype: torch.dtype) -> Iterator[slice]:
    """Where a tensor of so many bytes may lie in a wider one."""
    num = num_bytes // dtype.itemsize
    if num:
        yield slice(0, num)
        yield slice(3, 3 + num)


def all_sizes(rendezvous: Path, info: DistributedInfo) -> None:
    device, nccl = join(info, rendezvous)
    memory, peer_sum = share_memory(nccl, device)
    numbers = Numbers(info, device)
    for dtype in DTYPES:
        for num_bytes in NUM_BYTES:
            for piece in pieces(num_bytes, dtype):
                for protocol in Protocol:
                    wide, expected = numbers.draw(piece.stop + 9, dtype)
                    before = wide.clone()
                    x = wide[piece]
                    if not peer_sum.takes(x, protocol):
                        continue
                    peer_sum.add_up(x, protocol)
                    assert num_different(x, expected[piece]) == 0, (dtype, piece, protocol)
                    x.copy_(before[piece])
                    assert num_different(wide, before) == 0, "others are untouched"
    memory.close()
    nccl.close()


@sizes
def test_every_size_and_dtype_is_added_up_to_the_last_bit(size: int, tmp_path: Path) -> None:
    in_processes(size, partial(all_sizes, tmp_path / "rendezvous"))


def mixed_calls(rendezvous: Path, info: DistributedInfo) -> None:
    """Ranks of different paces, on a stream of their own, without a wait between calls."""
    device, nccl = join(info, rendezvous)
    memory, peer_sum = share_memory(nccl, device)
    numbers = Numbers(info, device)
    common = random.Random(0)
    own = random.Random(info.rank)
    cases = []
    for num_bytes in NUM_BYTES[1:]:
        x, expected = numbers.draw(num_bytes // 2, torch.bfloat16)
        protocols = [each for each in Protocol if peer_sum.takes(x, each)]
        cases.append((x, expected, protocols))
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3000):
            x, expected, protocols = common.choice(cases)
            y = x.clone()
            if own.random() < 0.05:
                torch.cuda._sleep(own.randrange(200_000))
            peer_sum.add_up(y, common.choice(protocols))
            wrong += num_different(y, expected)
    stream.synchronize()
    assert int(wrong) == 0
    memory.close()
    nccl.close()


@sizes
def test_calls_of_changing_sizes_and_protocols_do_not_mix(size: int, tmp_path: Path) -> None:
    in_processes(size, partial(mixed_calls, tmp_path / "rendezvous"))


def replays(rendezvous: Path, info: DistributedInfo) -> None:
    """A graph of sums of several sizes, one right after the other, with new inputs each time."""
    device, nccl = join(info, rendezvous)
    memory, peer_sum = share_memory(nccl, device)
    numbers = Numbers(info, device)
    calls = [
        (num_bytes // 2, protocol)
        for num_bytes in (10240, 16, 262144, 10240)
        for protocol in Protocol
    ]
    inputs = [torch.zeros(num, dtype=torch.bfloat16, device=device) for num, _ in calls]
    outputs = [torch.zeros_like(x) for x in inputs]

    def add_up_all() -> None:
        for x, y in zip(inputs, outputs, strict=True):
            y.copy_(x)
        for y, (_, protocol) in zip(outputs, calls, strict=True):
            peer_sum.add_up(y, protocol)

    add_up_all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        add_up_all()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    own = random.Random(info.rank)
    for i in range(1000):
        drawn = [numbers.draw(num, torch.bfloat16) for num, _ in calls]
        for x, (new, _) in zip(inputs, drawn, strict=True):
            x.copy_(new)
        if own.random() < 0.2:
            torch.cuda._sleep(own.randrange(500_000))
        graph.replay()
        for y, (_, expected) in zip(outputs, drawn, strict=True):
            wrong += num_different(y, expected)
        if i % 100 == 50:  # an eager call between two replays
            x, expected = numbers.draw(5000, torch.float32)
            peer_sum.add_up(x, Protocol.ONE_SHOT)
            wrong += num_different(x, expected)
    assert int(wrong) == 0
    del graph
    memory.close()
    nccl.close()


@sizes
def test_a_graph_is_replayed_with_changing_inputs(size: int, tmp_path: Path) -> None:
    in_processes(size, partial(replays, tmp_path / "rendezvous"))


def norms_in_a_graph(rendezvous: Path, info: DistributedInfo) -> None:
    """Each protocol, many shapes, right one after the other and replayed with new inputs."""
    device, nccl = join(info, rendezvous)
    memory, peer_sum = share_memory(nccl, device)
    numbers = Numbers(info, device)
    cases = []
    for protocol in Protocol:
        for shape in [(1, 5120), (3, 1024), (25, 5120), (32, 256), (300, 2048), (512, 8192)]:
            x_TD = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            if peer_sum.takes_rows(x_TD, protocol):
                _, weight_D = numbers.draw(shape[1], torch.bfloat16)  # equal on all ranks
                cases.append((x_TD, torch.zeros_like(x_TD), weight_D, protocol))

    def call_all() -> list[tuple[Tensor, Tensor]]:
        return [
            peer_sum.add_up_and_norm(x_TD.clone(), residual_TD.clone(), weight_D, 1e-6, protocol)
            for x_TD, residual_TD, weight_D, protocol in cases
        ]

    call_all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = call_all()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    far = torch.zeros((), device=device)
    own = random.Random(info.rank)
    for _ in range(200):
        expected = []
        for x_TD, residual_TD, weight_D, _ in cases:
            new, total = numbers.draw(x_TD.numel(), torch.bfloat16)
            x_TD.copy_(new.view_as(x_TD))
            residual_TD.copy_(total.flip(0).view_as(x_TD))
            total_TD = total.view_as(x_TD) + residual_TD
            expected.append((rms_norm_reference(total_TD, weight_D, 1e-6), total_TD))
        if own.random() < 0.2:
            torch.cuda._sleep(own.randrange(500_000))
        graph.replay()
        for (normed, total), (normed_TD, total_TD) in zip(results, expected, strict=True):
            wrong += num_different(total, total_TD)
            distance_TD = (normed.float() - normed_TD.float()).abs()
            far = torch.maximum(far, (distance_TD / (1 + normed_TD.float().abs())).max())
        for normed, _ in results:
            bits = nccl.all_gather(normed.view(torch.int16).long().sum()[None])
            wrong += (bits != bits[0]).sum()
    assert int(wrong) == 0
    assert float(far) < 0.02, "bfloat16 rounds by 0.004"
    del graph
    memory.close()
    nccl.close()


@sizes
def test_norms_of_sums_are_replayed_with_changing_inputs(size: int, tmp_path: Path) -> None:
    in_processes(size, partial(norms_in_a_graph, tmp_path / "rendezvous"))


def chosen_routes(rendezvous: Path, info: DistributedInfo) -> None:
    """Through the communicator."""
    device = torch.device("cuda", info.rank)
    torch.cuda.set_device(device)
    comm = create_communicator(info, device, rendezvous, "peer", 60)
    assert isinstance(comm, PeerCommunicator)
    numbers = Numbers(info, device)
    for num_bytes in NUM_BYTES + BEYOND:
        x, expected = numbers.draw(num_bytes // 2, torch.bfloat16)
        assert comm.all_reduce(x) is x
        torch.testing.assert_close(x, expected, atol=0.05, rtol=0.02)
    x, _ = numbers.draw(64, torch.float32)
    columns = x.view(8, 8).T
    assert comm.all_gather(columns).shape == (8, 8 * info.size)
    empty = torch.empty(0, 5, device=device)
    assert comm.all_reduce(empty) is empty
    comm.close()


@sizes
def test_the_communicator_adds_up_every_size(size: int, tmp_path: Path) -> None:
    in_processes(size, partial(chosen_routes, tmp_path / "rendezvous"))


def lost_bytes(rendezvous: Path, info: DistributedInfo) -> float:
    """How much memory is gone after memory was shared and closed once more.

    That is the median of many times: tests beside this one take memory of the GPU too.
    """
    device, nccl = join(info, rendezvous)
    free = []
    for _ in range(20):
        memory, _ = share_memory(nccl, device)
        memory.close()
        nccl.all_reduce(torch.zeros(1, device=device))  # until all ranks have closed theirs
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info(device)[0])
    nccl.close()
    return median(before - after for before, after in pairwise(free))


@sizes
def test_memory_is_returned(size: int, tmp_path: Path) -> None:
    assert max(in_processes(size, partial(lost_bytes, tmp_path / "rendezvous"))) < 4 << 20


def wait_for_nobody(rendezvous: Path, info: DistributedInfo) -> str:
    device, nccl = join(info, rendezvous)
    memory, _ = share_memory(nccl, device)
    if info.rank > 0:
        time.sleep(6)
        return ""
    peer_sum = PeerSum(peer_sum_kernels(device), memory.addresses, 0, patience_s=1.0)
    peer_sum.add_up(torch.ones(100, device=device), Protocol.PUSH)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_never_comes_is_not_waited_for_forever(tmp_path: Path) -> None:
    first, _ = in_processes(2, partial(wait_for_nobody, tmp_path / "rendezvous"))
    assert "CUDA error" in first
