"""KV store: puts the keys and values of a step into their slots of the pools."""

# Dimensions: H head width, K kv heads, P pages, Q positions of a page, T tokens of a step.

from __future__ import annotations

from torch import Tensor

from minisgl.errors import KernelInputError


def store_kv(k_TKH: Tensor, v_TKH: Tensor, k_PQKH: Tensor, v_PQKH: Tensor, slot_T: Tensor) -> None:
    """Write row t of k and v to slot slot_T[t] of each pool, in place.

    Args:
        slot_T: int64, in [0, P * Q): position s % Q of page s // Q. Not range-checked on CUDA (it
            would sync). Of tokens with equal slots any one is stored; only padding tokens share
            slots, in the padding page.

    Raises:
        KernelInputError: shapes or dtypes disagree.
    """
    for name, x_TKH, pool_PQKH in (("k", k_TKH, k_PQKH), ("v", v_TKH, v_PQKH)):
        expected = (slot_T.shape[0], *pool_PQKH.shape[2:])
        if x_TKH.shape != expected or x_TKH.dtype != pool_PQKH.dtype:
            actual = tuple(x_TKH.shape)
            raise KernelInputError(
                f"{name}: expected {expected} of {pool_PQKH.dtype}, got {actual} of {x_TKH.dtype}"
            )
    page_size = k_PQKH.shape[1]
    place_T = (slot_T // page_size, slot_T % page_size)
    k_PQKH[place_T] = k_TKH
    v_PQKH[place_T] = v_TKH
