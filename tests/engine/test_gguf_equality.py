"""GGUF files through the engine: tiny models against their checkpoints, and the default model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from minisgl.checkpoint import fetch_model
from tests.checkpoint.gguf_files import saved_weights, write_gguf
from tests.checkpoints import VOCAB_SIZE, tiny_model
from tests.engine.harness import Host, WatchedEngine, config_of, greedy, random_prompts
from tests.engine.oracle import Oracle, assert_equals_oracle


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_a_gguf_file_gives_the_tokens_and_logits_of_its_checkpoint(
    arch: str,
    checkpoint: Callable[[str], Path],
    oracle: Callable[[str], Oracle],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(arch), saved_weights(checkpoint(arch)))
    config = config_of(fetch_model(str(path)))
    prompts = random_prompts([1, 5, 17, 40], VOCAB_SIZE)
    answers = Host(WatchedEngine(config), config).ask(prompts, greedy(20))
    assert_equals_oracle(oracle(arch), prompts, answers)


def dequantized(reader: gguf.GGUFReader, num_heads: int, num_kv_heads: int) -> dict[str, Tensor]:
    """The weights of a Llama by transformers' names, made without the code under test."""
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    layer_names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_output": "self_attn.o_proj",
        **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
        **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    }
    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        parts = tensor.name.split(".")
        heads = {"attn_q": num_heads, "attn_k": num_kv_heads}.get(parts[-2])
        if heads:  # row 2 i + j of a head is transformers' row i + j H/2
            pairs = weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2)
            weight = pairs.reshape(weight.shape)
        if parts[0] in names:
            name = names[parts[0]]
        else:
            name = f"model.layers.{parts[1]}.{layer_names[parts[2]]}"
        weights[f"{name}.weight"] = weight
    return weights


@pytest.fixture(scope="module")
def default_model() -> Path:
    return fetch_model(None)


@pytest.fixture(scope="module")
def smollm2(default_model: Path) -> LlamaForCausalLM:
    """The default model in transformers, with the shape that its authors publish."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    weights = dequantized(gguf.GGUFReader(default_model / "model.gguf"), 9, 3)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
    return model


@pytest.fixture
def all_processors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An engine computes with several threads, as it does for a user."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(before)


TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n",
    "1, 1, 2, 3, 5, 8,",
    "Water boils at",
    "Dear Sir or Madam,\n\nI am writing to",
    "Le petit prince",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
]


NUM_TOKENS = 16  # of each answer; two models of real size compute them


@torch.inference_mode()
def best_next(model: LlamaForCausalLM, ids: list[int]) -> list[int]:
    """The likeliest token after each of these."""
    best: list[int] = model(torch.tensor([ids])).logits[0].argmax(dim=-1).tolist()
    return best


@pytest.mark.slow
def test_the_default_model_gives_the_tokens_of_transformers(
    default_model: Path, smollm2: LlamaForCausalLM, all_processors: None
) -> None:
    """Each is its choice after those before it, so all are what it would generate."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(default_model)
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    config = config_of(default_model, page_size=16, num_pages=400, max_prefill_length=50)
    answers = Host(WatchedEngine(config), config).ask(prompts, greedy(NUM_TOKENS))

    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == best_next(smollm2, prompt + answer.tokens)[len(prompt) - 1 : -1]
