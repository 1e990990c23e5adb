"""KV store: puts the keys and values of a step into their slots of the pools."""

# Dimensions: H head width, K kv heads, S kv slots, T tokens of a step.

from __future__ import annotations

from torch import Tensor

from minisgl.errors import KernelInputError


def store_kv(
    k_TKH: Tensor, v_TKH: Tensor, k_pool_SKH: Tensor, v_pool_SKH: Tensor, slot_T: Tensor
) -> None:
    """Write row t of k and v to row slot_T[t] of each pool, in place.

    Args:
        slot_T: int64, in [0, S). Not range-checked on CUDA (it would sync). Of tokens with equal
            slots any one is stored; only padding has such, in the padding page.

    Raises:
        KernelInputError: shapes or dtypes disagree.
    """
    for name, x_TKH, pool_SKH in (("k", k_TKH, k_pool_SKH), ("v", v_TKH, v_pool_SKH)):
        expected = (slot_T.shape[0], *pool_SKH.shape[1:])
        if x_TKH.shape != expected or x_TKH.dtype != pool_SKH.dtype:
            actual = tuple(x_TKH.shape)
            raise KernelInputError(
                f"{name}: expected {expected} of {pool_SKH.dtype}, got {actual} of {x_TKH.dtype}"
            )
    k_pool_SKH.index_copy_(0, slot_T, k_TKH)
    v_pool_SKH.index_copy_(0, slot_T, v_TKH)
