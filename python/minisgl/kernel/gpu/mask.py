"""Bans tokens by grammar masks: a program for a block of a row, which ends at once without a mask.

Masks may lie in pinned host memory, from which few large reads are faster than many small ones.
"""

# Dimensions: B requests of a step, V vocabulary, W words of 32 bits,
# X a selection out of another dimension.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import RememberedKernel, pdl, wait_for_inputs

_WORDS = 256  # of a mask that a program reads


@RememberedKernel
@triton.jit(do_not_specialize_on_alignment=["mask"])
def _mask_logits(
    logits, mask, bits, stride_logits, stride_bits, vocab_size,
    WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    wait_for_inputs(PDL)
    x = tl.load(mask + b).to(tl.int64)
    if x >= 0:
        w = block * WORDS + tl.arange(0, WORDS)
        bit = tl.arange(0, 32)[None, :]
        word = tl.load(bits + x * stride_bits + w, mask=w * 32 < vocab_size, other=0)[:, None]
        v = w[:, None] * 32 + bit
        is_token = v < vocab_size
        place = logits + b * stride_logits + v
        logit = tl.load(place, mask=is_token, other=0.0).to(tl.float32)
        # Allowed logits are written too, since whole words are faster than bytes of them.
        tl.store(place, tl.where((word >> bit) & 1 != 0, logit, -float("inf")), mask=is_token)


def mask_logits(logits_BV: Tensor, mask_B: Tensor, bits_XW: Tensor) -> None:
    num_rows, vocab_size = logits_BV.shape
    _mask_logits[(num_rows, -(-vocab_size // (32 * _WORDS)))](
        logits_BV,
        mask_B,
        bits_XW,
        logits_BV.stride(0),
        bits_XW.stride(0),
        vocab_size,
        WORDS=_WORDS,
        **pdl(logits_BV),
    )
