"""NCCL's collectives on several GPUs, against those of torch.distributed and against sums in torch.

Numbers are small integers, which every dtype adds up exactly in any order.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import Tensor

from minisgl.distributed import (
    DistributedCommunicator,
    DistributedInfo,
    NcclCommunicator,
    PeerCommunicator,
    TorchCommunicator,
    create_communicator,
)
from minisgl.distributed.nccl_library import NCCL_DTYPES, NcclError, load_nccl
from minisgl.errors import KernelInputError
from tests.distributed.harness import in_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs more GPUs"),
]
SHAPES = [(1,), (7,), (3, 5), (2, 3, 5), (0, 5), (64, 1), (33, 1001), (257, 4099), (1, 3_000_001)]
NUM_REPLAYS = 1000
sizes = pytest.mark.parametrize(
    "size", [size for size in (2, 3, 4, 8) if size <= torch.cuda.device_count()]
)


class Numbers:
    """The random numbers of all ranks, equal in each process."""

    def __init__(self, info: DistributedInfo, device: torch.device) -> None:
        self._info = info
        self._device = device
        self._random = [torch.Generator(device).manual_seed(rank) for rank in range(info.size)]

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Those of this rank, and those of each."""
        of_ranks = [
            torch.randint(0, 16, shape, generator=each, device=self._device).to(dtype)
            for each in self._random
        ]
        return of_ranks[self._info.rank].clone(), of_ranks


def device_of(info: DistributedInfo) -> torch.device:
    device = torch.device("cuda", info.rank)
    torch.cuda.set_device(device)
    return device


def by_nccl(info: DistributedInfo, device: torch.device, rendezvous: Path) -> NcclCommunicator:
    return NcclCommunicator(load_nccl(), info, device, rendezvous, timeout_s=60)


def by_torch(info: DistributedInfo, device: torch.device, rendezvous: Path) -> TorchCommunicator:
    return TorchCommunicator(info, device, rendezvous, timeout_s=60)


Join = Callable[[DistributedInfo, torch.device, Path], DistributedCommunicator]
ways = pytest.mark.parametrize("join", [by_nccl, by_torch], ids=["pynccl", "torch"])


def total(of_ranks: list[Tensor]) -> Tensor:
    return torch.stack(of_ranks).sum(dim=0, dtype=of_ranks[0].dtype)


# ---- results


def views(x: Tensor) -> Iterator[Tensor]:
    """A tensor, and the same numbers with other strides."""
    yield x
    if x.dim() > 1:
        yield x.transpose(0, 1)
        yield x[:, ::2]


def check_collectives(folder: Path, info: DistributedInfo) -> None:
    device = device_of(info)
    comm = by_nccl(info, device, folder / "nccl")
    reference = by_torch(info, device, folder / "torch")
    numbers = Numbers(info, device)
    for dtype in NCCL_DTYPES:
        for shape in SHAPES:
            own, of_ranks = numbers.draw(shape, dtype)
            check_in_place(comm, reference, own, of_ranks)
            for view in views(own):
                check_gathered(comm, reference, view)
    comm.close()
    reference.close()


def check_in_place(
    comm: DistributedCommunicator,
    reference: DistributedCommunicator,
    own: Tensor,
    of_ranks: list[Tensor],
) -> None:
    expected = {
        "all_reduce": total(of_ranks),
        "all_reduce_min": torch.stack(of_ranks).amin(dim=0),
        "broadcast": of_ranks[0],
    }
    for name, result in expected.items():
        x = own.clone()
        y = own.clone()
        assert getattr(comm, name)(x) is x
        assert torch.equal(x, result), (name, own.dtype, own.shape)
        assert torch.equal(getattr(reference, name)(y), result), (name, own.dtype, own.shape)


def check_gathered(
    comm: DistributedCommunicator, reference: DistributedCommunicator, x: Tensor
) -> None:
    """The columns of this rank are its own; the rest is what torch gathers."""
    info = comm.info
    before = x.clone()
    expected = reference.all_gather(x)
    of_ranks = expected.unflatten(-1, (info.size, x.shape[-1]))
    assert torch.equal(of_ranks[..., info.rank, :], x)
    assert torch.equal(comm.all_gather(x), expected)
    for gathered in (comm.gather(x), reference.gather(x)):
        if info.leads:
            assert gathered is not None
            assert torch.equal(gathered, expected)
        else:
            assert gathered is None
    assert torch.equal(x, before)


