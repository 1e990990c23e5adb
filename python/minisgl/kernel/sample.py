"""Chooses tokens: adds noise that is a pure function of seed, position and token id.

A 32-bit integer hash replaces a generator with state. So a request's noise depends neither on its
batch, nor on the step in which it is drawn, nor on the device. The mixer is `lowbias32` of C.
Wellons' hash prospector. Two rounds with the key folded in between follow the counter-based
construction of Salmon et al. 2011 ("Parallel random numbers: as easy as 1, 2, 3", SC'11).
"""

# Dimensions: B requests of a step, V vocabulary,
# X a selection out of another dimension.

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernel.dispatch import cpu_kernels_for, triton_kernels_for

SEGMENT_SIZE = 256  # tokens
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)


def choose_tokens(
    logits_BV: Tensor,
    lowest_B: Tensor | None,
    temperature_B: Tensor,
    seed_B2: Tensor,
    position_B: Tensor,
) -> Tensor:
    """Return the argmax of logits + temperature * noise; a temperature of 0 means no noise.

    Args:
        lowest_B: float32. No token whose logit is lower may be chosen, unless the temperature is 0.
            Without it, every token may be chosen.
        temperature_B: float32.
        seed_B2: int32, the low and the high half of a 64-bit seed.
        position_B: int32.

    Returns:
        token_B: int32; the lowest id among equal scores.
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
    """Choose like `choose_tokens`, among a part of the vocabulary.

    Args:
        logits_BV: of the tokens from `first_token` on, at least one. Columns behind the end of the
            vocabulary are minus infinity.

    Returns:
        scored_B: int64, the token in the low 32 bits, its score in the high ones. They are those of
            the float32, turned around: a better score is a smaller number. So the smallest of the
            numbers of all parts has the token that `choose_tokens` chooses among the whole.
    """
    kernels = triton_kernels_for(logits_BV)
    if kernels is not None:
        scored_B: Tensor = kernels.choose_scored_tokens(
            logits_BV, lowest_B, temperature_B, seed_B2, position_B, first_token
        )
        return scored_B
    token_B, score_B = _choose(logits_BV, lowest_B, temperature_B, seed_B2, position_B, first_token)
    # Both zeros are equal scores. A NaN is as good as a banned token.
    score_B = torch.nan_to_num(score_B, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0
    bits_B = score_B.view(torch.int32)
    ascending_B = torch.where(bits_B < 0, bits_B ^ 0x7FFFFFFF, bits_B)
    return (~ascending_B).long() << 32 | (token_B + first_token).long()


def _choose(
    logits_BV: Tensor,
    lowest_B: Tensor | None,
    temperature_B: Tensor,
    seed_B2: Tensor,
    position_B: Tensor,
    first_token: int,
) -> tuple[Tensor, Tensor]:
    """Return the column that wins in each row, int32, and its score, float32.

    A NaN beside numbers wins nowhere but in the reference.
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
    column_B = logits_BV.argmax(dim=-1)
    score_B = logits_BV.gather(1, column_B[:, None])[:, 0].float()
    index_X = temperature_B.nonzero().flatten()  # the requests that are not greedy
    if len(index_X):
        score_XV = logits_BV[index_X].float()
        if lowest_B is not None:
            score_XV.masked_fill_(score_XV < lowest_B[index_X, None], -torch.inf)
        seed_X = seed_B2[index_X].contiguous().view(torch.int64).flatten()
        noise_XV = gumbel_noise(seed_X, position_B[index_X].long(), logits_BV.shape[1], first_token)
        noisy_XV = torch.addcmul(score_XV, temperature_B[index_X, None], noise_XV)
        column_X = noisy_XV.argmax(dim=-1)
        column_B[index_X] = column_X
        score_B[index_X] = noisy_XV.gather(1, column_X[:, None])[:, 0]
    return column_B.int(), score_B


def gumbel_noise(
    seed_B: Tensor, position_B: Tensor, num_tokens: int, first_token: int = 0
) -> Tensor:
    """Return independent standard Gumbel noise for each request and some tokens.

    The argmax of logits plus this noise is a sample from the softmax of the logits.

    Args:
        seed_B, position_B: int64.

    Returns:
        noise_BV: float32, finite.
    """
    key_B = _mix(_low_bits(position_B))
    key_B = _mix(_low_bits(seed_B >> 32) ^ key_B)
    key_B = _mix(_low_bits(seed_B) ^ key_B)
    key_B1 = key_B[:, None]
    token_V = torch.arange(
        first_token, first_token + num_tokens, dtype=torch.int32, device=seed_B.device
    )
    bits_BV = token_V ^ key_B1
    _mix(bits_BV).bitwise_xor_(key_B1)
    _mix(bits_BV)
    # In (0, 1): 23 bits and a half are exact in float32.
    uniform_BV = ((bits_BV >> 9) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return uniform_BV.log_().neg_().log_().neg_()


def _low_bits(x: Tensor) -> Tensor:
    """Return the low 32 bits as int32, without overflow in the cast."""
    low = x & 0xFFFFFFFF
    return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32)


def _mix(x: Tensor) -> Tensor:
    """Apply lowbias32 in place; int32 arithmetic wraps, and the masks make its shifts logical."""
    x ^= (x >> 16) & 0xFFFF
    x *= _MULTIPLIERS[0]
    x ^= (x >> 15) & 0x1FFFF
    x *= _MULTIPLIERS[1]
    x ^= (x >> 16) & 0xFFFF
    return x
