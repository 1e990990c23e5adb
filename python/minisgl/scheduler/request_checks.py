"""Which requests are refused, because they can never be served."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minisgl.core import IntArray, SamplingParams
from minisgl.engine import EngineLimits
from minisgl.errors import InvalidRequest, PromptTooLong


def check_request(prompt: IntArray, params: SamplingParams, limits: EngineLimits) -> int:
    """Check a request; return how many tokens its prompt and answer may have together.

    Raises:
        RequestError: it can never be served.
    """
    for name in ("logit_bias", "stop_token_ids"):
        ids = getattr(params, name)
        if ids:
            _check_ids(name, np.fromiter(ids, dtype=np.int64), limits.vocab_size)
    if len(prompt) == 0:
        raise InvalidRequest("the prompt is empty: it must have at least 1 token")
    _check_ids(None, prompt, limits.vocab_size)
    limit = limits.max_seq_len
    num_answer = params.max_tokens
    by_min_tokens = num_answer is None and params.min_tokens > 1
    if num_answer is None:
        num_answer = max(1, params.min_tokens)
    if len(prompt) + num_answer > limit:
        raise PromptTooLong.of_tokens(
            len(prompt), num_answer, limit, by_min_tokens=by_min_tokens, reason=_reason(limits)
        )
    return limit if params.max_tokens is None else len(prompt) + params.max_tokens


def _reason(limits: EngineLimits) -> str | None:
    """Why the context is shorter than the model's or --max-seq-len, if it is."""
    if not limits.is_pool_shorter:
        return None
    return (
        f"The KV cache bounds it: {limits.num_pages} pages (--num-pages) of {limits.page_size} "
        "tokens"
    )


def _check_ids(param: str | None, ids: NDArray[np.integer], vocab_size: int) -> None:
    if ids.min() < 0 or ids.max() >= vocab_size:
        is_bad = (ids < 0) | (ids >= vocab_size)
        raise InvalidRequest(f"token id {ids[is_bad][0]} is outside [0, {vocab_size})", param=param)
