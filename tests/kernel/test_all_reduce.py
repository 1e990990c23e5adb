"""Sums over peer memory, and norms of them, with a stream of the stand-in for each rank.

On GPUs: test_gpu_sums.py.
"""

# Dimensions: D model width, T tokens of a step.

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.errors import KernelInputError
from minisgl.kernel import (
    PeerSum,
    Protocol,
    memory_bytes,
    rms_norm_reference,
    sum_reference,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in is for a CPU")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPS = 0.5  # large enough to be missed
COUNTS_BYTES = 8 * 128  # of the channels' calls, at the beginning of the memory
OF_ROWS = [Protocol.ONE_SHOT, Protocol.TWO_SHOT]
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

        def call(peer_sum: PeerSum, rank: int) -> None:
            for x_of_ranks, protocol in calls:
                assert peer_sum.takes(x_of_ranks[rank], protocol)
                peer_sum.add_up(x_of_ranks[rank], protocol)

        self.run(call)

    def run(self, call: Callable[[PeerSum, int], None]) -> None:
        """Let each rank make its calls."""
        for rank, peer_sum in enumerate(self._sums):
            self._kernels.use_stream(rank, len(self._sums))
            call(peer_sum, rank)
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


@dataclass
class NormOfSum:
    """The inputs of all ranks, what each call shall return, and what it has returned."""

    x_of_ranks: list[Tensor]
    residual_of_ranks: list[Tensor] | None
    weight_D: Tensor
    protocol: Protocol
    results: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def draw(
        cls, size: int, shape: tuple[int, int], dtype: torch.dtype, protocol: Protocol, seed: int
    ) -> NormOfSum:
        rows = [x.view(shape) for x in numbers(size, shape[0] * shape[1], dtype, seed)]
        (weight_D,) = numbers(1, shape[1], dtype, seed + 1)
        residuals = None
        if seed % 2:
            (residual,) = numbers(1, shape[0] * shape[1], dtype, seed + 2)
            residuals = [residual.view(shape).clone() for _ in range(size)]
        return cls(rows, residuals, weight_D, protocol)

    def __post_init__(self) -> None:
        sum_TD = sum_reference(self.x_of_ranks)
        if self.residual_of_ranks is not None:
            sum_TD = sum_TD + self.residual_of_ranks[0]
        self.expected = (rms_norm_reference(sum_TD, self.weight_D, EPS), sum_TD)

    def call(self, peer_sum: PeerSum, rank: int) -> None:
        x_TD = self.x_of_ranks[rank]
        residual_TD = self.residual_of_ranks[rank] if self.residual_of_ranks else None
        assert peer_sum.takes_rows(x_TD, self.protocol)
        result = peer_sum.add_up_and_norm(x_TD, residual_TD, self.weight_D, EPS, self.protocol)
        self.results.append(result)

    def check(self) -> None:
        normed_TD, sum_TD = self.expected
        for normed, total in self.results:
            assert same_bits(total, sum_TD)
            assert same_bits(normed, self.results[0][0]), "ranks agree"
            torch.testing.assert_close(normed, normed_TD)


@pytest.mark.parametrize("protocol", OF_ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "shape"), [(2, (1, 8)), (2, (5, 264)), (3, (32, 16)), (4, (3, 1024)), (8, (2, 256))]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_are_added_up_and_normed(
    cuda_kernels: Any,
    size: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    protocol: Protocol,
    seed: int,
) -> None:
    """With a residual (odd seeds) and without."""
    case = NormOfSum.draw(size, shape, dtype, protocol, seed)
    Ranks(cuda_kernels, size, seed + 1).run(case.call)
    case.check()


@pytest.mark.parametrize("protocol", OF_ROWS)
@pytest.mark.parametrize(("size", "num_rows"), [(2, 129), (3, 300), (4, 257)])
def test_a_channel_has_several_rows(
    cuda_kernels: Any, size: int, num_rows: int, protocol: Protocol
) -> None:
    case = NormOfSum.draw(size, (num_rows, 16), torch.bfloat16, protocol, 3)
    Ranks(cuda_kernels, size, seed=2).run(case.call)
    case.check()


@pytest.mark.parametrize(("size", "seed"), [(2, 1), (3, 2), (4, 3)])
def test_sums_and_norms_of_sums_do_not_mix(cuda_kernels: Any, size: int, seed: int) -> None:
    source = random.Random(seed)
    ranks = Ranks(cuda_kernels, size, seed)
    norms = []
    sums = []
    for i in range(12):
        shape = (source.choice([1, 2, 30, 140]), source.choice([8, 40, 512]))
        norms.append(NormOfSum.draw(size, shape, torch.bfloat16, source.choice(OF_ROWS), i))
        x_of_ranks = numbers(size, source.choice([1, 40, 2500]), torch.float32, seed=i)
        sums.append((x_of_ranks, sum_reference(x_of_ranks), source.choice(list(Protocol))))

    def call(peer_sum: PeerSum, rank: int) -> None:
        for norm, (x_of_ranks, _, protocol) in zip(norms, sums, strict=True):
            norm.call(peer_sum, rank)
            peer_sum.add_up(x_of_ranks[rank], protocol)

    ranks.run(call)
    for norm, (x_of_ranks, total, _) in zip(norms, sums, strict=True):
        norm.check()
        assert all(same_bits(x, total) for x in x_of_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_rows_that_do_not_fit_are_not_taken(cuda_kernels: Any, num_ranks: int) -> None:
    peer_sum = PeerSum(cuda_kernels, [0] * num_ranks, 0, patience_s=1.0)

    def most_rows(width: int, protocol: Protocol, dtype: torch.dtype = torch.bfloat16) -> int:
        taken = [
            num
            for num in (1, 102, 103, 512, 513, 819, 820, 4096, 4097)
            if peer_sum.takes_rows(torch.empty(num, width, dtype=dtype), protocol)
        ]
        return max(taken, default=0)

    assert [most_rows(5120, protocol) for protocol in Protocol] == [0, 102, 819]
    assert most_rows(1024, Protocol.TWO_SHOT) == 4096
    assert most_rows(8192, Protocol.TWO_SHOT) == 512
    assert most_rows(8200, Protocol.TWO_SHOT) == 0
    assert most_rows(1028, Protocol.ONE_SHOT) == 0, "no whole vectors"
    assert most_rows(1028, Protocol.ONE_SHOT, torch.float32) == 103
    x_TD = torch.empty(4, 64)
    residual_TD = torch.empty(4 * 64 + 1)[1:].view(4, 64)
    with pytest.raises(KernelInputError, match="residual has to be contiguous and to begin at"):
        peer_sum.add_up_and_norm(x_TD, residual_TD, x_TD[0], EPS, Protocol.ONE_SHOT)
    with pytest.raises(KernelInputError, match="weight is of torch"):
        peer_sum.add_up_and_norm(x_TD, x_TD, x_TD[0].half(), EPS, Protocol.ONE_SHOT)
    assert not peer_sum.takes_rows(x_TD[:, :32], Protocol.ONE_SHOT)
    assert not peer_sum.takes_rows(x_TD.int(), Protocol.ONE_SHOT)


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
        Protocol.ONE_SHOT: [1, 256, 257, 1024],
        Protocol.TWO_SHOT: [1, 256, 257, 1024, 1025, 8192],
    }
    assert not peer_sum.takes(torch.empty(4, 4).T[:3], Protocol.PUSH)
    assert not peer_sum.takes(torch.empty(4, dtype=torch.int32), Protocol.PUSH)
