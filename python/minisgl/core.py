"""The words of the engine: what a request asks, what it is, and what one step computes.

Owns no tensors beyond those of a `Batch`, and knows nothing of pages, processes or models. Imports nothing
of the package but the errors. Next to read: `errors.py`, then `llm/llm.py`.

    Req        tokens of one request on the host, and how far it has come
    ReqSlice   the positions [start, end) of one request
    BatchPlan  what one step computes, decided on the host: slices of prompts and of answers, mixed
    Batch      the same, as tensors on the device
    Context    what the layers of a model reach besides their weights
"""

# Dimension key: T tokens in the batch, B requests that sample, R table rows, L positions, P pages.

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from minisgl.errors import InvalidRequest

if TYPE_CHECKING:  # names for the type checker; at run time core imports nothing from above
    from minisgl.attention.base import BaseAttnBackend, BaseAttnMetadata
    from minisgl.kvcache.base import BaseKVCachePool
    from minisgl.moe.base import BaseMoeBackend

__all__ = [
    "Batch",
    "BatchPlan",
    "Context",
    "FinishReason",
    "Grammar",
    "IntArray",
    "Req",
    "ReqSlice",
    "SamplingParams",
    "TableWrites",
    "TokenLogprobs",
]

IntArray = NDArray[np.int32]
FinishReason = Literal["stop", "length", "abort"]
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
MAX_GRAMMAR = 2**18


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to match from its first character to its last.

    Attributes:
        text: a JSON schema, a regular expression in Rust's syntax, or llguidance's variant of a Lark grammar; at most
            262,144 characters.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token of a request.

    The filters apply in the order temperature, top_k, top_p, min_p; ties at a border are kept.

    Attributes:
        max_tokens: tokens to generate at most; None means up to the end of the context. With 0 the prompt is computed
            and nothing else.
        temperature: 0 is greedy; else logits are divided by it. In [0, 100].
        top_k: keep the k most likely tokens, >= 1; None keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches top_p, in (0, 1].
        min_p: keep tokens at least min_p times as likely as the likeliest, in [0, 1].
        seed: the token at a position depends on its logits, the seed and the position only; None draws one.
        ignore_eos: go on past an end-of-sequence token.
        min_tokens: no end-of-sequence token and none of `stop_token_ids` before so many, in [0, max_tokens].
        stop: texts that end the answer, which stops in front of them; at most 32 of 1 to 1024 characters.
        stop_token_ids: tokens that do; at most 32.
        include_stop_str_in_output: the answer stops behind the text that ended it.
        skip_special_tokens: leave tokens such as end-of-sequence out of the text.
        presence_penalty: taken off the logit of every token in the answer so far, in [-2, 2].
        frequency_penalty: the same, times how often it is there, in [-2, 2].
        repetition_penalty: positive logits of tokens in prompt or answer are divided by it, negative ones multiplied
            (Keskar et al. 2019, arXiv:1909.05858); in (0, 10], 1 changes nothing.
        logit_bias: token id to what is added to its logit, in [-100, 100]; at most 1024 ids.
        logprobs: also tell the log probability of each token and of so many of the likeliest, in [0, 20]; None: do not.
            They are the model's own, before temperature, penalties, filters and grammar.
        prompt_logprobs: the same for each token of the prompt but the first. Nothing of it is taken from a cache then.
        priority: a request with a smaller one is computed first and keeps its pages longer; 32 bits, may be negative.
        grammar: only tokens that continue a match are chosen, and the answer ends where the match does.

    The order is: bias and penalties, then temperature, then filters.

    Raises:
        InvalidRequest: a value is outside its bounds.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _require(
            "max_tokens",
            self.max_tokens,
            self.max_tokens is None or 0 <= self.max_tokens <= MAX_COUNT,
            f"in [0, {MAX_COUNT}]",
        )
        _require("temperature", self.temperature, 0 <= self.temperature <= 100, "in [0, 100]")
        _require(
            "top_k",
            self.top_k,
            self.top_k is None or 1 <= self.top_k <= MAX_COUNT,
            f"in [1, {MAX_COUNT}], or absent for all",
        )
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        _require("seed", self.seed, self.seed is None or abs(self.seed) <= MAX_SEED, "a 64-bit integer")
        most = MAX_COUNT if self.max_tokens is None else self.max_tokens
        _require("min_tokens", self.min_tokens, 0 <= self.min_tokens <= most, f"in [0, {most}]")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(name, getattr(self, name), abs(getattr(self, name)) <= 2, "in [-2, 2]")
        _require("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty <= 10, "in (0, 10]")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(name, count, count is None or 0 <= count <= 20, "in [0, 20], or absent")
        _require("priority", self.priority, abs(self.priority) <= MAX_COUNT, f"in [-{MAX_COUNT}, {MAX_COUNT}]")
        for name, count, bound in (("stop", len(self.stop), 32), ("stop_token_ids", len(self.stop_token_ids), 32)):
            _require(f"the number of {name}", count, count <= bound, f"at most {bound}", name)
        for text in self.stop:
            _require("the length of a stop text", len(text), 1 <= len(text) <= 1024, "in [1, 1024]", "stop")
        _require(
            "the size of logit_bias", len(self.logit_bias), len(self.logit_bias) <= 1024, "at most 1024", "logit_bias"
        )
        if self.grammar is not None:
            size = len(self.grammar.text)
            _require("the length of the grammar", size, size <= MAX_GRAMMAR, f"at most {MAX_GRAMMAR}", "grammar")
        for name, tokens in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token in tokens:
                _require(f"a token id of {name}", token, 0 <= token <= MAX_COUNT, f"in [0, {MAX_COUNT}]", name)
        for token, bias in self.logit_bias.items():
            _require(f"logit_bias of {token}", bias, abs(bias) <= 100, "in [-100, 100]", "logit_bias")

    @property
    def shapes_text(self) -> bool:
        """Whether the detokenizer has to know."""
        return bool(self.stop) or not self.skip_special_tokens

    @property
    def changes_logits(self) -> bool:
        """Whether there are penalties or a bias."""
        is_neutral = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) == (0, 0, 1)
        return not is_neutral or bool(self.logit_bias)


