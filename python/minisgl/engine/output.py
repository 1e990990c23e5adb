"""What a plan came to, on its way to the host."""

# Dimension key: B requests that sample, X those for which there is room.

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core import TokenLogprobs
from minisgl.engine.logits import LogprobsOutput
from minisgl.engine.prompts import PromptsOutput

_NUM_PINNED = (
    4  # at most two outputs are unread at a time: of the batch in flight, and of the one after it
)


class ForwardOutput:
    """The tokens of a launched plan, in the order of its sampling slices; and what log probabilities were asked for.

    Args:
        token_B: on the host, once `copied` has happened.
    """

    def __init__(
        self,
        token_B: Tensor,
        copied: torch.cuda.Event | None = None,
        logprobs: LogprobsOutput | None = None,
        prompts: PromptsOutput | None = None,
    ) -> None:
        self._token_B, self._copied = token_B, copied
        self._logprobs, self._prompts = logprobs, prompts

    def wait(self) -> list[int]:
        """The tokens, on the host; waits until they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._token_B.tolist()

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """By index of the token, after `wait`."""
        return self._logprobs.read() if self._logprobs else {}

    def prompt_logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """By index of the slice, after `wait`."""
        return self._prompts.read_logprobs() if self._prompts else {}

    def embeddings(self) -> dict[int, bytes]:
        """By index of the slice, after `wait`."""
        return self._prompts.read_embeddings() if self._prompts else {}


class WayBack:
    """Takes tokens to the host, into pinned buffers in turn. Each must be read before its turn comes again.

    Args:
        capacity: tokens of a step.
    """

    def __init__(self, device: torch.device, capacity: int) -> None:
        self._turn = 0
        self._pinned: list[tuple[Tensor, torch.cuda.Event]] = []
        if device.type != "cpu":
            buffers = (
                torch.empty(capacity, dtype=torch.int32, pin_memory=True)
                for _ in range(_NUM_PINNED)
            )
            self._pinned = [(buffer_X, torch.cuda.Event()) for buffer_X in buffers]

    def send(
        self, token_B: Tensor, logprobs: LogprobsOutput | None, prompts: PromptsOutput | None
    ) -> ForwardOutput:
        """Start the copy; what the others copy is on its way already, so it is there when the tokens are."""
        if not self._pinned:
            return ForwardOutput(token_B, None, logprobs, prompts)
        self._turn = (self._turn + 1) % _NUM_PINNED
        host_X, copied = self._pinned[self._turn]
        host_B = host_X[: len(token_B)]
        host_B.copy_(token_B, non_blocking=True)
        copied.record()
        return ForwardOutput(host_B, copied, logprobs, prompts)
