"""What transformers computes with the tiny model: greedy text, token by token, beyond its end."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tests.checkpoints import tiny_model, tiny_tokenizer

CONTEXT = 16_384  # long enough that an answer outlasts a test
ARCH = "llama"


@cache
def _parts() -> tuple[Any, Any]:
    return tiny_model(ARCH, max_position_embeddings=CONTEXT), tiny_tokenizer()


def text_after(prompt: str, num_tokens: int) -> str:
    """The greedy continuation of a text."""
    return _continue(tuple(_parts()[1](prompt)["input_ids"]), num_tokens)


def answer_to(content: str, num_tokens: int) -> str:
    """The greedy answer in a chat of one turn."""
    turns = [{"role": "user", "content": content}]
    tokenizer = _parts()[1]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return _continue(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]), num_tokens)


@torch.inference_mode()
def logprobs_of(ids: list[int]) -> list[float]:
    """The log probability of each token but the first, given those before it."""
    logprob_TV = torch.log_softmax(_parts()[0](torch.tensor([ids])).logits[0].float(), dim=-1)
    return [float(logprob_TV[i, token]) for i, token in enumerate(ids[1:])]


@torch.inference_mode()
def embedding_of(text: str) -> list[float]:
    """The hidden state of the last token after the final norm, scaled to length 1."""
    model, tokenizer = _parts()
    last_D = model.model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0, -1]
    vector: list[float] = (last_D / last_D.norm()).tolist()
    return vector


@cache
@torch.inference_mode()
def _continue(prompt: tuple[int, ...], num_tokens: int) -> str:
    model, tokenizer = _parts()
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    text: str = tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
    return text
