"""Sums over the ranks of a group through memory that all of them reach (csrc/all_reduce.cu)."""

# Dimensions: D model width, T tokens of a step, X a selection out of another dimension.

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from minisgl.errors import KernelInputError
from minisgl.kernel.native import load_cuda_kernels

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NS_PER_S = 10**9
_VECTOR_BYTES = 16


class Protocol(IntEnum):
    """How numbers reach the other ranks; all_reduce.cu says what each protocol does."""

    PUSH = 0
    ONE_SHOT = 1
    TWO_SHOT = 2


class PeerSum:
    """Sums of tensors over the ranks of a group.

    All ranks make the same calls, in the same order and with the same sizes, each on one stream at
    a time. A call may be captured in a CUDA graph. A kernel that waits too long for another rank
    ends with an error, and its process can no longer use the GPU.

    Args:
        kernels: the functions of csrc/*.cu.
        addresses: where this process sees the memory of each rank, of `memory_bytes` bytes that
            were zero before the first call. They stay there as long as calls, or graphs of them,
            run.
    """

    def __init__(
        self, kernels: Any, addresses: Sequence[int], rank: int, *, patience_s: float
    ) -> None:
        self._kernels = kernels
        self._max_bytes = [kernels.max_bytes_of_protocol(protocol) for protocol in Protocol]
        self._address_X = torch.tensor(addresses, dtype=torch.int64)
        self._rank = rank
        self._patience_ns = int(patience_s * _NS_PER_S)

    def takes(self, x: Tensor, protocol: Protocol) -> bool:
        """Whether a tensor can be added up by a protocol; equal on all ranks."""
        is_small = x.nbytes <= self._max_bytes[protocol]
        return is_small and x.is_contiguous() and x.dtype in _DTYPES

    def add_up(self, x: Tensor, protocol: Protocol) -> None:
        """Overwrite x with the sum of the x of all ranks, equal on all to the last bit.

        Args:
            x: one that the protocol takes.
        """
        if x.numel():
            self._kernels.all_reduce(x, protocol, self._address_X, self._rank, self._patience_ns)

    def takes_rows(self, x_TD: Tensor, protocol: Protocol) -> bool:
        """Whether `add_up_and_norm` takes a tensor; equal on all ranks."""
        num_rows, width = x_TD.shape
        row_bytes = width * x_TD.itemsize
        num_ranks = len(self._address_X)
        fits: bool = self._kernels.takes_rows(num_rows, row_bytes, protocol, num_ranks)
        return fits and x_TD.is_contiguous() and x_TD.dtype in _DTYPES

    def add_up_and_norm(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        weight_D: Tensor,
        eps: float,
        protocol: Protocol,
    ) -> tuple[Tensor, Tensor]:
        """Add up the x of all ranks, add the residual, and norm the rows.

        Numbers are rounded where `add_up` and `add_rms_norm` would round them.

        Args:
            x_TD: one that `takes_rows`.
            residual_TD: overwritten with the sum; None stands for zero, and x is overwritten
                instead.

        Returns:
            normed_TD, and the sum.

        Raises:
            KernelInputError: a tensor is not contiguous, not of x's dtype, or not aligned to 16
                bytes. Ranks where nothing is wrong do not raise, and wait for this one.
        """
        total_TD = x_TD if residual_TD is None else residual_TD
        for name, each in {"x": x_TD, "residual": total_TD, "weight": weight_D}.items():
            _check_rows(name, each, x_TD.dtype)
        y_TD = torch.empty_like(x_TD)
        if len(x_TD):
            self._kernels.all_reduce_rows(
                x_TD, total_TD, weight_D, eps, y_TD,
                protocol, self._address_X, self._rank, self._patience_ns,
            )  # fmt: skip
        return y_TD, total_TD


def _check_rows(name: str, x: Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype:
        raise KernelInputError(f"{name} is of {x.dtype}, the rows are of {dtype}")
    if not x.is_contiguous() or x.data_ptr() % _VECTOR_BYTES:
        raise KernelInputError(
            f"{name} has to be contiguous and to begin at a multiple of {_VECTOR_BYTES} bytes"
        )


def peer_sum_kernels(device: torch.device) -> Any | None:
    """Return the functions of csrc/*.cu for a GPU; None if they cannot be compiled here."""
    return load_cuda_kernels(*torch.cuda.get_device_capability(device))


def memory_bytes(kernels: Any) -> int:
    """Return how much memory a rank has to share."""
    return int(kernels.peer_memory_bytes())


def sum_reference(x_of_ranks: Sequence[Tensor]) -> Tensor:
    """Compute what `PeerSum.add_up` leaves on each rank, in plain torch."""
    total = torch.zeros_like(x_of_ranks[0], dtype=torch.float32)
    for x in x_of_ranks:
        total += x.float()
    return total.to(x_of_ranks[0].dtype)
