"""Chooses tokens: first a segment of the vocabulary, then a token of that segment.

Tokens are drawn from the softmax of logits / temperature. A segment has a fixed number of tokens.
The log of the sum of their weights, exp(logit / temperature), is the segment's own logit. The
segment whose logit plus Gumbel noise is largest is chosen as often as its tokens together (the
Gumbel-max trick; Maddison et al. 2014, "A* Sampling", arXiv:1411.0030, apply it to regions). Inside
the segment, the token whose logit plus noise of its own is largest is chosen. This is exact, and
most tokens need neither a hash nor logarithms:

    score of a segment = temperature * (log sum of exp(logit / temperature) + noise)
    score of a token   = logit + temperature * noise, among the tokens of the best segment

At a temperature of 0 both are the largest logit.

Noise is a pure function of seed, position, and number of a segment or id of a token. A 32-bit
integer hash replaces a generator with state. So a request's noise depends neither on its
batch, nor on the step in which it is drawn, nor on the device. A part of the vocabulary that begins
where a segment begins has the same segments as the whole. The mixer is `lowbias32` of C. Wellons'
hash prospector. Two rounds with the key folded in between follow the counter-based construction of
Salmon et al. 2011 ("Parallel random numbers: as easy as 1, 2, 3", SC'11).
"""

# Dimensions: B requests of a step, V vocabulary,
# X a selection out of another dimension: segments, each of which then has tokens V.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.core import NO_TOKEN
from minisgl.kernel.dispatch import cpu_kernels_for, triton_kernels_for
from minisgl.kernel.segments import SEGMENT_SIZE

_LOW_BITS = 0xFFFFFFFF
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)


def choose_tokens(
    logits_BV: Tensor,
    lowest_B: Tensor | None,
    temperature_B: Tensor,
    seed_B2: Tensor,
    position_B: Tensor,
) -> Tensor:
    """Sample from the softmax of logits / temperature; a temperature of 0 chooses the best token.

    Args:
        logits_BV: bfloat16 or float32. A NaN and minus infinity are never chosen.
        lowest_B: float32, no NaN. No token whose logit is lower may be chosen, unless the
            temperature is 0. Without it, every token may be chosen.
        temperature_B: float32, from 0 to 1e6.
        seed_B2: int32, the low and the high half of a 64-bit seed.
        position_B: int32.

    Returns:
        token_B: int32; the lowest id among equal scores, `NO_TOKEN` where a row has nothing that
            may be chosen.
    """
    kernels = triton_kernels_for(logits_BV)
    if kernels is not None:
        token_B: Tensor = kernels.choose_tokens(
            logits_BV, lowest_B, temperature_B, seed_B2, position_B
        )
        return token_B
    token_B, _ = _choose(logits_BV, lowest_B, temperature_B, seed_B2, position_B, 0)
    return token_B


def choose_scored_tokens(
    logits_BV: Tensor,
    lowest_B: Tensor | None,
    temperature_B: Tensor,
    seed_B2: Tensor,
    position_B: Tensor,
    first_token: int,
) -> Tensor:
    """Choose like `choose_tokens`, in a part of the vocabulary.

    Args:
        logits_BV: of the tokens from `first_token` on, at least one. Columns past the end of the
            vocabulary are minus infinity.
        first_token: a multiple of `SEGMENT_SIZE`.

    Returns:
        scored_B: int64, the token in the low 32 bits, the score of its segment in the high ones.
            The score's float32 bits are mapped such that a better score is a smaller number. So the
            smallest of the numbers of all parts has the token that `choose_tokens` chooses in the
            whole vocabulary, or `NO_TOKEN`.
    """
    assert first_token % SEGMENT_SIZE == 0
    kernels = triton_kernels_for(logits_BV)
    if kernels is not None:
        scored_B: Tensor = kernels.choose_scored_tokens(
            logits_BV, lowest_B, temperature_B, seed_B2, position_B, first_token
        )
        return scored_B
    token_B, score_B = _choose(logits_BV, lowest_B, temperature_B, seed_B2, position_B, first_token)
    bits_B = (score_B + 0.0).view(torch.int32)  # both zeros are equal scores
    ascending_B = torch.where(bits_B < 0, bits_B ^ 0x7FFFFFFF, bits_B)
    token_B = torch.where(token_B == NO_TOKEN, NO_TOKEN, token_B + first_token)
    return (~ascending_B).long() << 32 | token_B.long() & _LOW_BITS


