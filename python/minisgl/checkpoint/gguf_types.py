"""The types that the metadata of a GGUF file must have.

llama.cpp refuses another type, too, and is stricter: it takes one width of integers and floats. A
text such as "false" for a flag would count as true, or as absent.

Names and types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gguf import GGUFValueType as Type

_UNSIGNED = frozenset({Type.UINT8, Type.UINT16, Type.UINT32, Type.UINT64})
_INTEGERS = _UNSIGNED | {Type.INT8, Type.INT16, Type.INT32, Type.INT64}
_NUMBERS = _INTEGERS | {Type.FLOAT32, Type.FLOAT64}


@dataclass(frozen=True, slots=True)
class _Kind:
    """Types that are as good as each other.

    Attributes:
        name: of the kind, for an error.
        types: of the value, or of the items of an array.
    """

    name: str
    types: frozenset[Type]
    is_array: bool = False


_BOOL = _Kind("a bool", frozenset({Type.BOOL}))
_INTEGER = _Kind("an integer", _INTEGERS)
_NUMBER = _Kind("a number", _NUMBERS)
_STRING = _Kind("a string", frozenset({Type.STRING}))
_ARRAY_OF_INTEGERS = _Kind("an array of integers", _INTEGERS, is_array=True)
_ARRAY_OF_NUMBERS = _Kind("an array of numbers", _NUMBERS, is_array=True)
_ARRAY_OF_STRINGS = _Kind("an array of strings", frozenset({Type.STRING}), is_array=True)

# `gguf_tokenizer.py` checks the ids of tokens, with their bounds.
_TOKENIZER_KINDS = {
    "tokenizer.chat_template": _STRING,
    "tokenizer.ggml.add_bos_token": _BOOL,
    "tokenizer.ggml.add_eos_token": _BOOL,
    "tokenizer.ggml.add_space_prefix": _BOOL,
    "tokenizer.ggml.merges": _ARRAY_OF_STRINGS,
    "tokenizer.ggml.model": _STRING,
    "tokenizer.ggml.pre": _STRING,
    "tokenizer.ggml.scores": _ARRAY_OF_NUMBERS,
    "tokenizer.ggml.token_type": _ARRAY_OF_INTEGERS,
    "tokenizer.ggml.tokens": _ARRAY_OF_STRINGS,
}
TOKENIZER_FIELDS = tuple(_TOKENIZER_KINDS)
_KINDS = {
    "general.architecture": _STRING,
    "split.count": _INTEGER,
    **_TOKENIZER_KINDS,
}
_MODEL_KINDS = {  # of names behind the architecture's prefix
    "attention.causal": _BOOL,
    "attention.clamp_kqv": _NUMBER,
    "attention.head_count": _INTEGER,
    "attention.head_count_kv": _INTEGER,
    "attention.key_length": _INTEGER,
    "attention.layer_norm_rms_epsilon": _NUMBER,
    "attention.max_alibi_bias": _NUMBER,
    "attention.scale": _NUMBER,
    "attention.sliding_window": _INTEGER,
    "attn_logit_softcapping": _NUMBER,
    "block_count": _INTEGER,
    "context_length": _INTEGER,
    "embedding_length": _INTEGER,
    "embedding_scale": _NUMBER,
    "expert_count": _INTEGER,
    "expert_feed_forward_length": _INTEGER,
    "expert_gating_func": _INTEGER,
    "expert_group_count": _INTEGER,
    "expert_shared_count": _INTEGER,
    "expert_used_count": _INTEGER,
    "expert_weights_norm": _BOOL,
    "expert_weights_scale": _NUMBER,
    "feed_forward_length": _INTEGER,
    "final_logit_softcapping": _NUMBER,
    "logit_scale": _NUMBER,
    "norm_top_k_prob": _BOOL,
    "residual_scale": _NUMBER,
    "rope.dimension_count": _INTEGER,
    "rope.freq_base": _NUMBER,
    "rope.scale_linear": _NUMBER,
    "rope.scaling.alpha": _NUMBER,
    "rope.scaling.attn_factor": _NUMBER,
    "rope.scaling.factor": _NUMBER,
    "rope.scaling.original_context_length": _INTEGER,
    "rope.scaling.type": _STRING,
    "rope.scaling.yarn_attn_factor": _NUMBER,
    "rope.scaling.yarn_beta_fast": _NUMBER,
    "rope.scaling.yarn_beta_slow": _NUMBER,
    "rope.scaling.yarn_ext_factor": _NUMBER,
    "rope.scaling.yarn_log_multiplier": _NUMBER,
    "use_parallel_residual": _BOOL,
}


def fault_of_type(name: str, types: Sequence[Type]) -> str | None:
    """Say what is wrong with a field's type.

    Args:
        name: with the architecture's prefix, if it is a field of the model.
        types: of the value; ARRAY and then the type of the items, if there are any.

    Returns:
        None if it is right, or if the field is not known here.
    """
    _, _, name_in_model = name.partition(".")
    kind = _KINDS.get(name) or _MODEL_KINDS.get(name_in_model)
    is_array = types[0] == Type.ARRAY
    is_empty = is_array and len(types) == 1
    if kind is None or (is_array == kind.is_array and (is_empty or types[-1] in kind.types)):
        return None
    got = " of ".join(each.name.lower() for each in types)
    return f"{name} must be {kind.name}, and it is {'an' if is_array else 'a'} {got}"
