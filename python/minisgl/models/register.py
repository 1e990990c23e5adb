"""From the name of an architecture in config.json to its class."""

from __future__ import annotations

from minisgl.models.base import BaseLLMModel
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.mistral import MistralForCausalLM
from minisgl.models.qwen2 import Qwen2ForCausalLM
from minisgl.models.qwen3 import Qwen3ForCausalLM
from minisgl.models.qwen3_moe import Qwen3MoeForCausalLM
from minisgl.utils import Registry

MODELS: Registry[type[BaseLLMModel]] = Registry("architecture")
for _model in (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
):
    MODELS.register(_model.__name__)(_model)


def get_model_class(architecture: str) -> type[BaseLLMModel]:
    """
    Raises:
        ConfigError: the architecture is unknown; lists those that are known.
    """
    return MODELS[architecture]