def _require(name: str, value: float | None, holds: bool, bound: str, param: str | None = None) -> None:
    if not holds or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidRequest(f"{name} must be {bound}, got {value}", param=param or name)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probability of a token; ids and log probabilities of the likeliest, the likeliest first."""

    own: float
    top: list[tuple[int, float]]


class Req:
    """One request: its tokens on the host and how far it has come.

        0 ............ num_computed ......... num_known ......... num_tokens
        KV is written, or    to be computed    on the host        sampled by a launched
        a launched batch                                          batch, still on the device
        will write it

    A step computes [num_computed, end); if end reaches num_tokens it also samples one token. A prompt and an
    answer are therefore the same thing, and so is a request that lost its pages and starts over.

    Attributes:
        tokens: int32, capacity for prompt and answer; valid up to num_known.
        num_cached: leading tokens that the prefix cache supplied at the first admission.
        prompt_logprobs: as far as they have come; that of position i + 1 is at i.
        row: row of the page table and token pool while admitted, else None.
        num_in_flight: launched and unfinished batches that refer to this request; its row and pages may be
            released only at zero.
        finish: why it ended, None while it runs. Set once.
    """

    __slots__ = (
        "finish",
        "num_cached",
        "num_computed",
        "num_in_flight",
        "num_known",
        "num_prompt",
        "num_tokens",
        "params",
        "prompt_logprobs",
        "row",
        "seed",
        "tokens",
        "uid",
    )

    def __init__(self, uid: int, prompt: IntArray, params: SamplingParams, max_length: int, seed: int) -> None:
        self.uid = uid
        self.params = params
        self.seed = seed
        self.tokens: IntArray = np.empty(max_length, dtype=np.int32)
        self.tokens[: len(prompt)] = prompt
        self.num_prompt = self.num_known = self.num_tokens = len(prompt)
        self.num_computed = 0
        self.num_cached: int | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.row: int | None = None
        self.num_in_flight = 0
        self.finish: FinishReason | None = None

    @property
    def max_length(self) -> int:
        return len(self.tokens)

    @property
    def is_full(self) -> bool:
        """Whether every token it may have is known or being computed."""
        return self.num_tokens >= self.max_length

    @property
    def asks_of_prompt(self) -> bool:
        return self.params.prompt_logprobs is not None

    @property
    def scores(self) -> bool:
        """Whether log probabilities of its prompt are still to be computed; they are told with the first token."""
        return self.params.prompt_logprobs is not None and self.num_known == self.num_prompt

    @property
    def num_output(self) -> int:
        return self.num_known - self.num_prompt

    def append(self, token: int) -> None:
        """Take the oldest token that a launched batch sampled; it is on the host now."""
        assert self.num_known < self.num_tokens
        self.tokens[self.num_known] = token
        self.num_known += 1

    def __repr__(self) -> str:
        return (
            f"Req(uid={self.uid}, computed={self.num_computed}, known={self.num_known}, "
            f"tokens={self.num_tokens}/{self.max_length}, row={self.row}, finish={self.finish})"
        )


@dataclass(frozen=True, slots=True)
class ReqSlice:
    """Positions [start, end) of a request; `samples` if they reach its last token."""

    req: Req
    start: int
    end: int
    samples: bool

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def num_wanted(self) -> int:
        """Tokens at its end whose hidden states are wanted."""
        return len(self) if self.req.scores else int(self.samples)

    @property
    def row(self) -> int:
        """Of the tables; a slice is of an admitted request."""
        assert self.req.row is not None
        return self.req.row


@dataclass(frozen=True, slots=True)
class TableWrites:
    """What the host changes in the device's tables before a step: flat int32 indices, each at most once, and values."""

    page_index: IntArray
    pages: IntArray
    token_index: IntArray
    tokens: IntArray


