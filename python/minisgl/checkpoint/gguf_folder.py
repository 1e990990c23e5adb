"""From a GGUF file's metadata to a Hugging Face folder: config, tokenizer, chat template.

The weights stay in the file, to which the folder has a link. Fields mean what they mean in
llama.cpp. A field that would change what the model computes, and that no config.json here can
express, is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from minisgl.checkpoint.attention_spec import DIVIDED
from minisgl.checkpoint.config import ModelConfig
from minisgl.checkpoint.files import GGUF_NAME, is_panic
from minisgl.checkpoint.gguf import GGUFFile
from minisgl.checkpoint.gguf_tokens import name_tokens
from minisgl.checkpoint.gguf_types import TOKENIZER_FIELDS
from minisgl.checkpoint.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from minisgl.checkpoint.sentencepiece import spell_spaces
from minisgl.errors import CheckpointError
from minisgl.utils.excerpts import excerpt

# Names of fields stand behind the architecture's prefix.
_CONFIG_FIELDS = {  # config.json's name: GGUF's
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "sliding_window": "attention.sliding_window",
}
_ROPE_FIELDS = {  # likewise, of rope_parameters; the factor and the type are not plain copies
    "rope_theta": "rope.freq_base",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
_FACTOR = "rope.scaling.factor"
_OLD_FACTOR = "rope.scale_linear"
_ROPE_TYPES = ("none", "linear", "yarn")
# Ends of a text, a turn and a message. Where the id of a kind is not declared, its texts count,
# much as llama.cpp does.
_ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")
_ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>", "_<EOT>")
_END_TOKENS = {
    "eos": {"</s>", *_ENDS_OF_TEXT},
    "eot": {*_ENDS_OF_TURN, *_ENDS_OF_TEXT},
    "eom": {"<|eom_id|>"},
}
_ENDS_OF_OLLAMA = "tokenizer.ggml.eos_token_ids"  # a list
# Kinds of tokens whose ids are read, here or by transformers, which looks up their texts.
_NAMED_TOKENS = ("bos", "unknown", "padding", *_END_TOKENS)
# Fields that the models here do not support, with the values that change nothing.
_HARMLESS: dict[str, list[Any]] = {
    "attention.causal": [True],
    "attention.clamp_kqv": [0],
    "attention.max_alibi_bias": [0],
    "attn_logit_softcapping": [0],
    "embedding_scale": [0, 1],
    "expert_gating_func": [0, 1],  # not named; softmax
    "expert_group_count": [0, 1],
    "expert_shared_count": [0],
    "expert_weights_scale": [0, 1],
    "final_logit_softcapping": [0],
    "logit_scale": [0, 1],
    "residual_scale": [0, 1],
    "rope.scaling.alpha": [0],
    "rope.scaling.attn_factor": [0, 1],
    "rope.scaling.yarn_attn_factor": [1],
    "rope.scaling.yarn_ext_factor": [1],
    "rope.scaling.yarn_log_multiplier": [0],
    "use_parallel_residual": [False],
}


def write_hf_folder(path: Path, folder: Path) -> None:
    """Write config, tokenizer and chat template of a GGUF file, and a link to it, into a folder.

    No other file beside it is read: transformers gets the folder, which has only the link.

    Args:
        folder: is created if it is missing; else it may hold the file itself under `GGUF_NAME`,
            and nothing else.

    Raises:
        CheckpointError: the file is damaged, or its architecture, its tokenizer, or the value of a
            field is not supported.
        OSError: the folder cannot be written.
    """
    file = GGUFFile(path)
    for name in TOKENIZER_FIELDS:
        file.check_type(name)
    pre_tokenizer = _pre_tokenizer(file)
    _check_token_ids(file)
    config = hf_config(file)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / GGUF_NAME).exists():
        (folder / GGUF_NAME).symlink_to(path.resolve())
    tokenizer = _convert_tokenizer(file, folder)
    # transformers knows the splits of a few names and takes GPT-2's for all others.
    if pre_tokenizer is not None:
        pre_tokenizer.apply_to(tokenizer.backend_tokenizer)
        if pre_tokenizer.adds_bos and file.field("tokenizer.ggml.add_bos_token") is None:
            tokenizer.add_bos_token = True
    if file.field("tokenizer.ggml.model") == "llama":
        adds_prefix = file.field("tokenizer.ggml.add_space_prefix") is not False
        spell_spaces(tokenizer.backend_tokenizer, adds_prefix=adds_prefix)
    _save(tokenizer, folder)
    _set_tokenizer_class(folder / "tokenizer_config.json")
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """Return the metadata as the content of a config.json.

    Raises:
        CheckpointError: a field is missing, has another type than it must, or asks for what is not
            supported. It is named as in the file.
    """
    try:
        config = _config(file)
        _check_config(config, file)
        _check_harmless(file)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{file}: its metadata make no config: {error}") from None
    return config


def _check_config(config: dict[str, Any], file: GGUFFile) -> None:
    """
    Raises:
        ValueError: a value is missing or not supported; it has the name of the file's field.
    """
    is_old = file.model_field(_FACTOR) is None and file.model_field(_OLD_FACTOR) is not None
    fields = {**_CONFIG_FIELDS, **_ROPE_FIELDS, "factor": _OLD_FACTOR if is_old else _FACTOR}
    keys = {name: file.key(key) for name, key in fields.items()}
    if not file.model_field(_CONFIG_FIELDS["head_dim"]):
        keys["head_dim"] = f"{keys['hidden_size']} / {keys['num_attention_heads']}"
    try:
        ModelConfig.from_json(config)
    except ValueError as error:
        names = "|".join(keys)
        message = re.sub(rf"\b({names})\b", lambda match: keys[match[1]], str(error))
        raise ValueError(message) from None


def _check_harmless(file: GGUFFile) -> None:
    harmless: dict[str, list[Any]] = {
        **_HARMLESS,
        "attention.scale": [0, 1 / math.sqrt(file.head_dim)],
        "rope.dimension_count": _whole_rotations(file),
    }
    for name, values in harmless.items():
        value = file.model_field(name)
        if value is not None and not any(_is_close(value, each) for each in values):
            expected = " or ".join(map(str, values))
            raise ValueError(
                f"{file.key(name)} is not supported, it is {excerpt(value)}, expected {expected}"
            )


def _whole_rotations(file: GGUFFile) -> list[Any]:
    """Counts of rotated dimensions that mean the whole head.

    A llama always rotates the whole head. `ollama create` writes another number for one whose heads
    are wider or narrower than its width by the number of heads.
    """
    counts = [file.head_dim]
    if file.architecture == "LlamaForCausalLM":
        counts.append(
            file.model_field("embedding_length") // file.model_field("attention.head_count")
        )
    return counts


def _is_close(value: Any, expected: float) -> bool:
    """Whether a field is a number that differs by rounding to float32 at most."""
    return isinstance(value, int | float) and math.isclose(value, expected, rel_tol=1e-6)


def _config(file: GGUFFile) -> dict[str, Any]:
    fields = {name: file.model_field(key) for name, key in _CONFIG_FIELDS.items()}
    architecture = file.architecture
    if architecture == "LlamaForCausalLM" and fields["sliding_window"] is not None:
        architecture = "MistralForCausalLM"  # the same tensors, but all layers have the window
    return {
        "architectures": [architecture],
        **{name: value for name, value in fields.items() if value is not None},
        "vocab_size": file.shapes["model.embed_tokens.weight"][0],
        "tie_word_embeddings": "lm_head.weight" not in file.shapes,
        "norm_topk_prob": _norms_experts(file),
        "attention_bias": "model.layers.0.self_attn.o_proj.bias" in file.shapes,
        "mlp_bias": "model.layers.0.mlp.down_proj.bias" in file.shapes,
        "eos_token_id": _eos_ids(file),
        "rope_parameters": _rope_parameters(file),
    }


def _eos_ids(file: GGUFFile) -> list[int]:
    """The tokens that end an answer: by their declared ids, or else by their texts.

    Many files declare one token alone, as the end of a text, although their chat template ends a
    turn with another one, or the other way round.
    """
    ids: set[int] = set(file.field(_ENDS_OF_OLLAMA) or [])
    undeclared: set[str] = set()
    for kind, texts in _END_TOKENS.items():
        token = file.field(f"tokenizer.ggml.{kind}_token_id")
        if token is None:
            undeclared |= texts
        else:
            ids.add(token)
    vocabulary = file.field("tokenizer.ggml.tokens") or []
    return sorted(ids.union(i for i, text in enumerate(vocabulary) if text in undeclared))


def _norms_experts(file: GGUFFile) -> bool:
    """Whether the weights of a token's experts sum to 1; the second name is Ollama's."""
    names = ("expert_weights_norm", "norm_top_k_prob")
    return all(file.model_field(name) is not False for name in names)


def _rope_parameters(file: GGUFFile) -> dict[str, Any]:
    factor = file.model_field(_FACTOR) or file.model_field(_OLD_FACTOR)
    scaling = file.model_field("rope.scaling.type")
    if scaling is None:
        scaling = "linear" if factor else "none"
    if scaling not in _ROPE_TYPES:
        raise ValueError(
            f"{file.key('rope.scaling.type')} {excerpt(scaling)} is not supported; there is "
            f"{', '.join(_ROPE_TYPES)}"
        )
    fields = {
        **{name: file.model_field(key) for name, key in _ROPE_FIELDS.items()},
        "rope_type": "default" if scaling == "none" else scaling,
        "factor": factor or None,
    }
    divisors = file.rope_divisors()
    if divisors is not None:
        if len(divisors) != file.head_dim // 2:
            raise ValueError(
                f"rope_freqs.weight has {len(divisors)} numbers, expected {file.head_dim // 2}, "
                "half the width of a head"
            )
        if scaling == "linear" and factor:
            divisors = [divisor * factor for divisor in divisors]
        elif scaling not in ("none", "linear"):
            raise ValueError(f"rope_freqs beside the rope.scaling.type {excerpt(scaling)}")
        fields |= {"rope_type": DIVIDED, "divisors": divisors}
    return {name: value for name, value in fields.items() if value is not None}


def _pre_tokenizer(file: GGUFFile) -> PreTokenizer | None:
    """Return how texts are split before merges apply; None if it is no byte-level BPE.

    Raises:
        CheckpointError: the file does not name the split, or its name is not known.
    """
    if file.field("tokenizer.ggml.model") != "gpt2":
        return None
    name = file.field("tokenizer.ggml.pre")
    pre_tokenizer = PRE_TOKENIZERS.get(str(name))
    if pre_tokenizer is None:
        raise CheckpointError(
            f"{file} has the pre-tokenizer {excerpt(name)} (tokenizer.ggml.pre), "
            "which is not known: "
            "its texts would be split into wrong tokens. Convert the model again with a recent "
            "llama.cpp, or serve the folder of safetensors that the file was made from. Known "
            f"are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return pre_tokenizer


def _check_token_ids(file: GGUFFile) -> None:
    """
    Raises:
        CheckpointError: a field names a token that the file's vocabulary does not have.
    """
    vocabulary = file.field("tokenizer.ggml.tokens")
    if not isinstance(vocabulary, list):  # transformers says so
        return
    ends = file.field(_ENDS_OF_OLLAMA)
    if not isinstance(ends, list | None):
        raise CheckpointError(f"{file}: {_ENDS_OF_OLLAMA} must be a list, got {excerpt(ends)}")
    ids = [(f"an item of {_ENDS_OF_OLLAMA}", token) for token in ends or []]
    for kind in _NAMED_TOKENS:
        name = f"tokenizer.ggml.{kind}_token_id"
        ids.append((name, file.field(name)))
    for name, token in ids:
        is_known = type(token) is int and 0 <= token < len(vocabulary)
        if token is not None and not is_known:
            raise CheckpointError(
                f"{file}: {name} must be a whole number in [0, {len(vocabulary)}), "
                f"got {excerpt(token)}"
            )


def _convert_tokenizer(file: GGUFFile, folder: Path) -> Any:
    """Return transformers' tokenizer of a GGUF file, which a folder has under `GGUF_NAME`."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, gguf_file=GGUF_NAME, trust_remote_code=False
        )
        if file.field("tokenizer.ggml.model") in ("gpt2", "llama"):  # those of BPE
            types = file.field("tokenizer.ggml.token_type") or []
            tokens = file.field("tokenizer.ggml.tokens")
            backend = name_tokens(tokenizer.backend_tokenizer, tokens, types)
            options = {
                name: value
                for name, value in tokenizer.init_kwargs.items()
                if name not in tokenizer.vocab_files_names  # the folder has none of these
            }
            return PreTrainedTokenizerFast(tokenizer_object=backend, **options)
        return tokenizer
    except BaseException as error:  # the library raises whatever its converters do
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise CheckpointError(f"the tokenizer of {file} cannot be converted: {error}") from error


def _save(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is Exception:  # how the library says that a file cannot be written
            raise OSError(str(error)) from error
        raise


def _set_tokenizer_class(path: Path) -> None:
    """Name the class that takes tokenizer.json as it is.

    Others, such as Qwen2's, replace the split that is written there by their own.
    """
    config = json.loads(path.read_text("utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False), "utf-8")
