"""silu(gate) * up: a program for a block of a row."""

# Dimensions: F mlp width, T tokens of a step.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import RememberedKernel, pdl, wait_for_inputs


@RememberedKernel
@triton.jit
def _silu_and_mul(
    gate, up, y, stride_gate, stride_up, width, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = f < width
    wait_for_inputs(PDL)
    gate_value = tl.load(gate + t * stride_gate + f, mask=mask, other=0.0).to(tl.float32)
    up_value = tl.load(up + t * stride_up + f, mask=mask, other=0.0).to(tl.float32)
    value = gate_value * tl.sigmoid(gate_value) * up_value
    tl.store(y + t * width + f, value.to(y.dtype.element_ty), mask=mask)


def silu_and_mul(gate_TF: Tensor, up_TF: Tensor, y_TF: Tensor) -> None:
    tokens, width = gate_TF.shape
    if tokens:
        _silu_and_mul[(tokens, -(-width // 1024))](
            gate_TF,
            up_TF,
            y_TF,
            gate_TF.stride(0),
            up_TF.stride(0),
            width,
            BLOCK=1024,
            **pdl(gate_TF),
        )
