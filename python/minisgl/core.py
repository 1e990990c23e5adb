"""The words of the engine: a request, and what one step computes.

Owns no tensors beyond those of a `Batch`. Knows nothing of processes, models, or the allocation of
pages. The parameters of a request have a file of their own, `sampling_params.py`. Next to read:
`llm/llm.py`.

    Req        tokens of one request on the host, and how far it has come
    ReqSlice   the positions [start, end) of one request
    BatchPlan  what one step computes, decided on the host: slices of prompts and answers, each
               `PrefixGroup` of slices that share a prefix, and `TableWrites` that come before,
               of which some are `RowCopy`s
    Batch      a plan as tensors on the device, with the `Queries` of its layers

The dimension key of the package. A tensor's name ends in one letter per dimension, and a file
repeats the letters that it uses. A letter means the logical size, not a rank's shard; a digit is
that size itself.

    A  experts that a token chooses
    B  requests of a step, or of a captured graph
    C  candidates: the likeliest tokens
    D  model width
    E  experts
    F  mlp width
    G  query heads that share a kv head
    H  head width
    I  inputs of a linear layer
    J  pairs of a token and an expert it chose
    K  kv heads
    L  positions of a sequence
    M  all heads of a token: N + 2 K
    N  query heads
    O  outputs of a linear layer
    P  pages
    Q  positions of a page
    R  rows of the tables
    S  kv slots
    T  tokens of a step, or of a captured graph
    U  both halves of a gated mlp: 2 F
    V  vocabulary
    W  words of 32 bits
    X  a selection out of another dimension
    Y  tokens whose hidden states are returned
    Z  entries of a flat list
"""

# Dimensions: T tokens of a step, X a selection out of another dimension.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from minisgl.sampling_params import Grammar, SamplingParams, pack_sampling

# Names for the type checker: processes without torch import this module, too.
if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BaseAttnMetadata",
    "Batch",
    "BatchPlan",
    "FEWEST_IN_GROUP",
    "FinishReason",
    "Grammar",
    "IntArray",
    "NO_TOKEN",
    "NO_WRITES",
    "PrefixGroup",
    "Queries",
    "Req",
    "ReqSlice",
    "RowCopy",
    "SamplingParams",
    "TableWrites",
    "TokenLogprobs",
]

# A prefix that fewer decodes share is not worth another kernel. A request with `n` = 8 has so many.
FEWEST_IN_GROUP = 8
# In place of a sampled token, where no logit that may be chosen is a number.
NO_TOKEN = -1

