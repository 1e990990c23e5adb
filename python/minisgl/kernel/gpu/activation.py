"""silu(gate) * up."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import pdl, wait_for_inputs


@triton.jit
def _silu_and_mul(
    gate, up, y, stride_gate, stride_up, width, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < width
    wait_for_inputs(PDL)
    g = tl.load(gate + row * stride_gate + i, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride_up + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * width + i, (g * tl.sigmoid(g) * u).to(y.dtype.element_ty), mask=mask)


def silu_and_mul(gate_TF: Tensor, up_TF: Tensor, y_TF: Tensor) -> None:
    tokens, width = gate_TF.shape
    if tokens:
        _silu_and_mul[(tokens, triton.cdiv(width, 1024))](
            gate_TF,
            up_TF,
            y_TF,
            gate_TF.stride(0),
            up_TF.stride(0),
            width,
            BLOCK=1024,
            **pdl(gate_TF),
        )
