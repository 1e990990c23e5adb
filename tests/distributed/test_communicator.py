"""One contract for every communicator; the ranks of a group are threads here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from minisgl.distributed import DistributedCommunicator
from tests.distributed.groups import in_group

sizes = pytest.mark.parametrize("size", [1, 2, 3])


def numbers(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


@sizes
def test_all_reduce_adds_up_in_place(size: int, tmp_path: Path) -> None:
    def work(comm: DistributedCommunicator) -> Tensor:
        x = numbers(comm.info.rank, 3, 4)
        assert comm.all_reduce(x) is x
        return x

    expected = sum(numbers(rank, 3, 4) for rank in range(size))
    for x in in_group(size, tmp_path / "rendezvous", work):
        torch.testing.assert_close(x, expected)


@sizes
def test_all_reduce_min_takes_the_least_in_place(size: int, tmp_path: Path) -> None:
    def work(comm: DistributedCommunicator) -> int:
        x = torch.tensor([100 - comm.info.rank])
        assert comm.all_reduce_min(x) is x
        return int(x)

    assert in_group(size, tmp_path / "rendezvous", work) == [101 - size] * size


@sizes
def test_all_gather_joins_the_last_dimension_in_the_order_of_ranks(
    size: int, tmp_path: Path
) -> None:
    expected = torch.cat([numbers(rank, 3, 4) for rank in range(size)], dim=1)
    for x in in_group(
        size, tmp_path / "rendezvous", lambda comm: comm.all_gather(numbers(comm.info.rank, 3, 4))
    ):
        assert torch.equal(x, expected)


@sizes
def test_gather_gives_rank_0_everything_and_the_others_nothing(size: int, tmp_path: Path) -> None:
    results = in_group(
        size, tmp_path / "rendezvous", lambda comm: comm.gather(numbers(comm.info.rank, 3, 4))
    )
    assert torch.equal(results[0], torch.cat([numbers(rank, 3, 4) for rank in range(size)], dim=1))
    assert results[1:] == [None] * (size - 1)


@sizes
@pytest.mark.parametrize("name", ["gather", "all_gather"])
def test_a_view_with_strides_is_gathered_like_a_copy(name: str, size: int, tmp_path: Path) -> None:
    results = in_group(
        size,
        tmp_path / "rendezvous",
        lambda comm: getattr(comm, name)(numbers(comm.info.rank, 4, 3).T),
    )
    assert torch.equal(
        results[0], torch.cat([numbers(rank, 4, 3).T for rank in range(size)], dim=1)
    )


@sizes
def test_no_rows_are_gathered_as_no_rows(size: int, tmp_path: Path) -> None:
    results = in_group(size, tmp_path / "rendezvous", lambda comm: comm.gather(torch.empty(0, 5)))
    assert results[0].shape == (0, 5 * size)


@sizes
def test_broadcast_gives_all_what_rank_0_has_in_place(size: int, tmp_path: Path) -> None:
    def work(comm: DistributedCommunicator) -> list[int]:
        x = torch.tensor([comm.info.rank, 7])
        assert comm.broadcast(x) is x
        return x.tolist()

    assert in_group(size, tmp_path / "rendezvous", work) == [[0, 7]] * size


def test_two_groups_in_one_process_do_not_mix(tmp_path: Path) -> None:
    def sums(name: str, value: int) -> list[int]:
        return in_group(
            2, tmp_path / name, lambda comm: int(comm.all_reduce(torch.tensor([value])))
        )

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(sums, "one", 1)
        other = pool.submit(sums, "other", 10)
    assert (one.result(), other.result()) == ([2, 2], [20, 20])


def test_ranks_listen_on_the_loopback_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group also works where the host's name has the address of a network."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    others = set(listening_addresses())

    def work(comm: DistributedCommunicator) -> set[tuple[str, int]]:
        comm.all_reduce(torch.ones(1))
        return set(listening_addresses()) - others

    opened = set.union(*in_group(2, tmp_path / "rendezvous", work))
    assert opened
    assert {host for host, _ in opened} == {"127.0.0.1"}


def test_an_interface_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(RuntimeError, match="no-such-interface"):
        in_group(2, tmp_path / "rendezvous", lambda comm: comm.info.rank)


def listening_addresses() -> list[tuple[str, int]]:
    """Hosts and ports on which this process listens."""
    sockets = psutil.Process().net_connections("tcp")
    return [(each.laddr.ip, each.laddr.port) for each in sockets if each.status == "LISTEN"]
