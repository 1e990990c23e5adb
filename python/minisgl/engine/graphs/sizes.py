"""Which sizes of steps are captured, on a GPU and on a CPU.

More sizes leave less to pad, and take more time and memory at the start. Which captured graph takes
a plan is in `key.py`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from minisgl.core import FEWEST_IN_GROUP
from minisgl.engine.graphs.key import GraphKey, GraphKeys, GraphKind

# More decodes than these are captured only where the option says so.
_MAX_DECODES = 512
# Tokens of a slice that is alone in its step, ...
_LONE_SIZES = [32, 64, 128, 256, 512, 1024]
# ... and of a step with several slices, decodes included. A GPU multiplies 128 tokens at a time.
_STEP_SIZES: list[int] = [*range(128, 1281, 128), 1536, 2048]
# Longer steps of small models have room for all decodes at once, so that there are few graphs.
_LONG_STEP_SIZES = [2560, 3072, 3584, 4096]
# A step of up to `_FEW_TOKENS` has up to `_FEW_PROMPTS`, a longer one `MAX_PROMPTS`, beside so many
# decodes at most: the logits of as many are computed.
_FEW_TOKENS = 512
_FEW_PROMPTS = 16
MAX_PROMPTS = 64
_DECODES_BESIDE_PROMPTS = [64, 128, 256]
_MIN_PROMPT_TOKENS = 64
# Tokens times bytes of weights that each is multiplied with. Beyond, a step takes the device longer
# than it takes the host to launch it: Qwen3-14B on an H200, 1,500 tokens, 60 ms.
_MAX_WORK = 46 * 10**12
# A long step may be padded by a fifth, so it must not take the device longer than it takes the host
# to launch it: Qwen3-0.6B on H200s, 4,096 tokens, some 10 ms, and 10 to 26 on the host.
_MAX_LONG_WORK = 5 * 10**12

# On a CPU padding takes time: 0.25 ms a token of SmolLM2-135M, and launching it by Python 6 ms a
# step. With a matrix unit a step of 63 decodes and 128 tokens of a prompt took 72 ms, and 92 by
# Python. Products are those of a compiled kernel, as nothing else can be captured.
_CPU_DECODES = [*range(1, 9), 12, 16, 20, 24, 28, 32, 40, 48, 56, 64]
_CPU_DECODES_BESIDE_PROMPTS = [0, 4, 8, 16, 32, 48, 64]
_CPU_STEP_SIZES = [8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192]
_CPU_PROMPT_TOKENS = 64  # beside up to 32 decodes; twice as many as them beside more
_MAX_CPU_PROMPTS = 4


def most_decodes(asked: int | None, num_rows: int) -> int:
    """The most decodes that are captured: as the option says, or those of all running requests."""
    return min(_MAX_DECODES if asked is None else asked, num_rows)


def most_tokens_with_prompts(max_tokens: int, weight_bytes: int) -> int:
    """The most tokens of a step with prompts that is worth a graph.

    Args:
        max_tokens: of a request; padding stands in the row of one.
        weight_bytes: of the weights that a token is multiplied with.
    """
    short = min(_STEP_SIZES[-1], _MAX_WORK // weight_bytes)
    longest = max(short, _MAX_LONG_WORK // weight_bytes)
    return min(max_tokens, longest)


def gpu_graph_keys(max_decodes: int, max_tokens: int) -> GraphKeys:
    """The sizes of steps that a GPU captures.

    With groups, too, are about every second number of decodes and, of steps with prompts, that of
    most decodes for each number of tokens.

    Args:
        max_tokens: of a step with prompts.
    """
    decodes = _decode_keys(size_ladder(max_decodes))
    every_second = {FEWEST_IN_GROUP, *range(16, max_decodes, 16), max_decodes}
    with_prompts = _keys_with_prompts(max_decodes, max_tokens)
    of_most_decodes = {key.num_tokens: key for key in with_prompts}
    return {
        GraphKind.DECODES: _smallest_first(
            decodes + _with_groups([key for key in decodes if key.num_decodes in every_second])
        ),
        GraphKind.WITH_PROMPTS: _smallest_first(
            with_prompts + _with_groups([*of_most_decodes.values()])
        ),
    }


def _with_groups(keys: list[GraphKey]) -> list[GraphKey]:
    """The same with groups, where there can be any."""
    return [replace(key, has_groups=True) for key in keys if key.num_decodes >= FEWEST_IN_GROUP]


def _decode_keys(sizes: list[int]) -> list[GraphKey]:
    return [GraphKey(num_tokens=size, num_decodes=size) for size in sizes]


def _keys_with_prompts(max_decodes: int, max_tokens: int) -> list[GraphKey]:
    keys = [GraphKey(size, 0, 1) for size in _LONE_SIZES if size <= max_tokens]
    fewest_decodes = 1
    for num_decodes in _up_to(max_decodes, [*_DECODES_BESIDE_PROMPTS, max_decodes]):
        fewest = max(num_decodes, fewest_decodes + _MIN_PROMPT_TOKENS)
        sizes = _STEP_SIZES + _LONG_STEP_SIZES if num_decodes == max_decodes else _STEP_SIZES
        sizes = [size for size in sizes if fewest <= size <= max_tokens]
        keys += [GraphKey(size, num_decodes, _most_prompts(size)) for size in sizes]
        fewest_decodes = num_decodes + 1
    return _smallest_first(keys)


def _most_prompts(num_tokens: int) -> int:
    return _FEW_PROMPTS if num_tokens <= _FEW_TOKENS else MAX_PROMPTS


def _smallest_first(keys: list[GraphKey]) -> list[GraphKey]:
    return sorted(keys, key=lambda key: (key.num_tokens, key.num_decodes, key.has_groups))


def cpu_graph_keys(max_decodes: int, max_tokens: int, most_of_kernel: int) -> GraphKeys:
    """The sizes that a CPU captures: few tokens. With more, the work far outweighs its calls.

    Beside many decodes there are steps with prompts only if a compiled kernel multiplies as many
    tokens as the bound of a step allows there. Smaller chunks would not keep up with prompts.

    Args:
        max_tokens: of a request; padding stands in the row of one.
        most_of_kernel: tokens that a compiled kernel multiplies.
    """
    with_prompts: list[GraphKey] = []
    fewest_decodes = 0
    for num_decodes in _up_to(max_decodes, _CPU_DECODES_BESIDE_PROMPTS):
        num_prompts = _MAX_CPU_PROMPTS if num_decodes else 1
        fewest = max(num_decodes, fewest_decodes + _CPU_STEP_SIZES[0])
        most = num_decodes + max(_CPU_PROMPT_TOKENS, 2 * num_decodes)
        if most > most_of_kernel:
            break
        most = min(most, max_tokens)
        sizes = [size for size in _CPU_STEP_SIZES if fewest <= size <= most]
        with_prompts += [GraphKey(size, num_decodes, num_prompts) for size in sizes]
        fewest_decodes = num_decodes + 1
    return {
        GraphKind.DECODES: _decode_keys(_up_to(max_decodes, _CPU_DECODES)),
        GraphKind.WITH_PROMPTS: _smallest_first(with_prompts),
    }


def _up_to(most: int, sizes: list[int]) -> list[int]:
    """The sizes that are not larger, and the largest possible one."""
    return sorted({min(size, most) for size in sizes})


def size_ladder(largest: int) -> list[int]:
    """1, 2, 4, multiples of 8 to 256, then multiples of 32, and the largest."""
    steps = itertools.chain((1, 2, 4), range(8, 256, 8), range(256, largest, 32))
    return [*(size for size in steps if size < largest), largest]


def some_keys(keys: list[GraphKey]) -> list[GraphKey]:
    """The smallest, one in the middle, and the last two: the largest without and with groups."""
    chosen = {0, len(keys) // 2, len(keys) - 2, len(keys) - 1}
    return [key for i, key in enumerate(keys) if i in chosen]
