"""An executor whose KV cache holds fingerprints of token prefixes in place of keys and values.

The KV of a position depends on all tokens up to it, and so does its fingerprint. Before a slice is computed the
executor reads back every earlier position of its request through the page table, as attention does: pages that were
shared wrongly, given away too early or overwritten show at once. The next token is a function of the fingerprint, so
what a request must answer is known beforehand (`reference_answer`) and does not depend on the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from minisgl.core import (
    BatchPlan,
    FinishReason,
    Req,
    ReqSlice,
    SamplingParams,
    TableWrites,
    TokenLogprobs,
)
from minisgl.engine import EngineLimits, ForwardOutput

Fingerprints = NDArray[np.int64]
EMPTY_PREFIX = 1
GARBAGE = -1
_MODULUS = 2**61 - 1


def fingerprint(prefix: int, token: int) -> int:
    """Of a sequence of tokens, given that of the sequence without its last token."""
    return (prefix * 6364136223846793005 + token + 1442695040888963407) % _MODULUS


def next_token(prefix: int, vocab_size: int) -> int:
    return (prefix >> 11) % vocab_size


def fingerprints(tokens: list[int], prefix: int = EMPTY_PREFIX) -> list[int]:
    """One for each position, going on from `prefix`."""
    result = []
    for token in tokens:
        prefix = fingerprint(prefix, token)
        result.append(prefix)
    return result


def reference_answer(
    prompt: list[int], params: SamplingParams, limits: EngineLimits
) -> tuple[list[int], FinishReason]:
    """What a request must be answered, whatever runs beside it."""
    room = limits.max_seq_len - len(prompt)
    prefix, answer = fingerprints(prompt)[-1], list[int]()
    while len(answer) < min(room, room if params.max_tokens is None else params.max_tokens):
        answer.append(next_token(prefix, limits.vocab_size))
        if answer[-1] in limits.eos_ids and not params.ignore_eos:
            return answer, "stop"
        prefix = fingerprint(prefix, answer[-1])
    return answer, "length"


def endless_answer(prompt: list[int], num_tokens: int, vocab_size: int) -> list[int]:
    """Prompt and answer, num_tokens in all, as if no token ended it."""
    tokens, prefix = list(prompt), fingerprints(prompt)[-1]
    while len(tokens) < num_tokens:
        tokens.append(next_token(prefix, vocab_size))
        prefix = fingerprint(prefix, tokens[-1])
    return tokens


@dataclass(frozen=True)
class _Launched:
    """A slice, and where its request stood when it was launched."""

    part: ReqSlice
    scores_prompt: bool
    row: int
    pages: NDArray[np.int32]


@dataclass(frozen=True)
class FakeStep:
    """A prepared or launched step; the executor is a rank that chooses no tokens from logits."""

    plan: BatchPlan
    has_logits: bool = False


class FakeOutput(ForwardOutput):
    """Tokens that exist once they are computed: at `wait`, or when the next plan is launched."""

    def __init__(self, executor: FakeExecutor, launched: list[_Launched]) -> None:
        self._executor = executor
        self.launched = launched
        self._tokens: list[int] | None = None

    def compute(self) -> None:
        if self._tokens is None:
            self._executor.check_still_held(self.launched)
            self._tokens = self._executor.compute(self.launched)

    def logprobs(self) -> dict[int, TokenLogprobs]:
        return {}

    def embeddings(self) -> dict[int, bytes]:
        """The vector of a prompt is its length."""
        return {
            index: bytes([it.part.end])
            for index, it in enumerate(self.launched)
            if it.part.req.params.embeds
            and it.part.samples
            and it.part.end == it.part.req.num_prompt
        }

    def prompt_logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """The log probability of a prompt's token is that token, and its position the likeliest."""
        return {
            index: [
                TokenLogprobs(float(it.part.req.tokens[i + 1]), [(i + 1, 0.0)])
                for i in range(it.part.start, min(it.part.end, it.part.req.num_prompt - 1))
            ]
            for index, it in enumerate(self.launched)
            if it.scores_prompt
        }

    def wait(self) -> list[list[int]]:
        self.compute()
        assert self._tokens is not None
        self._executor.check_still_held(self.launched)
        return [[token] for token in self._tokens]


