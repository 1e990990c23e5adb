"""The libraries that a rank will load, as far as that is known without torch."""

from __future__ import annotations

from minisgl.builds.kernels import CUDA_DTYPES, cpu_library, cuda_library
from minisgl.builds.library import Library
from minisgl.builds.prompt_attention import (
    PROMPT_HEAD_DIMS,
    find_flashinfer_sources,
    prompt_kernels,
)
from minisgl.checkpoint import ModelConfig
from minisgl.config import EngineConfig, backend_names
from minisgl.utils.cuda_toolkit import find_cuda_toolkit


def needed_libraries(
    config: EngineConfig, model: ModelConfig, capability: tuple[int, int] | None
) -> list[Library]:
    """The libraries of a rank that can be compiled ahead.

    FlashInfer's own modules are not among them, because only its Python can compile them.

    Args:
        config: resolved.
        capability: compute capability of the rank's GPU, if it has one.
    """
    assert config.dtype
    if config.device == "cpu":
        return [cpu_library()]
    if capability is None or find_cuda_toolkit() is None:
        return []
    libraries = []
    if config.dtype in CUDA_DTYPES:
        libraries.append(cuda_library(capability))
    if prompts_use_flashinfer(config.attn) and model.head_dim in PROMPT_HEAD_DIMS:
        libraries += _prompt_libraries(config.dtype, model, capability)
    return libraries


def prompts_use_flashinfer(attn: str | None) -> bool:
    """Whether a GPU's prompts need kernels of FlashInfer.

    Args:
        attn: one attention backend or two; None for the fastest one, if there is a compiler and
            FlashInfer takes the model's heads.
    """
    return attn is None or backend_names(attn)[0] == "fi"


def _prompt_libraries(dtype: str, model: ModelConfig, capability: tuple[int, int]) -> list[Library]:
    sources = find_flashinfer_sources(capability, dtype)
    if sources is None:
        return []
    toolkit = find_cuda_toolkit()
    kinds = prompt_kernels(dtype, model.head_dim, model.attention)
    return [kernels.library(sources, toolkit) for kernels in kinds]
