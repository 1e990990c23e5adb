"""From the name of an architecture in config.json to its class."""

from __future__ import annotations

from minisgl.errors import CheckpointError
from minisgl.models.base import BaseLLMModel
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.mistral import MistralForCausalLM
from minisgl.models.olmo2 import Olmo2ForCausalLM
from minisgl.models.olmo3 import Olmo3ForCausalLM
from minisgl.models.qwen2 import Qwen2ForCausalLM
from minisgl.models.qwen3 import Qwen3ForCausalLM
from minisgl.models.qwen3_moe import Qwen3MoeForCausalLM
from minisgl.models.smollm3 import SmolLM3ForCausalLM

MODELS: dict[str, type[BaseLLMModel]] = {
    model.__name__: model
    for model in (
        LlamaForCausalLM,
        MistralForCausalLM,
        Olmo2ForCausalLM,
        Olmo3ForCausalLM,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
        Qwen3MoeForCausalLM,
        SmolLM3ForCausalLM,
    )
}


def get_model_class(architecture: str) -> type[BaseLLMModel]:
    """
    Raises:
        CheckpointError: the architecture is unknown; lists those that are known.
    """
    if architecture not in MODELS:
        raise CheckpointError(
            f"config.json: architectures: unknown architecture {architecture!r}; "
            f"there is {', '.join(MODELS)}"
        )
    return MODELS[architecture]