NO_WRITES = TableWrites(*[np.empty(0, dtype=np.int32)] * 4)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What one step computes, and what it needs to be told first. A request stands in it at most once.

    Attributes:
        num_shared: leading tokens whose pages all slices have in common; a multiple of the page size.
    """

    slices: list[ReqSlice]
    writes: TableWrites = NO_WRITES
    num_shared: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.slices))

    @property
    def num_decodes(self) -> int:
        """Slices of one token at the head; the scheduler puts the answers of running requests there."""
        return next((i for i, part in enumerate(self.slices) if len(part) > 1), len(self.slices))

    @property
    def sampling(self) -> list[ReqSlice]:
        return [s for s in self.slices if s.samples]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, ready for the device.

    Attributes:
        row_T, position_T: integers; where in the tables each token stands.
        input_ids_T: int64.
        slot_T: int64, where the KV of each token goes.
        last_B: int64, index into T of the last token of each slice that samples, and of all tokens of those that score
            their prompt; None if all tokens are such.
        attn_metadata: made by the attention backend from the plan.
    """

    row_T: Tensor
    position_T: Tensor
    input_ids_T: Tensor
    slot_T: Tensor
    last_B: Tensor | None
    attn_metadata: BaseAttnMetadata


@dataclass(frozen=True, slots=True)
class Context:
    """What the layers of one rank share besides their weights.

    Attributes:
        page_table_RP: int32, page that holds positions [p * page_size, (p + 1) * page_size) of a row.
        token_pool_RL: int32, the tokens of a row; where a step finds what the step before it sampled.
    """

    page_table_RP: Tensor
    token_pool_RL: Tensor
    kv_pool: BaseKVCachePool
    attn_backend: BaseAttnBackend
    moe_backend: BaseMoeBackend
