"""From options to a model on the device of one rank, ready to compute.

This is the part of a start that needs no KV cache: the device, the communicator, compiled kernels,
the weights. Kernels are compiled while the weights are loaded. Next to read: `engine.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from minisgl.attention import PromptModules, check_attention
from minisgl.checkpoint import ModelConfig, foreign_eos_ids, recommendations_not_followed
from minisgl.config import EngineConfig
from minisgl.distributed import DistributedCommunicator, DistributedInfo, create_communicator
from minisgl.engine.kernel_builds import KernelBuilds, fastest_attention, kernels_to_build
from minisgl.engine.kernel_sizes import KernelSizes
from minisgl.engine.kernel_warm_up import call_kernels
from minisgl.engine.limits import RowLimits, context_length
from minisgl.engine.memory import free_bytes, out_of_memory_is_explained
from minisgl.layers import VocabShard, set_rope_device
from minisgl.layers.linear import LinearBase
from minisgl.models import BaseLLMModel, get_model_class, load_weight
from minisgl.moe import expert_shape
from minisgl.rank_counts import check_rank_count
from minisgl.utils.excerpts import excerpt
from minisgl.utils.hardware import share_processors, use_huge_pages
from minisgl.utils.heap import keep_freed_memory

logger = logging.getLogger(__name__)

_PRECISION = {"bfloat16": 8, "float16": 11, "float32": 24}  # bits of the significand
_NUM_SHOWN = 5  # names or numbers in a warning
# Weights are packed if a second copy takes at most this fraction of what is free.
_MAX_PACKED_FRACTION = 0.2


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights, and the rank that computes it.

    Attributes:
        config: the model's.
        vocab: the tokens of this rank.
        dtype: of weights, activations, keys and values.
        attn: one attention backend or two, which `check_attention` has accepted.
        max_seq_len: tokens of a prompt and its answer together, if the KV cache holds so many.
        weight_bytes: of its linear layers, the most that a rank has.
    """

    model: BaseLLMModel
    config: ModelConfig
    comm: DistributedCommunicator
    vocab: VocabShard
    device: torch.device
    dtype: torch.dtype
    attn: str
    max_seq_len: int
    weight_bytes: int

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Layers, this rank's kv heads, head width."""
        num_kv_heads = len(self.comm.info.shard_kv_heads(self.config.num_kv_heads))
        return self.config.num_layers, num_kv_heads, self.config.head_dim

    @property
    def multiplied_bytes(self) -> int:
        """About how many bytes of weights a token is multiplied with on a rank."""
        shape = expert_shape(self.config, self.comm.info, self.dtype)
        if shape is None:
            return self.weight_bytes
        expert_bytes = 3 * shape.width * shape.mlp_width * self.dtype.itemsize
        num_layers = self.config.num_layers - len(self.config.dense_layers)
        return self.weight_bytes + num_layers * shape.each * expert_bytes // shape.ep


def load_model(
    config: EngineConfig, info: DistributedInfo, rendezvous: Path | None = None
) -> LoadedModel:
    """Join the ranks of the group, and load this rank's part of the model.

    Args:
        config, rendezvous: see `Engine`.

    Raises:
        ConfigError, CheckpointError: the options do not fit the model, or its files are unusable.
    """
    assert config.model
    assert config.dtype
    assert config.page_size
    model_config = ModelConfig.from_folder(Path(config.model))
    model_class = get_model_class(model_config.architecture)
    check_rank_count(info.size, model_config, ep=info.ep)
    device = _set_up_device(config, info)
    logger.debug("the device is ready")
    dtype = getattr(torch, config.dtype)

    # Compilers, side by side with all that follows.
    prompt_modules = partial(
        PromptModules, device, dtype, model_config.head_dim, model_config.attention
    )
    attn = config.attn or fastest_attention(model_config.head_dim, prompt_modules)
    check_attention(attn, device, model_config.head_dim, model_config.attention)
    kernel_builds = KernelBuilds(kernels_to_build(device, dtype, attn, prompt_modules))

    # The group of ranks, which measures its sums on a GPU.
    comm = create_communicator(info, device, rendezvous, config.comm)
    vocab = VocabShard(model_config.vocab_size, comm)

    # Kernels that are compiled by a call on the GPU, so after those measurements.
    max_seq_len = context_length(config, model_config)
    if device.type == "cuda":
        sizes = KernelSizes(
            model=model_config,
            info=info,
            vocab=vocab,
            rows=RowLimits(config.page_size, max_seq_len),
            attn=attn,
            dtype=dtype,
            device=device,
        )
        kernel_builds.start({"Triton kernels": partial(call_kernels, sizes)})

    # The weights.
    advice = "raise --tp, take a smaller model, or end what else is on the GPU"
    with torch.inference_mode(), out_of_memory_is_explained("loading the weights", advice):
        if info.leads:
            _log_rounding(model_config.stored_dtype, config.dtype)
            _warn_of_eos_ids(Path(config.model), model_config)
            _warn_of_recommendations(Path(config.model))
        model = model_class(model_config, comm, max_seq_len, dtype)
        unread = load_weight(
            model,
            Path(config.model),
            dtype,
            device,
            model_config.quantization,
            dummy=config.dummy_weight,
        )
        if info.leads and unread:
            _warn_of_unread(unread)
        set_rope_device(model, device)
        weight_bytes = _choose_kernels(model, config, comm, device)
    if device.type == "cpu":
        use_huge_pages()
    logger.debug("the weights are loaded")

    kernel_builds.wait()
    return LoadedModel(
        model=model,
        config=model_config,
        comm=comm,
        vocab=vocab,
        device=device,
        dtype=dtype,
        attn=attn,
        max_seq_len=max_seq_len,
        weight_bytes=weight_bytes,
    )


