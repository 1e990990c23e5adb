"""Microseconds of a sum over ranks, by NCCL and by each protocol of peer memory, in CUDA graphs.

NCCL is called by torch (`torch`) and by the engine itself (`pynccl`).

    python benchmark/offline/all_reduce.py [--tp 2] [--repeat 3] [--width 5120] [--probe] \\
        [--out results.jsonl]

Sums of bfloat16 from 1 KiB to 16 MiB; rank 0's times, by the fastest of ten graphs of 100 sums.
--probe also tries torch's symmetric memory, which is another way to memory of peers, without
multicast.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, _SymmetricMemory

from minisgl.benchmark.arguments import output_file, positive
from minisgl.benchmark.perf import Figure, append_figures
from minisgl.distributed import DistributedCommunicator, DistributedInfo, create_communicator
from minisgl.distributed.peer_communicator import measure_routes, share_memory
from minisgl.distributed.peer_memory import PeerMemoryError
from minisgl.distributed.protocol_table import seconds_a_call
from minisgl.errors import ConfigError
from minisgl.kernel import PeerSum, Protocol, residual_norm

NUM_BYTES = [1 << i for i in range(10, 25)]
# Of 5,120 bfloat16s, 25, 51, 102 and 819 rows are the most in 256 KiB, 512 KiB, 1 MiB and 8 MiB.
NUM_ROWS = [1, 4, 16, 25, 51, 102, 256, 512, 819]
CALLS = 100  # of a graph
REPLAYS = 10
EPS = 1e-6


def microseconds(
    groups: dict[str, DistributedCommunicator], peer_sum: PeerSum | None, x: Tensor
) -> dict[str, float]:
    """The times of a sum, by method."""
    calls: dict[str, Callable[[], object]] = {
        name: partial(group.all_reduce, x) for name, group in groups.items()
    }
    if peer_sum is not None:
        taken = [protocol for protocol in Protocol if peer_sum.takes(x, protocol)]
        calls |= {each.name.lower(): partial(peer_sum.add_up, x, each) for each in taken}
    return {name: seconds_a_call(call, CALLS, REPLAYS) * 1e6 for name, call in calls.items()}


def microseconds_with_norm(peer_sum: PeerSum, x_TD: Tensor) -> dict[str, float]:
    """The times of a sum and the norm after it, by protocol: in one kernel, and in two."""
    residual_TD = torch.zeros_like(x_TD)
    weight_D = torch.ones_like(x_TD[0])
    calls: dict[str, Callable[[], object]] = {}
    for protocol in Protocol:
        name = protocol.name.lower()
        if peer_sum.takes_rows(x_TD, protocol):
            calls[f"{name}_and_norm"] = partial(
                peer_sum.add_up_and_norm, x_TD, residual_TD, weight_D, EPS, protocol
            )
        if peer_sum.takes(x_TD, protocol):
            calls[f"{name}_then_norm"] = partial(
                add_up_then_norm, peer_sum, protocol, x_TD, residual_TD, weight_D
            )
    return {name: seconds_a_call(call, CALLS, REPLAYS) * 1e6 for name, call in calls.items()}


def add_up_then_norm(
    peer_sum: PeerSum, protocol: Protocol, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor
) -> None:
    peer_sum.add_up(x_TD, protocol)
    residual_norm(x_TD, residual_TD, weight_D, EPS)


def probe_symmetric_memory(info: DistributedInfo, device: torch.device, folder: Path) -> str:
    """Whether ranks can write to each other's symmetric memory, in words."""
    try:
        store = FileStore(str(folder / "symmetric"), info.size)
        _SymmetricMemory.set_group_info("probe", info.rank, info.size, store)
        x = _SymmetricMemory.empty_strided_p2p((1024,), (1,), torch.float32, device, "probe")
        handle = _SymmetricMemory.rendezvous(x)
        x.fill_(info.rank)
        handle.barrier(0, 10_000)
        other = (info.rank + 1) % info.size
        seen = handle.get_buffer(other, (1024,), torch.float32, 0)
        return "works" if bool((seen == other).all()) else "does not work: wrong numbers"
    except RuntimeError as error:
        return f"does not work: {error}"


class Measured:
    """Figures, printed as they come."""

    def __init__(self, tp: int, repeat: int, *, prints: bool) -> None:
        self.figures: list[Figure] = []
        self._tp = tp
        self._repeat = repeat
        self._prints = prints

    def add(self, workload: str, times: Callable[[], dict[str, float]]) -> None:
        turns = [times() for _ in range(self._repeat)]
        for name in turns[0]:
            figure = Figure(
                engine="minisgl",
                workload=workload,
                model="none",
                device="cuda",
                tp=self._tp,
                metric=f"{name}_us",
                values=[round(turn[name], 3) for turn in turns],
            )
            self.figures.append(figure)
            if self._prints:
                print(f"{workload:32}{name:20}{figure.value:10.2f} us", flush=True)


def measure_norms(measured: Measured, peer_sum: PeerSum, width: int, device: torch.device) -> None:
    for num_rows in NUM_ROWS:
        x_TD = torch.zeros(num_rows, width, dtype=torch.bfloat16, device=device)
        workload = f"all_reduce of {num_rows} x {width}"
        measured.add(workload, partial(microseconds_with_norm, peer_sum, x_TD))


def join_groups(
    info: DistributedInfo, device: torch.device, folder: Path
) -> dict[str, DistributedCommunicator]:
    """A group for each way to call NCCL."""
    groups = {"torch": create_communicator(info, device, folder / "torch", "torch")}
    try:
        groups["pynccl"] = create_communicator(info, device, folder / "pynccl", "pynccl")
    except ConfigError as error:
        print(f"rank {info.rank}: {error}", flush=True)
    return groups


def run_rank(args: argparse.Namespace, folder: Path, rank: int) -> None:
    info = DistributedInfo(rank, args.tp)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    groups = join_groups(info, device, folder)
    comm = groups.get("pynccl", groups["torch"])
    peer_sum = None
    try:
        memory, peer_sum = share_memory(comm, device)
        print(f"rank {rank}: peer memory through CUDA IPC works", flush=True)
    except PeerMemoryError as error:
        print(f"rank {rank}: peer memory through CUDA IPC does not work: {error}", flush=True)

    measured = Measured(args.tp, args.repeat, prints=info.leads)
    for num_bytes in NUM_BYTES:
        x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
        workload = f"all_reduce of {num_bytes} bytes"
        measured.add(workload, partial(microseconds, groups, peer_sum, x))
    if peer_sum is not None:
        measure_norms(measured, peer_sum, args.width, device)
        table = measure_routes(comm, peer_sum, device, with_nccl=True)
        if info.leads:
            print(table, flush=True)
        memory.close()
    if info.leads and args.out:
        append_figures(args.out, measured.figures)
    if args.probe:
        print(f"rank {rank}: symmetric memory {probe_symmetric_memory(info, device, folder)}")
    for group in groups.values():
        group.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=positive, default=2)
    parser.add_argument("--repeat", type=positive, default=3)
    parser.add_argument("--width", type=positive, default=5120, help="of the rows that are normed")
    parser.add_argument("--probe", action="store_true")
    parser.add_argument("--out", type=output_file, help="append figures to this file")
    args = parser.parse_args()
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            spawn.Process(target=run_rank, args=(args, Path(folder), rank))
            for rank in range(args.tp)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"exit codes of the ranks: {[process.exitcode for process in ranks]}")


if __name__ == "__main__":
    main()
