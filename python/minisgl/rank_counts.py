"""How many tensor-parallel ranks can divide a model, found before their processes start.

Nothing here needs torch, which all ranks would have imported before they divide their weights. Then
`DistributedInfo` refuses what is not known here, such as another width of a new architecture.
"""

from __future__ import annotations

from minisgl.checkpoint import ModelConfig
from minisgl.errors import ConfigError

_MOST_NAMED = 1024


def check_rank_count(count: int, model: ModelConfig, *, ep: bool) -> None:
    """
    Args:
        ep: whether the ranks divide the experts of a layer, and not the width of each.

    Raises:
        ConfigError: this number of ranks cannot divide the model; names those that can. Or the
            ranks would divide experts, and the model has none.
    """
    if ep and not model.num_experts:
        raise ConfigError(f"--ep needs a model with experts, {model.architecture} has 0")
    if can_divide(count, model, ep=ep):
        return
    counts = range(1, min(model.num_heads, _MOST_NAMED) + 1)
    possible = [str(count) for count in counts if can_divide(count, model, ep=ep)]
    raise ConfigError(
        f"--tp must divide the model's heads and widths, as {', '.join(possible)} do, got {count}"
    )


def can_divide(count: int, model: ModelConfig, *, ep: bool) -> bool:
    """Whether each rank gets an equal part of whatever is divided among `count` of them."""
    divided = [model.num_heads]
    if model.dense_layers:
        divided.append(model.mlp_width)
    if model.num_experts:
        divided.append(model.num_experts if ep else model.expert_width)
    num_kv_heads = model.num_kv_heads  # ranks that outnumber them have copies
    fits_kv_heads = num_kv_heads % count == 0 or count % num_kv_heads == 0
    return fits_kv_heads and all(size % count == 0 for size in divided)
