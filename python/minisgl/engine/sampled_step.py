"""The sampled tokens of a step, with logprobs and embeddings, on their way to the host.

Next to read: `layers/attention.py`.
"""

# Dimensions: B requests of a step, Z entries of a flat list.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.core import TokenLogprobs
from minisgl.engine.logprobs import LogprobsOutput
from minisgl.engine.prompt_outputs import PromptOutputs

# At most two outputs are unread at a time: of the step in flight, and of the one after it.
_NUM_PINNED = 4


class SampledStep:
    """The tokens of a step by sampling slice, and the logprobs and embeddings of its requests.

    Args:
        token_B: on the host, valid once `copied` has happened.
    """

    def __init__(
        self,
        token_B: Tensor,
        copied: torch.cuda.Event | None = None,
        logprobs: LogprobsOutput | None = None,
        prompt_outputs: PromptOutputs | None = None,
    ) -> None:
        self._token_B = token_B
        self._copied = copied
        self._logprobs = logprobs
        self._prompt_outputs = prompt_outputs

    def wait(self) -> list[int]:
        """The token of each sampling slice, or `NO_TOKEN`; waits until they are on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = self._token_B.tolist()
        return tokens

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Log probabilities of tokens, by index of the sampling slice. Call it after `wait`."""
        return self._logprobs.read() if self._logprobs else {}

    def prompt_logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """Log probabilities of prompts, by index of the slice. Call it after `wait`."""
        return self._prompt_outputs.read_logprobs() if self._prompt_outputs else {}

    def embeddings(self) -> dict[int, bytes]:
        """Embeddings of prompts, by index of the slice. Call it after `wait`."""
        return self._prompt_outputs.read_embeddings() if self._prompt_outputs else {}


class HostCopier:
    """Copies tokens before the next step overwrites them; from a GPU into pinned buffers in turn.

    A buffer must be read before its turn comes again.

    Args:
        capacity: tokens of a step.
    """

    def __init__(self, device: torch.device, capacity: int) -> None:
        self._turn = 0
        self._pinned: list[_PinnedTokens] = []
        if device.type != "cpu":
            self._pinned = [_PinnedTokens.allocate(capacity) for _ in range(_NUM_PINNED)]

    def start(
        self,
        token_B: Tensor,
        logprobs: LogprobsOutput | None,
        prompt_outputs: PromptOutputs | None,
    ) -> SampledStep:
        """Start the copy of the tokens.

        Copies of logprobs and embeddings were started before it, so they end before it does.
        """
        if not self._pinned:
            return SampledStep(token_B.clone(), None, logprobs, prompt_outputs)
        self._turn = (self._turn + 1) % _NUM_PINNED
        pinned = self._pinned[self._turn]
        host_B = pinned.token_Z[: len(token_B)]
        host_B.copy_(token_B, non_blocking=True)
        pinned.copied.record()
        return SampledStep(host_B, pinned.copied, logprobs, prompt_outputs)


@dataclass(frozen=True, slots=True)
class _PinnedTokens:
    """A buffer for the tokens of a step, and an event that happens when they are there."""

    token_Z: Tensor
    copied: torch.cuda.Event

    @classmethod
    def allocate(cls, capacity: int) -> _PinnedTokens:
        token_Z = torch.empty(capacity, dtype=torch.int32, pin_memory=True)
        return cls(token_Z, torch.cuda.Event())
