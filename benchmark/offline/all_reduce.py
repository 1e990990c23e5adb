"""Microseconds of a sum over ranks, by NCCL and by each protocol of peer memory, in CUDA graphs.

NCCL is called by torch (`torch`) and by the engine itself (`pynccl`).

    python benchmark/offline/all_reduce.py [--tp 2] [--repeat 3] [--probe] [--out results.jsonl]

Sums of bfloat16 from 1 KiB to 16 MiB; rank 0's times, which are those of 1,000 sums in a row.
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
from minisgl.kernel import PeerSum, Protocol

NUM_BYTES = [1 << i for i in range(10, 25)]
CALLS = 100  # of a graph
REPLAYS = 10


def microseconds(
    groups: dict[str, DistributedCommunicator], peer_sum: PeerSum | None, x: Tensor
) -> dict[str, float]:
    """The times of a sum, by what adds it up."""
    calls: dict[str, Callable[[], object]] = {
        name: partial(group.all_reduce, x) for name, group in groups.items()
    }
    if peer_sum is not None:
        taken = [protocol for protocol in Protocol if peer_sum.takes(x, protocol)]
        calls |= {each.name.lower(): partial(peer_sum.add_up, x, each) for each in taken}
    return {name: seconds_a_call(call, CALLS, REPLAYS) * 1e6 for name, call in calls.items()}


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

    figures = []
    for num_bytes in NUM_BYTES:
        x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
        turns = [microseconds(groups, peer_sum, x) for _ in range(args.repeat)]
        for name in turns[0]:
            values = [round(turn[name], 3) for turn in turns]
            figure = Figure(
                engine="minisgl",
                workload=f"all_reduce of {num_bytes} bytes",
                model="none",
                device="cuda",
                tp=args.tp,
                metric=f"{name}_us",
                values=values,
            )
            figures.append(figure)
            if info.leads:
                print(f"{num_bytes:10}  {name:10}{figure.value:10.2f} us", flush=True)
    if peer_sum is not None:
        table = measure_routes(comm, peer_sum, device, with_nccl=True)
        if info.leads:
            print(table, flush=True)
        memory.close()
    if info.leads and args.out:
        append_figures(args.out, figures)
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