IntArray = NDArray[np.int32]
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probability of a token, and the likeliest tokens with theirs, the likeliest first."""

    logprob: float
    top: list[tuple[int, float]]


class Req:
    """One request: its tokens on the host and how far it has come.

    Three numbers count its tokens:

        the host knows all tokens           0 ─── num_computed ─── num_known = num_tokens
        the device alone has the last one   0 ─── num_known = num_computed ─── num_tokens
        with overlap, the last two          0 ─── num_known ── num_computed ── num_tokens

    A step computes [num_computed, end); if end reaches num_tokens it also samples one token.
    Prompts, answers, requests that lost their pages and forced tokens are therefore computed alike.
    With overlap a step is launched while the token that it computes is known to the device only.
    Until the step before is read, num_computed is then larger than num_known.

    Attributes:
        num_computed: leading tokens whose KV is written, or will be by a launched step. It is
            smaller than num_tokens.
        num_known: leading tokens that the host has.
        num_tokens: those, and the tokens that launched steps sample, which the device has.
        tokens: int32, capacity for prompt and answer; valid up to num_known.
        sampling_record: its numbers in an item of `SAMPLING_DTYPE`; made once because every step
            needs them.
        needs_only_sampling: whether `sampling_record` says all about how its tokens are chosen, and
            it gets nothing else: no logprobs, no outputs about its prompt, no changed logits.
        num_cached: leading tokens that the prefix cache supplied at the first admission.
        prompt_logprobs: those that are computed so far; that of position i + 1 is at i.
        embedding: float32, little-endian; None until it is computed, and without `embeds`.
        row: row of the page table and token pool while admitted, else None.
        max_length: tokens that prompt and answer may have together.
        num_in_flight: launched and unfinished steps that refer to this request. Its row and pages
            may be released only when it is zero.
        queue_number: of requests of equal priority that wait, the smallest one goes first; set by
            the scheduler.
        finish: why it ended, None while it runs. Set once.
        is_cacheable: whether the prefix cache may keep what it has computed.
    """

    __slots__ = (
        "embedding",
        "finish",
        "is_cacheable",
        "max_length",
        "needs_only_sampling",
        "num_cached",
        "num_computed",
        "num_in_flight",
        "num_known",
        "num_prompt",
        "num_tokens",
        "params",
        "prompt_logprobs",
        "queue_number",
        "row",
        "sampling_record",
        "tokens",
        "uid",
    )

    def __init__(
        self, uid: int, prompt: IntArray, params: SamplingParams, max_length: int, seed: int
    ) -> None:
        self.uid = uid
        self.params = params
        self.sampling_record = pack_sampling(params, seed)
        self.needs_only_sampling = not (
            params.changes_logits
            or params.min_tokens
            or params.logprobs is not None
            or self.wants_prompt_outputs
        )
        self.max_length = max_length
        self.tokens: IntArray = np.empty(max_length, dtype=np.int32)
        self.tokens[: len(prompt)] = prompt
        self.num_prompt = self.num_known = self.num_tokens = len(prompt)
        self.num_computed = 0
        self.num_cached: int | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.embedding: bytes | None = None
        self.row: int | None = None
        self.num_in_flight = 0
        self.queue_number = 0
        self.finish: FinishReason | None = None
        self.is_cacheable = True

    @property
    def is_full(self) -> bool:
        """Whether every token it may have is known or being computed."""
        return self.num_tokens >= self.max_length

    @property
    def priority(self) -> int:
        """Requests with a smaller one are computed first and keep their pages longer."""
        return self.params.priority

    @property
    def namespace(self) -> str:
        """The namespace of its prefixes in the prefix cache: its cache salt, empty without one."""
        return self.params.cache_salt or ""

    @property
    def wants_prompt_outputs(self) -> bool:
        """Whether it gets outputs about its prompt: log probabilities or an embedding."""
        return self.params.prompt_logprobs is not None or self.params.embeds

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of its prompt are still to be computed.

        They are part of its first output.
        """
        return self.params.prompt_logprobs is not None and self.num_known == self.num_prompt

    @property
    def num_output(self) -> int:
        return self.num_known - self.num_prompt

    def append(self, token: int) -> None:
        """Append the oldest sampled token that the host did not have yet."""
        assert self.num_known < self.num_tokens
        self.tokens[self.num_known] = token
        self.num_known += 1

    def append_forced(self, tokens: Sequence[int]) -> None:
        """Append tokens that are known without being sampled.

        If a launched step already samples at the first of these positions, the token that it
        samples is dropped when it comes.
        """
        end = self.num_known + len(tokens)
        assert end <= self.max_length
        assert self.num_tokens <= self.num_known + 1
        self.tokens[self.num_known : end] = tokens
        self.num_known = end
        self.num_tokens = max(self.num_tokens, end)

    def __repr__(self) -> str:
        return (
            f"Req(uid={self.uid}, computed={self.num_computed}, known={self.num_known}, "
            f"tokens={self.num_tokens}/{self.max_length}, row={self.row}, finish={self.finish})"
        )


