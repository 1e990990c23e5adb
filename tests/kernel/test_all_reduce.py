"""Sums over peer memory, with a stream of the stand-in for each rank; on GPUs: test_gpu_sums.py."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.kernel import PeerSum, Protocol, memory_bytes, sum_reference

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in is for a CPU")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
COUNTS_BYTES = 8 * 128  # of the channels' calls, at the beginning of the memory
protocols = pytest.mark.parametrize("protocol", list(Protocol))


class Ranks:
    """Ranks that run at random paces."""

    def __init__(self, kernels: Any, size: int, seed: int, patience_s: float = 0.02) -> None:
        self._kernels = kernels
        self.memory = [torch.zeros(memory_bytes(kernels), dtype=torch.uint8) for _ in range(size)]
        addresses = [memory.data_ptr() for memory in self.memory]
        self._sums = [PeerSum(kernels, addresses, r, patience_s=patience_s) for r in range(size)]
        kernels.set_blocks(seed, 1)

    def add_up(self, calls: list[tuple[list[Tensor], Protocol]]) -> None:
        """Make these calls, in order; each is the tensors of all ranks, and a protocol."""
        for rank, peer_sum in enumerate(self._sums):
            self._kernels.use_stream(rank, len(self._sums))
            for x_of_ranks, protocol in calls:
                assert peer_sum.takes(x_of_ranks[rank], protocol)
                peer_sum.add_up(x_of_ranks[rank], protocol)
        self._kernels.run_streams()


def numbers(size: int, num: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num, generator=generator).to(dtype) for _ in range(size)]


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@protocols
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "num"), [(2, 1), (2, 5), (3, 1025), (8, 130), (2, 9001)])
def test_every_rank_gets_the_sum_to_the_last_bit(
    cuda_kernels: Any, size: int, num: int, dtype: torch.dtype, protocol: Protocol
) -> None:
    x_of_ranks = numbers(size, num, dtype)
    expected = sum_reference(x_of_ranks)
    Ranks(cuda_kernels, size, seed=num).add_up([(x_of_ranks, protocol)])
    for x in x_of_ranks:
        assert same_bits(x, expected)


@protocols
@pytest.mark.parametrize(("begin", "num"), [(1, 1), (1, 300), (3, 7), (8, 8), (8, 301)])
def test_a_tensor_begins_and_ends_anywhere_on_each_rank(
    cuda_kernels: Any, begin: int, num: int, protocol: Protocol
) -> None:
    wide = numbers(3, 400, torch.bfloat16)
    before = [x.clone() for x in wide]
    pieces = [x[begin * r : begin * r + num] for r, x in enumerate(wide)]
    expected = sum_reference(pieces)
    Ranks(cuda_kernels, 3, seed=1).add_up([(pieces, protocol)])
    for x, x_before, piece in zip(wide, before, pieces, strict=True):
        assert same_bits(piece, expected)
        begin_of_piece = piece.storage_offset()
        assert same_bits(x[:begin_of_piece], x_before[:begin_of_piece])
        assert same_bits(x[begin_of_piece + num :], x_before[begin_of_piece + num :])


@pytest.mark.parametrize(("size", "seed"), [(2, 1), (2, 2), (3, 3)])
@pytest.mark.parametrize("choice", [*([protocol] for protocol in Protocol), list(Protocol)])
def test_calls_of_changing_sizes_and_protocols_do_not_mix(
    cuda_kernels: Any, choice: list[Protocol], size: int, seed: int
) -> None:
    """One rank may be a call ahead of the others; its numbers must not reach their call."""
    source = random.Random(seed)
    ranks = Ranks(cuda_kernels, size, seed)
    for _ in range(2):
        calls = []
        expected = []
        for i in range(30):
            num = source.choice([1, 40, 40, 1200, 2500, 9000 if i % 10 == 0 else 3])
            x_of_ranks = numbers(size, num, source.choice(DTYPES), seed=i)
            expected.append(sum_reference(x_of_ranks))
            calls.append((x_of_ranks, source.choice(choice)))
        ranks.add_up(calls)
        for (x_of_ranks, _), total in zip(calls, expected, strict=True):
            assert all(same_bits(x, total) for x in x_of_ranks)


@protocols
def test_the_result_of_a_call_is_added_up_again(cuda_kernels: Any, protocol: Protocol) -> None:
    x_of_ranks = [torch.ones(600), torch.ones(600)]
    Ranks(cuda_kernels, 2, seed=3).add_up([(x_of_ranks, protocol)] * 6)
    for x in x_of_ranks:
        assert same_bits(x, torch.full((600,), 2.0**6))


def test_no_mark_is_left(cuda_kernels: Any) -> None:
    ranks = Ranks(cuda_kernels, 3, seed=4)
    ranks.add_up([(numbers(3, num, torch.float32), Protocol.PUSH) for num in (1, 900, 5)])
    for memory in ranks.memory:
        assert memory[:COUNTS_BYTES].view(torch.int64)[:3].tolist() == [3, 1, 0]
        assert not memory[COUNTS_BYTES:].any()


@protocols
def test_a_rank_that_never_comes_is_not_waited_for_forever(
    cuda_kernels: Any, protocol: Protocol
) -> None:
    kernels = cuda_kernels
    ranks = Ranks(kernels, 2, seed=5, patience_s=1e-5)
    kernels.use_stream(0, 2)
    ranks._sums[0].add_up(torch.ones(10), protocol)
    with pytest.raises(RuntimeError, match="a thread ended its kernel"):
        kernels.run_streams()


def test_what_does_not_fit_is_not_taken(cuda_kernels: Any) -> None:
    peer_sum = PeerSum(cuda_kernels, [0, 0], 0, patience_s=1.0)
    taken = {
        protocol: [
            num_kib
            for num_kib in (1, 256, 257, 1024, 1025, 8192, 8193)
            if peer_sum.takes(torch.empty(num_kib, 256), protocol)
        ]
        for protocol in Protocol
    }
    assert taken == {
        Protocol.PUSH: [1, 256],
        Protocol.PULL: [1, 256, 257, 1024],
        Protocol.TWO_SHOT: [1, 256, 257, 1024, 1025, 8192],
    }
    assert not peer_sum.takes(torch.empty(4, 4).T[:3], Protocol.PUSH)
    assert not peer_sum.takes(torch.empty(4, dtype=torch.int32), Protocol.PUSH)
