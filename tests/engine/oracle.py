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
    """Greedy answers of a model; remembers them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known: dict[tuple[tuple[int, ...], int], tuple[list[int], Tensor]] = {}

    def answer(self, prompt: Prompt, num_tokens: int) -> tuple[list[int], Tensor]:
        """Greedy tokens and their logits_TV. Asserts that rounding cannot change a token."""
        key = (tuple(prompt), num_tokens)
        if key not in self._known:
            self._known[key] = self._generate(prompt, num_tokens)
        return self._known[key]

    def _generate(self, prompt: Prompt, num_tokens: int) -> tuple[list[int], Tensor]:
        ids = torch.tensor([prompt])
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits_TV = torch.cat(output.logits)
        best, second = logits_TV.topk(2).values.unbind(dim=1)
        assert (best - second).min() > MIN_GAP, (
            "the oracle hesitates: choose other weights or prompts"
        )
        return output.sequences[0, len(prompt) :].tolist(), logits_TV


def assert_equals_oracle(oracle: Oracle, prompts: list[Prompt], answers: list[Answer]) -> None:
    """Every token equal, every logit close."""
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens, logits_TV = oracle.answer(prompt, len(answer.tokens))
        assert answer.tokens == tokens, f"a prompt of {len(prompt)} tokens"
        assert answer.logits_TV is not None
        torch.testing.assert_close(answer.logits_TV, logits_TV, atol=LOGITS_TOLERANCE, rtol=0)