def _set_up_device(config: EngineConfig, info: DistributedInfo) -> torch.device:
    assert config.device
    if config.device == "cuda":
        device = torch.device(f"cuda:{info.rank}")
        torch.cuda.set_device(device)
        return device
    keep_freed_memory()
    share_processors(info.size)
    return torch.device("cpu")


def _log_rounding(stored: str | None, computed: str) -> None:
    """Say that weights lose digits, which a user may not want."""
    if _PRECISION.get(stored or "", 0) > _PRECISION[computed]:
        logger.info("the checkpoint is in %s and is rounded to %s; see --dtype", stored, computed)


def _warn_of_eos_ids(folder: Path, model: ModelConfig) -> None:
    """Say that no file names an end, or that one names ends which the model cannot choose."""
    if not model.eos_ids:
        logger.warning(
            "%s: neither config.json nor generation_config.json has an eos_token_id, so an answer "
            "ends at max_tokens, at a stop, or with the context",
            folder,
        )
    vocab_size = model.vocab_size
    for path, ids in foreign_eos_ids(folder, vocab_size).items():
        logger.warning(
            "%s: no answer ends at eos_token_id %s%s, which is not in [0, %d)",
            path,
            ", ".join(map(excerpt, ids[:_NUM_SHOWN])),
            ", ..." if len(ids) > _NUM_SHOWN else "",
            vocab_size,
        )


def _warn_of_recommendations(folder: Path) -> None:
    """Say that a model's authors sample in a way that no request can ask for."""
    names = recommendations_not_followed(folder)
    if names:
        path = folder / "generation_config.json"
        logger.warning("%s: answers do not follow what it says of %s", path, ", ".join(names))


def _warn_of_unread(names: list[str]) -> None:
    """Say that a checkpoint has weights which config.json gives no place in the model."""
    shown = names[:_NUM_SHOWN]
    logger.warning(
        "the model leaves out %d of the checkpoint's tensors; see config.json: %s%s",
        len(names),
        ", ".join(shown),
        ", ..." if len(names) > len(shown) else "",
    )


def _choose_kernels(
    model: BaseLLMModel,
    config: EngineConfig,
    comm: DistributedCommunicator,
    device: torch.device,
) -> int:
    """Choose a kernel for each linear layer; returns `LoadedModel.weight_bytes`."""
    linears = [op for op in model.walk() if isinstance(op, LinearBase)]
    # Ranks may have different numbers of bytes, but must capture the same graphs, and these depend
    # on the number.
    num_bytes = sum(linear.num_bytes for linear in linears)
    smallest_negative = comm.all_reduce_min(torch.tensor([-num_bytes], device=device))
    weight_bytes = -int(smallest_negative)

    pack = may_pack(config, weight_bytes, device)
    for linear in linears:
        linear.choose_kernel(pack=pack)
    return weight_bytes


def may_pack(config: EngineConfig, weight_bytes: int, device: torch.device) -> bool:
    """Whether weights are packed: as the option says, else if a second copy of them fits easily."""
    if config.pack_weights is not None:
        return config.pack_weights
    return weight_bytes <= _MAX_PACKED_FRACTION * free_bytes(device, config.tp)
