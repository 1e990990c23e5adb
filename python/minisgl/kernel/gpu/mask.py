"""Ban tokens by bit masks: a program a part of a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import pdl, wait_for_inputs

_BLOCK = 2048


@triton.jit(do_not_specialize_on_alignment=["row"])
def _mask_logits(
    logits, row, bits, stride_logits, stride_bits, vocab_size, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    x = tl.program_id(0)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    is_token = v < vocab_size
    start = logits + tl.load(row + x).to(tl.int64) * stride_logits
    logit = tl.load(start + v, mask=is_token).to(
        tl.float32
    )  # all are written, since whole words are faster than bytes of them
    word = tl.load(bits + x.to(tl.int64) * stride_bits + v // 32, mask=is_token)
    tl.store(start + v, tl.where((word >> (v % 32)) & 1 != 0, logit, float("-inf")), mask=is_token)


def mask_logits(logits_BV: Tensor, row_X: Tensor, bits_XW: Tensor) -> None:
    vocab_size = logits_BV.shape[1]
    _mask_logits[(len(row_X), triton.cdiv(vocab_size, _BLOCK))](
        logits_BV, row_X, bits_XW, logits_BV.stride(0), bits_XW.stride(0), vocab_size, BLOCK=_BLOCK, **pdl(logits_BV)
    )