@sizes
def test_every_collective_is_that_of_torch(size: int, tmp_path: Path) -> None:
    in_processes(size, partial(check_collectives, tmp_path))


def digests_of_sums(rendezvous: Path, info: DistributedInfo) -> list[str]:
    device = device_of(info)
    comm = by_nccl(info, device, rendezvous)
    source = torch.Generator(device).manual_seed(info.rank)
    digests = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for num in (1, 5, 4096, 5120 * 7, 1_000_003, 1 << 23):
            x = torch.randn(num, generator=source, device=device).to(dtype)
            in_bytes = comm.all_reduce(x).view(torch.uint8).cpu().numpy().tobytes()
            digests.append(hashlib.sha256(in_bytes).hexdigest())
    comm.close()
    return digests


@sizes
def test_sums_are_equal_on_all_ranks_to_the_last_bit(size: int, tmp_path: Path) -> None:
    one, *others = in_processes(size, partial(digests_of_sums, tmp_path / "rendezvous"))
    assert others == [one] * (size - 1)


# ---- graphs


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture a call in a graph, after it was called once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def check_replays(join: Join, rendezvous: Path, info: DistributedInfo) -> None:
    """All collectives in one graph, with new inputs each time and eager calls between."""
    device = device_of(info)
    comm = join(info, device, rendezvous)
    numbers = Numbers(info, device)
    shapes = [(5120,), (1,), (64, 5120), (3, 7)]
    inputs = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    sums = [torch.zeros_like(x) for x in inputs]
    least = torch.zeros(256, dtype=torch.int64, device=device)
    gathered = torch.zeros(64, 5120 * info.size, dtype=torch.bfloat16, device=device)

    def work() -> None:
        for x, y in zip(inputs, sums, strict=True):
            comm.all_reduce(y.copy_(x))
        comm.all_reduce_min(least)
        gathered.copy_(comm.all_gather(inputs[2]))

    graph = capture(work)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    own_random = random.Random(info.rank)
    for i in range(NUM_REPLAYS):
        drawn = [numbers.draw(shape, torch.bfloat16) for shape in shapes]
        for x, (own, _) in zip(inputs, drawn, strict=True):
            x.copy_(own)
        least.fill_(i + 10 - info.rank)
        if own_random.random() < 0.1:
            torch.cuda._sleep(own_random.randrange(500_000))
        graph.replay()
        for y, (_, of_ranks) in zip(sums, drawn, strict=True):
            wrong += (y != total(of_ranks)).sum()
        wrong += (least != i + 11 - info.size).sum()
        wrong += (gathered != torch.cat(drawn[2][1], dim=-1)).sum()
        if i % 100 == 50:
            own, of_ranks = numbers.draw((5000,), torch.float32)
            wrong += (comm.all_reduce(own) != total(of_ranks)).sum()
    assert int(wrong) == 0
    graph.reset()
    comm.close()


@sizes
@ways
def test_a_graph_is_replayed_with_changing_inputs(join: Join, size: int, tmp_path: Path) -> None:
    in_processes(size, partial(check_replays, join, tmp_path / "rendezvous"))


# ---- streams


def check_current_stream(join: Join, rendezvous: Path, info: DistributedInfo) -> None:
    """A collective waits for what the current stream has to do, and the host waits for nothing."""
    device = device_of(info)
    comm = join(info, device, rendezvous)
    own, of_ranks = Numbers(info, device).draw((1 << 20,), torch.float32)
    x = torch.zeros_like(own)

    def work(num_cycles: int) -> Tensor:
        torch.cuda._sleep(num_cycles)
        x.copy_(own)
        comm.all_reduce(x)
        x.mul_(2)
        return comm.all_gather(x)

    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work(100)  # connects the ranks, and loads kernels
        x.zero_()
        side.synchronize()
        began = time.monotonic()
        gathered = work(2_000_000_000)  # a second
        enqueued_s = time.monotonic() - began
        assert not side.query()
    side.synchronize()
    assert enqueued_s < 0.5
    assert torch.equal(x, 2 * total(of_ranks))
    assert torch.equal(gathered, torch.cat([x] * info.size))
    comm.close()


@sizes
@ways
def test_a_collective_is_on_the_current_stream(join: Join, size: int, tmp_path: Path) -> None:
    in_processes(size, partial(check_current_stream, join, tmp_path / "rendezvous"))


# ---- groups


