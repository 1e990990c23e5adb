"""NCCL without a GPU: its library where there is one, and what needs none.

How its collectives compute is in test_gpu_nccl.py.
"""

from __future__ import annotations

import ctypes
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl import distributed
from minisgl.distributed import DistributedInfo, create_communicator
from minisgl.distributed.nccl_communicator import meet, nccl_dtype
from minisgl.distributed.nccl_library import (
    NCCL_DTYPES,
    NcclError,
    UniqueId,
    load_nccl,
    nccl_version,
)
from minisgl.errors import ConfigError, KernelInputError

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)

# ---- the library


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    try:
        return load_nccl()
    except NcclError as error:
        pytest.skip(str(error))


def test_a_library_that_is_not_there_is_named() -> None:
    with pytest.raises(NcclError, match=r"^NCCL cannot be loaded: libno-nccl\.so\.2: "):
        load_nccl("libno-nccl.so.2")


def test_a_function_that_is_not_there_is_named() -> None:
    with pytest.raises(NcclError, match=r"^NCCL cannot be loaded: .*: ncclGetErrorString"):
        load_nccl("libc.so.6")


def test_the_version_has_three_parts(nccl: Any) -> None:
    assert re.fullmatch(r"2\.\d+\.\d+", nccl_version(nccl))


def test_groups_have_different_ids(nccl: Any) -> None:
    one = UniqueId()
    other = UniqueId()
    nccl.ncclGetUniqueId(ctypes.byref(one))
    nccl.ncclGetUniqueId(ctypes.byref(other))
    assert bytes(one) != bytes(other)


def test_a_failure_has_the_name_of_the_function_and_the_words_of_nccl(nccl: Any) -> None:
    with pytest.raises(NcclError, match=r"^ncclAllReduce failed: invalid argument .*comm.*NULL"):
        nccl.ncclAllReduce(None, None, 0, 7, 0, None, None)


def test_arguments_of_other_types_are_refused(nccl: Any) -> None:
    with pytest.raises(ctypes.ArgumentError):
        nccl.ncclSend(None, 1.5, 7, 0, None, None)


def test_without_a_gpu_no_group_is_joined(nccl: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    unique_id = UniqueId()
    nccl.ncclGetUniqueId(ctypes.byref(unique_id))
    comm = ctypes.c_void_p()
    with pytest.raises(NcclError, match=r"^ncclCommInitRank failed: .*[Cc]uda"):
        nccl.ncclCommInitRank(ctypes.byref(comm), 1, unique_id, 0)


# ---- tensors


def test_all_dtypes_that_ranks_exchange_are_known() -> None:
    activations = {torch.bfloat16, torch.float16, torch.float32}
    measured_times = {torch.float64}
    counts_and_scored_tokens = {torch.int32, torch.int64}
    handles_of_memory = {torch.uint8}
    exchanged = activations | measured_times | counts_and_scored_tokens | handles_of_memory
    assert exchanged <= NCCL_DTYPES.keys()


@pytest.mark.parametrize("dtype", NCCL_DTYPES)
def test_a_dtype_has_its_number(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 3, dtype=dtype)
    assert nccl_dtype(x, CPU) == NCCL_DTYPES[dtype]


@pytest.mark.parametrize(
    ("x", "device", "reason"),
    [
        (torch.zeros(2), GPU, "is on cpu, its group on cuda:0"),
        (torch.zeros(2, 3).T, CPU, r"has strides \(1, 3\)"),
        (torch.zeros(6)[::2], CPU, r"has strides \(2,\)"),
        (torch.zeros(2, dtype=torch.bool), CPU, "is of torch.bool, and not of torch.int8, "),
        (torch.zeros(2, dtype=torch.complex64), CPU, "is of torch.complex64"),
    ],
)
def test_a_tensor_that_nccl_does_not_take_is_refused(
    x: torch.Tensor, device: torch.device, reason: str
) -> None:
    with pytest.raises(KernelInputError, match=f"^x of a collective {reason}"):
        nccl_dtype(x, device)


# ---- the group


def test_all_ranks_get_the_word_of_rank_0(tmp_path: Path) -> None:
    def join(rank: int) -> bytes:
        word = bytes(range(128)) if rank == 0 else bytes(128)
        return meet(DistributedInfo(rank, 3), tmp_path / "rendezvous", 60, word)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(join, range(3))) == [bytes(range(128))] * 3
    assert not (tmp_path / "rendezvous").exists()


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank 1"):
        meet(DistributedInfo(0, 2), tmp_path / "rendezvous", 0.1, b"word")


# ---- which communicator


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `create_communicator` joins, as if there were GPUs and no NCCL beside torch's own."""
    joined: list[str] = []

    def no_library() -> None:
        raise NcclError("NCCL cannot be loaded: not found")

    def by_torch(*arguments: Any) -> Any:
        joined.append("torch")

    def over_peer_memory(group: Any, device: torch.device, *, is_required: bool) -> Any:
        joined.append("peer, required" if is_required else "peer")

    monkeypatch.setattr(distributed, "load_nccl", no_library)
    monkeypatch.setattr(distributed, "TorchCommunicator", by_torch)
    monkeypatch.setattr(distributed, "with_peer_memory", over_peer_memory)
    return joined


@pytest.mark.parametrize(
    ("comm", "expected"),
    [
        (None, ["torch", "peer"]),
        ("torch", ["torch"]),
        ("peer", ["torch", "peer, required"]),
    ],
)
def test_torch_calls_nccl_where_it_cannot_be_loaded(
    joined: list[str],
    comm: str | None,
    expected: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    create_communicator(DistributedInfo(0, 2), GPU, tmp_path / "rendezvous", comm)
    assert joined == expected
    is_told = "torch calls NCCL: NCCL cannot be loaded: not found" in caplog.text
    assert is_told == (comm != "torch")


def test_ranks_that_nccl_cannot_connect_are_told_of_torch(
    joined: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*arguments: Any) -> None:
        raise NcclError("ncclCommInitRank failed: no space")

    monkeypatch.setattr(distributed, "load_nccl", lambda: None)
    monkeypatch.setattr(distributed, "nccl_version", lambda nccl: "2.0.0")
    monkeypatch.setattr(distributed, "NcclCommunicator", fail)
    with pytest.raises(ConfigError, match=r"no space; --comm torch leaves that to torch"):
        create_communicator(DistributedInfo(0, 2), GPU, tmp_path / "rendezvous")
    assert joined == []


def test_pynccl_is_refused_where_nccl_cannot_be_loaded(joined: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--comm pynccl does not work here: NCCL cannot"):
        create_communicator(DistributedInfo(0, 2), GPU, tmp_path / "rendezvous", "pynccl")
    assert joined == []