class FakeExecutor:
    """Asserts, at each launch, all that an engine takes for granted.

    Args:
        asynchronous: compute nothing at launch, like a device that is always late; results then exist in device order
            only: before the next launched plan, or once somebody waits.
    """

    def __init__(self, limits: EngineLimits, num_rows: int, *, asynchronous: bool = False) -> None:
        pages_per_row = -(-limits.max_seq_len // limits.page_size)
        self.limits = replace(limits, num_rows=num_rows)
        self.page_table_RP = np.full((num_rows, pages_per_row), GARBAGE, dtype=np.int32)
        self.token_pool_RL = np.full((num_rows, limits.max_seq_len), GARBAGE, dtype=np.int32)
        self.kv_S: Fingerprints = np.full(
            limits.num_pages * limits.page_size, GARBAGE, dtype=np.int64
        )
        self.grammar_masks = np.empty((num_rows, 1), dtype=np.int32)
        self.plans: list[list[tuple[int, int, int, bool]]] = []
        self._asynchronous = asynchronous
        self._newest: FakeOutput | None = None
        self._truth: dict[int, Fingerprints] = {}

    def prepare(self, plan: BatchPlan) -> FakeStep:
        _check_plan(plan)
        return FakeStep(plan)

    def launch(self, prepared: FakeStep) -> FakeStep:
        plan = prepared.plan
        if self._newest:
            self._newest.compute()
        self.plans.append(
            [(part.req.uid, part.start, part.end, part.samples) for part in plan.slices]
        )
        self._write_tables(plan.writes)
        self._check_shared(plan)
        self._newest = FakeOutput(self, [self._remember(part) for part in plan.slices])
        if not self._asynchronous:
            self._newest.compute()
        return prepared

    def sample(self, launched: FakeStep) -> FakeOutput:
        assert self._newest is not None
        assert [it.part for it in self._newest.launched] == launched.plan.slices
        return self._newest

    def _write_tables(self, writes: TableWrites) -> None:
        for table, index, values in (
            (self.page_table_RP, writes.page_index, writes.pages),
            (self.token_pool_RL, writes.token_index, writes.tokens),
        ):
            assert len(set(index.tolist())) == len(index), "a place is written twice, in no order"
            table.reshape(-1)[index] = values

    def _check_shared(self, plan: BatchPlan) -> None:
        """What a plan says all slices have in common, they have, in whole pages that are computed."""
        num_pages = plan.num_shared_tokens // self.limits.page_size
        rows = [self.page_table_RP[part.row, :num_pages].tolist() for part in plan.slices]
        assert all(row == rows[0] for row in rows)
        assert all(plan.num_shared_tokens <= part.start for part in plan.slices)

    def forget(self, pages: NDArray[np.int32]) -> None:
        """Overwrite the KV of pages that nobody holds, so that whoever reads them is found out."""
        self.kv_S.reshape(-1, self.limits.page_size)[pages] = GARBAGE

    def compute(self, launched: list[_Launched]) -> list[int]:
        for it in launched:
            self._check_kv(it, it.part.start)
        prefixes = [self._store(it) for it in launched]
        for it in launched:
            self._check_kv(it, it.part.end)
        tokens = []
        for it, prefix in zip(launched, prefixes, strict=True):
            if it.part.samples:
                tokens.append(next_token(prefix, self.limits.vocab_size))
                self._write_token(it, tokens[-1])
        return tokens

    def check_still_held(self, launched: list[_Launched]) -> None:
        """Until a plan is finished its requests keep their rows, and the rows keep their pages."""
        for it in launched:
            assert it.part.req.row == it.row, (
                f"{it.part.req} was released while a launched batch refers to it"
            )
            now = self.page_table_RP[it.row, : len(it.pages)]
            assert np.array_equal(now, it.pages), (
                f"{it.part.req} was remapped while a launched batch refers to it"
            )

    def _remember(self, part: ReqSlice) -> _Launched:
        row = part.req.row
        assert row is not None
        num_pages = -(-part.end // self.limits.page_size)
        return _Launched(
            part, part.req.scores_prompt, row, self.page_table_RP[row, :num_pages].copy()
        )

    def _store(self, it: _Launched) -> int:
        """Write a slice's KV; the fingerprint of its last position."""
        tokens = self.token_pool_RL[it.row, it.part.start : it.part.end].tolist()
        slots = self._slots(it, it.part.end)
        before = int(self.kv_S[slots[it.part.start - 1]]) if it.part.start else EMPTY_PREFIX
        new = fingerprints(tokens, before)
        self.kv_S[slots[it.part.start :]] = new
        return new[-1]

    def _write_token(self, it: _Launched, token: int) -> None:
        assert it.part.end < self.limits.max_seq_len, (
            f"{it.part.req} has no place for another token"
        )
        self.token_pool_RL[it.row, it.part.end] = token

    def _check_kv(self, it: _Launched, end: int) -> None:
        kv = self.kv_S[self._slots(it, end)]
        wrong = np.flatnonzero(kv != self._truth_of(it.part.req)[:end])
        assert len(wrong) == 0, (
            f"{it.part.req} reads wrong KV at positions {wrong.tolist()} of {end}"
        )

    def _slots(self, it: _Launched, end: int) -> NDArray[np.int64]:
        position = np.arange(end)
        pages = self.page_table_RP[it.row, position // self.limits.page_size]
        assert (pages >= 0).all(), f"{it.part.req} has no page for a position below {end}"
        return pages.astype(np.int64) * self.limits.page_size + position % self.limits.page_size

    def _truth_of(self, req: Req) -> Fingerprints:
        """The fingerprint of every position a request may reach; from its prompt alone."""
        if req.uid not in self._truth:
            prompt = req.tokens[: req.num_prompt].tolist()
            tokens = endless_answer(prompt, self.limits.max_seq_len, self.limits.vocab_size)
            self._truth[req.uid] = np.array(fingerprints(tokens), dtype=np.int64)
        return self._truth[req.uid]


def _check_plan(plan: BatchPlan) -> None:
    assert plan.slices, "an empty plan was launched"
    uids = [part.req.uid for part in plan.slices]
    assert len(uids) == len(set(uids)), f"a request stands in the plan twice: {uids}"
    for part in plan.slices:
        req = part.req
        assert req.finish is None, f"{req} has ended and is planned"
        assert req.num_computed == part.start < part.end <= req.num_tokens, (
            f"{req} cannot compute {part}"
        )
        assert part.samples == (part.end == req.num_tokens), (
            f"{req}: {part} must sample if it is the last"
        )