def _choose(
    logits_BV: Tensor,
    lowest_B: Tensor | None,
    temperature_B: Tensor,
    seed_B2: Tensor,
    position_B: Tensor,
    first_token: int,
) -> tuple[Tensor, Tensor]:
    """Return the chosen column of each row, int32, and the score of its segment, float32.

    The column is `NO_TOKEN` where none may be chosen.
    """
    kernels = cpu_kernels_for(logits_BV)
    if kernels is None:
        return _choose_reference(
            logits_BV, lowest_B, temperature_B, seed_B2, position_B, first_token
        )
    if lowest_B is None:
        lowest_B = temperature_B.new_empty(0)
    column_B = temperature_B.new_empty(len(logits_BV), dtype=torch.int32)
    score_B = torch.empty_like(temperature_B)
    kernels.choose(
        logits_BV, lowest_B, temperature_B, seed_B2, position_B, first_token, column_B, score_B
    )
    return column_B, score_B


def _choose_reference(
    logits_BV: Tensor,
    lowest_B: Tensor | None,
    temperature_B: Tensor,
    seed_B2: Tensor,
    position_B: Tensor,
    first_token: int,
) -> tuple[Tensor, Tensor]:
    """Compute what `_choose` does, in plain torch."""
    seed_B = seed_B2.contiguous().view(torch.int64).flatten()
    position_B = position_B.long()
    heat_B1 = temperature_B[:, None]
    token_V = torch.arange(SEGMENT_SIZE, dtype=torch.int32, device=logits_BV.device)

    allowed_BXV = _segments(logits_BV, lowest_B, heat_B1)
    top_BX = allowed_BXV.amax(dim=2)
    weight_BXV = ((allowed_BXV - top_BX[:, :, None]) / heat_B1[:, :, None].clamp(min=1e-30)).exp()
    segment_X = torch.arange(top_BX.shape[1], dtype=torch.int32, device=logits_BV.device)
    number_X = ~(segment_X + first_token // SEGMENT_SIZE)
    noise_BX = weight_BXV.sum(dim=2).log() + gumbel_noise(seed_B, position_B, number_X)
    score_BX = torch.where(top_BX.isfinite(), top_BX + heat_B1 * noise_BX, top_BX)
    segment_B = score_BX.argmax(dim=1)
    score_B = score_BX.gather(1, segment_B[:, None])[:, 0]

    # Of these rows V is one segment.
    allowed_BV = allowed_BXV[torch.arange(len(segment_B)), segment_B]
    column_BV = (segment_B[:, None] * SEGMENT_SIZE + token_V).int()
    noise_BV = gumbel_noise(seed_B, position_B, first_token + column_BV)
    chosen_B = (allowed_BV + heat_B1 * noise_BV).argmax(dim=1)
    column_B = column_BV.gather(1, chosen_B[:, None])[:, 0]
    return column_B.masked_fill(score_B == -torch.inf, NO_TOKEN), score_B


def _segments(logits_BV: Tensor, lowest_B: Tensor | None, heat_B1: Tensor) -> Tensor:
    """Return logits_BXV in float32, minus infinity where there is no token that may be chosen."""
    logits_BV = logits_BV.float()
    is_banned_BV = logits_BV.isnan()
    if lowest_B is not None:
        is_banned_BV |= (logits_BV < lowest_B[:, None]) & (heat_B1 > 0)
    missing = -logits_BV.shape[1] % SEGMENT_SIZE
    allowed_BV = logits_BV.masked_fill(is_banned_BV, -torch.inf)
    padded_BV = F.pad(allowed_BV, (0, missing), value=-torch.inf)
    allowed_BXV: Tensor = padded_BV.unflatten(1, (-1, SEGMENT_SIZE))
    return allowed_BXV


def gumbel_noise(seed_B: Tensor, position_B: Tensor, number_BV: Tensor) -> Tensor:
    """Return independent standard Gumbel noise for each request and some numbers.

    The argmax of logits plus this noise is a sample from the softmax of the logits.

    Args:
        seed_B, position_B: int64.
        number_BV: int32; or number_V, which all requests have. A token's number is its id, that of
            segment s is ~s, so no token has it.

    Returns:
        noise_BV: float32, finite.
    """
    key_B = _mix(_low_bits(position_B))
    key_B = _mix(_low_bits(seed_B >> 32) ^ key_B)
    key_B = _mix(_low_bits(seed_B) ^ key_B)
    key_B1 = key_B[:, None]
    bits_BV = number_BV ^ key_B1
    _mix(bits_BV).bitwise_xor_(key_B1)
    _mix(bits_BV)
    # In (0, 1): 23 bits and a half are exact in float32.
    uniform_BV = ((bits_BV >> 9) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return uniform_BV.log_().neg_().log_().neg_()


def _low_bits(x: Tensor) -> Tensor:
    """Return the low 32 bits as int32, without overflow in the cast."""
    low = x & _LOW_BITS
    return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32)


def _mix(x: Tensor) -> Tensor:
    """Apply lowbias32 in place; int32 arithmetic wraps, and the masks make its shifts logical."""
    x ^= (x >> 16) & 0xFFFF
    x *= _MULTIPLIERS[0]
    x ^= (x >> 15) & 0x1FFFF
    x *= _MULTIPLIERS[1]
    x ^= (x >> 16) & 0xFFFF
    return x
