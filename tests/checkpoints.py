"""Tiny random checkpoints, made by transformers: the oracle of the engine, as folders on disk.

`tiny_model(arch)` is the oracle itself; `tiny_checkpoint(arch, folder)` writes it, with a
tokenizer, in Hugging Face's layout. Two layers, width 64, 4 heads and 2 kv heads of 16 (Qwen3: of
32), float32, a context of 256. The vocabulary of 301 divides by no tensor-parallel size. Weights
are wide enough that greedy tokens vary, and no bias or norm weight is trivial.

The tokenizer has 300 tokens, among them <s>, </s>, <|im_start|> and <|im_end|>. It puts <s> before
a text, and so does its ChatML template: a chat encoded with special tokens once more has two.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 301
CONTEXT = 256
WINDOW = 24  # of OLMo-3's sliding layer: shorter than many prompts
SPECIAL_TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = range(4)

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_DIFFERENT: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "olmo2": {},
    "olmo3": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    },
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 16, **_EXPERTS},
    "smollm3": {"no_rope_layers": [1, 0], "pad_token_id": None},
}
ARCHITECTURES = tuple(_DIFFERENT)
IN_GGUF = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
_SHARD_SIZE = {"mistral": "100KB"}  # saved in several files with an index; the others in one

_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog says to the fox:"
    " that was the end of the matter."
]


def tiny_model(arch: str, **overrides: Any) -> PreTrainedModel:
    """The oracle. `overrides` are fields of its config. Equal arguments give equal weights."""
    config = AutoConfig.for_model(arch, **{**_SHAPE, **_DIFFERENT[arch], **overrides})
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    random = torch.Generator().manual_seed(zlib.crc32(arch.encode()))
    for name, weight in model.named_parameters():
        weight.data.normal_(*_mean_and_std(name), generator=random)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=[EOS_ID, IM_END_ID]
    )
    return model


def _mean_and_std(weight: str) -> tuple[float, float]:
    if "norm" in weight:
        return 1.0, 0.3
    is_wide = weight.endswith("bias") or "embed" in weight or "lm_head" in weight
    return 0.0, 0.5 if is_wide else 0.2


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE: every text can be encoded, and comes back from decoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 1,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    bos = SPECIAL_TOKENS[BOS_ID]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=SPECIAL_TOKENS[EOS_ID],
        additional_special_tokens=SPECIAL_TOKENS[IM_START_ID:],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def save_checkpoint(model: PreTrainedModel, folder: Path) -> Path:
    """Write weights, configs and tokenizer as a folder of the hub has them; returns the folder."""
    model.save_pretrained(folder, max_shard_size=_SHARD_SIZE.get(model.config.model_type, "1GB"))
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_checkpoint(arch: str, folder: Path, **overrides: Any) -> Path:
    """Write `tiny_model(arch, **overrides)` into a folder, and return the folder."""
    return save_checkpoint(tiny_model(arch, **overrides), folder)


def add_python(folder: Path, ran: Path) -> None:
    """Put a tokenizer in Python into a folder. If it is imported, it makes the file `ran`."""
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    config = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", **config}))
