"""The next tokens of a batch in two launches: the best of each part of the vocabulary, then the best of those."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import pdl, wait_for_inputs

_BLOCK = 2048
_PROGRAMS = 2112  # about: sixteen for each processor of a large GPU


@triton.jit
def _mix(x):
    """lowbias32 on uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit(do_not_specialize=["part_size", "num_parts"])
def _best_of_part(
    logits, lowest, temperature, seed, position, best, token, stride_logits, vocab_size, part_size, num_parts,
    HAS_LOWEST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_inputs(PDL)
    t = tl.load(temperature + b)
    low = tl.load(seed + 2 * b).to(tl.uint32, bitcast=True)
    high = tl.load(seed + 2 * b + 1).to(tl.uint32, bitcast=True)
    key = _mix(low ^ _mix(high ^ _mix(tl.load(position + b).to(tl.uint32, bitcast=True))))
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    top_id = tl.full((BLOCK,), 2147483647, tl.int32)
    begin = part * part_size
    end = tl.minimum(begin + part_size, vocab_size)
    while begin < end:
        i = begin + tl.arange(0, BLOCK)
        score = tl.load(logits + b * stride_logits + i, mask=i < end, other=-float("inf")).to(tl.float32)
        if t > 0:
            if HAS_LOWEST:
                score = tl.where(score >= tl.load(lowest + b), score, -float("inf"))
            bits = _mix(_mix(i.to(tl.uint32) ^ key) ^ key)
            uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
            score += t * -tl.log(-tl.log(uniform))
        is_better = score > top
        top = tl.where(is_better, score, top)
        top_id = tl.where(is_better, i, top_id)
        begin += BLOCK
    highest = tl.max(top, axis=0)
    tl.store(best + b * num_parts + part, highest)
    tl.store(token + b * num_parts + part, tl.min(tl.where(top == highest, top_id, 2147483647), axis=0))


@triton.jit(do_not_specialize=["num_parts"])
def _best_of_all(best, token, output, num_parts, vocab_size, PARTS: tl.constexpr, PDL: tl.constexpr):
    b = tl.program_id(0)
    i = tl.arange(0, PARTS)
    wait_for_inputs(PDL)
    score = tl.load(best + b * num_parts + i, mask=i < num_parts, other=-float("inf"))
    candidate = tl.load(token + b * num_parts + i, mask=i < num_parts, other=2147483647)
    chosen = tl.min(tl.where(score == tl.max(score, axis=0), candidate, 2147483647), axis=0)
    tl.store(output + b, tl.minimum(chosen, vocab_size - 1))  # NaN is no best: an id all the same


def choose_tokens(
    logits_BV: Tensor, lowest_B: Tensor | None, temperature_B: Tensor, seed_B2: Tensor, position_B: Tensor
) -> Tensor:
    batch_size, vocab_size = logits_BV.shape
    parts_wanted = max(1, _PROGRAMS // batch_size)
    part_size = triton.cdiv(triton.cdiv(vocab_size, parts_wanted), _BLOCK) * _BLOCK
    num_parts = triton.cdiv(vocab_size, part_size)
    best = torch.empty(batch_size, num_parts, dtype=torch.float32, device=logits_BV.device)
    token = torch.empty(batch_size, num_parts, dtype=torch.int32, device=logits_BV.device)
    output_B = torch.empty(batch_size, dtype=torch.int32, device=logits_BV.device)
    _best_of_part[(batch_size, num_parts)](
        logits_BV, logits_BV if lowest_B is None else lowest_B, temperature_B, seed_B2, position_B, best, token,
        logits_BV.stride(0), vocab_size, part_size, num_parts,
        HAS_LOWEST=lowest_B is not None, BLOCK=_BLOCK, num_warps=8, **pdl(logits_BV),
    )  # fmt: skip
    _best_of_all[(batch_size,)](
        best, token, output_B, num_parts, vocab_size,
        PARTS=triton.next_power_of_2(triton.cdiv(vocab_size, _BLOCK)), num_warps=1, **pdl(logits_BV),
    )  # fmt: skip
    return output_B
