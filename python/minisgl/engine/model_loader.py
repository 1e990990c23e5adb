"""A model with its weights on the device, and a kernel chosen for each linear layer."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from minisgl.config import EngineConfig
from minisgl.distributed import DistributedCommunicator
from minisgl.engine.memory import may_pack
from minisgl.layers import set_rope_device
from minisgl.layers.linear import LinearBase
from minisgl.models import BaseLLMModel, ModelConfig, load_weight

logger = logging.getLogger(__name__)

_PRECISION = {"bfloat16": 8, "float16": 11, "float32": 24}  # bits of the significand


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to compute.

    Attributes:
        weight_bytes: of its linear layers, the most that a rank has.
    """

    model: BaseLLMModel
    weight_bytes: int


@torch.inference_mode()
def load_model(
    model_class: type[BaseLLMModel],
    config: EngineConfig,
    model_config: ModelConfig,
    comm: DistributedCommunicator,
    max_seq_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedModel:
    """
    Raises:
        CheckpointError: the files are unusable.
    """
    assert config.model
    if comm.info.leads:
        _log_rounding(model_config.stored_dtype, config.dtype)
    model = model_class(model_config, comm, max_seq_len, dtype)
    load_weight(
        model,
        Path(config.model),
        dtype,
        device,
        model_config.quantization,
        dummy=config.dummy_weight,
    )
    set_rope_device(model, device)

    # Ranks may have different numbers of bytes, but must capture the same graphs, and these depend
    # on the number.
    linears = [op for op in model.walk() if isinstance(op, LinearBase)]
    num_bytes = sum(linear.num_bytes for linear in linears)
    smallest_negative = comm.all_reduce_min(torch.tensor([-num_bytes], device=device))
    weight_bytes = -int(smallest_negative)

    pack = may_pack(config, weight_bytes, device)
    for linear in linears:
        linear.choose_kernel(pack=pack)
    return LoadedModel(model, weight_bytes)


def _log_rounding(stored: str | None, computed: str | None) -> None:
    """Say that weights lose digits, which a user may not want."""
    if _PRECISION.get(stored or "", 0) > _PRECISION[computed or "float32"]:
        logger.info("the checkpoint is in %s and is rounded to %s; see --dtype", stored, computed)