class ReqSlice(msgspec.Struct, gc=False):
    """Positions [start, end) of a request; `samples` if they reach its last token.

    Each step makes one per request, while the device may wait. Making a struct takes a quarter of
    the time of a dataclass. It is part of no cycle, so the garbage collector need not track it.
    """

    req: Req
    start: int
    end: int
    samples: bool

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def scores_prompt(self) -> bool:
        """Whether it gives log probabilities of its prompt: those of the tokens after its own."""
        return self.start + 1 < self.req.num_prompt and self.req.scores_prompt

    @property
    def last_token(self) -> ReqSlice:
        """Its last token as a slice of its own."""
        return ReqSlice(self.req, self.end - 1, self.end, self.samples)

    @property
    def row(self) -> int:
        """The row of the tables; a slice is of an admitted request."""
        assert self.req.row is not None
        return self.req.row


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Copy the first tokens of row `source`, and their pages, to row `target`."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TableWrites:
    """The host's changes of the device's tables before a step.

    All arrays are int32. An index is flat: it counts through the table row after row. No index
    occurs twice.

    Attributes:
        page_index, pages: where in the page table which pages are written.
        token_index, tokens: where in the token pool which tokens are written.
        copies: to be done after the other writes, in this order.
    """

    page_index: IntArray
    pages: IntArray
    token_index: IntArray
    tokens: IntArray
    copies: tuple[RowCopy, ...] = ()


_EMPTY: IntArray = np.empty(0, dtype=np.int32)
NO_WRITES = TableWrites(_EMPTY, _EMPTY, _EMPTY, _EMPTY)


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Decodes of a plan whose rows begin with the same pages, which no slice of it computes.

    Attributes:
        num_tokens: of the shared prefix; a multiple of the page size.
        members: the indices of the decodes in the plan, ascending; at least `FEWEST_IN_GROUP`.
    """

    num_tokens: int
    members: list[int]


@dataclass(frozen=True)
class BatchPlan:
    """What one step computes, and what is written to the tables first.

    A request stands in it at most once. Its decodes come first (`num_decodes`), then its prompts.
    A slice may read what slices before it compute, and nothing of those behind it: the order of
    prompts is that in which their prefixes are published. Properties are computed once, when they
    are first read; hence no `__slots__`.

    Attributes:
        prefix_groups: decodes that share a prefix, where that pays. None is in two groups, and some
            are in none.
    """

    slices: list[ReqSlice]
    writes: TableWrites = NO_WRITES
    prefix_groups: Sequence[PrefixGroup] = ()

    @cached_property
    def num_tokens(self) -> int:
        return sum(map(len, self.slices))

    @cached_property
    def num_decodes(self) -> int:
        """Leading slices of one token: those of running requests, and chunks of one token.

        A chunk of one token behind a longer one is a prompt: it may read all that the longer one
        computes, while a decode reads one token of the same step at most, beside its own (if pages
        have more than one). Kernels of decodes load older keys while those of the step are still
        written (`BalancedDecode.attend`).
        """
        longer = (i for i, req_slice in enumerate(self.slices) if len(req_slice) > 1)
        return next(longer, len(self.slices))

    @cached_property
    def sampling_slices(self) -> list[ReqSlice]:
        return [req_slice for req_slice in self.slices if req_slice.samples]

    @cached_property
    def returns_all(self) -> bool:
        """Whether the hidden states of all tokens are returned, because a prompt is scored."""
        return any(req_slice.scores_prompt for req_slice in self.slices)

    def num_returned(self, req_slice: ReqSlice) -> int:
        """Tokens at the end of a slice whose hidden states are returned."""
        return len(req_slice) if self.returns_all else int(req_slice.samples)


class BaseAttnMetadata:
    """Numbers that an attention backend computes once per step and reads in every layer.

    Each backend has its own fields.
    """


@dataclass(frozen=True, slots=True)
class Queries:
    """Tokens of a step that attend, each to its context up to itself.

    Attributes:
        row_X, position_X: int32; where in the tables each token stands.
        attn_metadata: made by the attention backend.
        index_X: integers, which of the step's tokens these are; None for all of them.
    """

    row_X: Tensor
    position_X: Tensor
    attn_metadata: BaseAttnMetadata
    index_X: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, ready for the device.

    Attributes:
        input_ids_T: int64.
        position_T: int32, of all tokens; those of `queries` are fewer in the last layer.
        slot_T: int64, where the KV of each token goes.
        queries: what attends: all tokens, and in the last layer those that are returned.
        returned: the tokens whose hidden states the model returns: the last token of each slice
            that samples, or any one if none does. None if it returns those of all tokens.
    """

    input_ids_T: Tensor
    position_T: Tensor
    slot_T: Tensor
    queries: Queries
    returned: Queries | None = None
