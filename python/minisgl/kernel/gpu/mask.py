"""Ban tokens by bit masks: a program a part of a row, which ends at once where the row has no mask."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import pdl, wait_for_inputs

_BLOCK = 2048
_PROGRAMS = 2048  # about: as many as a large GPU holds at a time


@triton.jit(do_not_specialize=["blocks_of_part"])
def _mask_logits(
    logits, mask, bits, stride_logits, stride_bits, vocab_size, blocks_of_part, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_inputs(PDL)
    x = tl.load(mask + b).to(tl.int64)
    if x >= 0:
        for block in range(part * blocks_of_part, (part + 1) * blocks_of_part):
            v = block * BLOCK + tl.arange(0, BLOCK)
            place, is_token = logits + b * stride_logits + v, v < vocab_size
            word = tl.load(bits + x * stride_bits + v // 32, mask=is_token, other=0)
            logit = tl.load(place, mask=is_token, other=0.0).to(tl.float32)
            # All are written, since whole words are faster than bytes of them.
            tl.store(place, tl.where((word >> (v % 32)) & 1 != 0, logit, -float("inf")), mask=is_token)


def mask_logits(logits_BV: Tensor, mask_B: Tensor, bits_XW: Tensor) -> None:
    num_rows, vocab_size = logits_BV.shape
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    blocks_of_part = triton.cdiv(num_blocks * num_rows, _PROGRAMS)
    _mask_logits[(num_rows, triton.cdiv(num_blocks, blocks_of_part))](
        logits_BV, mask_B, bits_XW, logits_BV.stride(0), bits_XW.stride(0), vocab_size, blocks_of_part,
        BLOCK=_BLOCK, **pdl(logits_BV),
    )  # fmt: skip
