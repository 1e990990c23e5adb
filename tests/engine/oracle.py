"""What the engine is compared with: transformers, one prompt at a time."""

# Dimensions: T tokens of a step, V vocabulary.

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.engine.harness import Answer, Prompt

LOGITS_TOLERANCE = 1e-4
MIN_GAP = (
    2 * LOGITS_TOLERANCE
)  # between the first and second choice, so that the token is beyond doubt


class Oracle:
    """What a model would choose after each token; remembers it.

    A greedy answer is right if each token is the model's choice after those before it. So one pass
    over prompt and answer says as much as generating the answer again, which takes a pass a token.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known: dict[tuple[tuple[int, ...], int], Tensor] = {}

    def logits_after(self, prompt: Prompt, tokens: list[int]) -> Tensor:
        """The logits_TV from which each of these tokens of an answer is chosen.

        Asserts that rounding cannot change a token.
        """
        ids = tuple(prompt + tokens[:-1])
        key = (ids, len(prompt))
        if key not in self._known:
            self._known[key] = self._compute(ids)[len(prompt) - 1 :]
            best, second = self._known[key].topk(2).values.unbind(dim=1)
            assert (best - second).min() > MIN_GAP, (
                "the oracle hesitates: choose other weights or prompts"
            )
        return self._known[key]

    @torch.inference_mode()
    def _compute(self, ids: tuple[int, ...]) -> Tensor:
        logits_TV: Tensor = self._model(torch.tensor([ids])).logits[0]
        return logits_TV


def assert_equals_oracle(oracle: Oracle, prompts: list[Prompt], answers: list[Answer]) -> None:
    """Every token equal, every logit close."""
    for prompt, answer in zip(prompts, answers, strict=True):
        logits_TV = oracle.logits_after(prompt, answer.tokens)
        assert answer.tokens == logits_TV.argmax(dim=1).tolist(), f"after {len(prompt)} tokens"
        assert answer.logits_TV is not None
        torch.testing.assert_close(answer.logits_TV, logits_TV, atol=LOGITS_TOLERANCE, rtol=0)
