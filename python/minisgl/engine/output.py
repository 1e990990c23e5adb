"""What a plan came to, on its way to the host."""

# Dimension key: B requests that sample.

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core import TokenLogprobs
from minisgl.engine.logits import LogprobsOutput
from minisgl.engine.prompts import PromptsOutput


class ForwardOutput:
    """The tokens of a launched plan, in the order of its sampling slices; and what log probabilities were asked for."""

    def __init__(
        self, token_B: Tensor, logprobs: LogprobsOutput | None = None, prompts: PromptsOutput | None = None
    ) -> None:
        self._logprobs, self._prompts = logprobs, prompts
        if token_B.is_cuda:
            self._token_B = token_B.to("cpu", non_blocking=True)  # to pinned memory
            self._copied: torch.cuda.Event | None = torch.cuda.Event()
            self._copied.record()
        else:
            self._token_B, self._copied = token_B, None

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