def check_two_groups(folder: Path, info: DistributedInfo) -> None:
    device = device_of(info)
    one = by_nccl(info, device, folder / "one")
    other = by_nccl(info, device, folder / "other")
    numbers = Numbers(info, device)
    own, of_ranks = numbers.draw((4097,), torch.float32)
    x = own.clone()
    y = own.clone()

    def work() -> None:
        one.all_reduce(x.copy_(own))
        other.all_reduce_min(y.copy_(own))

    graph = capture(work)
    for i in range(100):
        x.zero_()
        y.zero_()
        if i % 3 == 0:
            work()
        else:
            graph.replay()
        assert torch.equal(x, total(of_ranks))
        assert torch.equal(y, torch.stack(of_ranks).amin(dim=0))
    graph.reset()
    one.close()
    assert torch.equal(other.all_reduce(own.clone()), total(of_ranks))
    other.close()


@sizes
def test_two_groups_in_one_process_do_not_mix(size: int, tmp_path: Path) -> None:
    in_processes(size, partial(check_two_groups, tmp_path))


def check_close(rendezvous: Path, has_graph: bool, info: DistributedInfo) -> None:
    """With work under way, and after a graph that is gone."""
    device = device_of(info)
    comm = by_nccl(info, device, rendezvous)
    x = torch.ones(1000, device=device)
    if has_graph:
        capture(lambda: comm.all_reduce(x)).replay()
    comm.all_reduce(x)
    comm.close()
    with pytest.raises(NcclError, match="ncclAllReduce failed: invalid argument"):
        comm.all_reduce(x)
    comm.close()


@pytest.mark.parametrize("has_graph", [False, True])
@sizes
def test_a_group_is_left_once(size: int, has_graph: bool, tmp_path: Path) -> None:
    in_processes(size, partial(check_close, tmp_path / "rendezvous", has_graph))


def lost_bytes(folder: Path, info: DistributedInfo) -> float:
    """How much memory is gone after a group was joined and left once more.

    That is the median of many times: tests beside this one take memory of the GPU too.
    """
    device = device_of(info)
    free = []
    for i in range(10):
        comm = by_nccl(info, device, folder / str(i))
        comm.all_reduce(torch.zeros(100, device=device))
        comm.close()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info(device)[0])
    return median(before - after for before, after in pairwise(free))


@sizes
def test_memory_is_returned(size: int, tmp_path: Path) -> None:
    assert max(in_processes(size, partial(lost_bytes, tmp_path))) < 4 << 20


def check_refusals(rendezvous: Path, info: DistributedInfo) -> None:
    """What is refused is not enqueued: the group goes on."""
    device = device_of(info)
    comm = by_nccl(info, device, rendezvous)
    other_device = torch.device("cuda", (info.rank + 1) % info.size)
    refused = [
        torch.ones(4),
        torch.ones(4, device=other_device),
        torch.ones(4, dtype=torch.complex64, device=device),
    ]
    for x in refused:
        for collective in (comm.all_reduce, comm.broadcast, comm.all_gather, comm.gather):
            with pytest.raises(KernelInputError):
                collective(x)
    with pytest.raises(KernelInputError, match="strides"):
        comm.all_reduce(torch.ones(2, 3, device=device).T)
    assert comm.all_reduce(torch.ones(3, device=device)).tolist() == [info.size] * 3
    comm.close()


@sizes
def test_tensors_that_nccl_does_not_take_are_refused(size: int, tmp_path: Path) -> None:
    in_processes(size, partial(check_refusals, tmp_path / "rendezvous"))


def chosen_class(comm: str | None, rendezvous: Path, info: DistributedInfo) -> type:
    device = device_of(info)
    joined = create_communicator(info, device, rendezvous, comm, 60)
    x = torch.ones(1 << 20, device=device)
    assert bool((joined.all_reduce(x) == info.size).all())
    joined.close()
    return type(joined)


@pytest.mark.parametrize(
    ("comm", "expected"),
    [
        ("torch", {TorchCommunicator}),
        ("pynccl", {NcclCommunicator}),
        ("peer", {PeerCommunicator}),
        (None, {NcclCommunicator, PeerCommunicator}),
    ],
)
def test_the_option_chooses(comm: str | None, expected: set[type], tmp_path: Path) -> None:
    chosen = in_processes(2, partial(chosen_class, comm, tmp_path / "rendezvous"))
    assert len(set(chosen)) == 1
    assert set(chosen) <= expected
