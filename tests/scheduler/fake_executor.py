"""An executor whose KV cache holds fingerprints of token prefixes in place of keys and values.

The KV of a position depends on all tokens up to it, and so does its fingerprint. When all slices of
a step are written the executor reads back every position of their requests through the page table,
as attention does: pages that were reused wrongly, given away too early or overwritten show at once.
The next token is a function of the fingerprint, so the answer to a request is known beforehand
(`reference_answer`) and does not depend on the schedule.
"""

# Dimensions: L positions of a sequence, P pages, R rows of the tables, S kv slots.

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
from minisgl.engine import EngineLimits, SampledStep
from tests.scheduler.script import Script

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
    """What a request must be answered, whatever runs beside it.

    A grammar is one of `tests/scheduler/script.py`: it ends the answer after some tokens.
    """
    room = limits.max_seq_len - len(prompt)
    if params.max_tokens is not None:
        room = min(room, params.max_tokens)
    prefix = fingerprints(prompt)[-1]
    answer: list[int] = []
    while len(answer) < room:
        answer.append(next_token(prefix, limits.vocab_size))
        if answer[-1] in params.stop_token_ids:
            return answer, "stop"
        if answer[-1] in limits.eos_ids and not params.ignore_eos:
            return answer, "stop"
        if params.grammar and len(answer) == Script.of(params.grammar).num_tokens:
            return answer, "stop"
        prefix = fingerprint(prefix, answer[-1])
    return answer, "length"


def endless_answer(prompt: list[int], num_tokens: int, vocab_size: int) -> list[int]:
    """Prompt and answer, num_tokens in all, as if no token ended it."""
    tokens = list(prompt)
    prefix = fingerprints(prompt)[-1]
    while len(tokens) < num_tokens:
        tokens.append(next_token(prefix, vocab_size))
        prefix = fingerprint(prefix, tokens[-1])
    return tokens


@dataclass(frozen=True)
class LaunchedSlice:
    """A slice, and where its request stood when it was launched."""

    req_slice: ReqSlice
    scores_prompt: bool
    row: int
    pages: NDArray[np.int32]


@dataclass(frozen=True)
class FakeStep:
    """A prepared or launched step; the executor is a rank that chooses no tokens from logits."""

    plan: BatchPlan


class FakeSampledStep(SampledStep):
    """Tokens that exist once they are computed: at `wait`, or when the next plan is launched."""

    def __init__(self, executor: FakeExecutor, launched: list[LaunchedSlice]) -> None:
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
            index: bytes([entry.req_slice.end])
            for index, entry in enumerate(self.launched)
            if _ends_embedded_prompt(entry.req_slice)
        }

    def prompt_logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """The log probability of a prompt's token is that token, and its position the likeliest."""
        return {
            index: _scores(entry.req_slice)
            for index, entry in enumerate(self.launched)
            if entry.scores_prompt
        }

    def wait(self) -> list[int]:
        self.compute()
        assert self._tokens is not None
        self._executor.check_still_held(self.launched)
        return self._tokens


class FakeExecutor:
    """Asserts, at each launch, all that an engine takes for granted.

    Args:
        asynchronous: compute nothing at launch, like a device that is always late. Results then
            exist in device order only: before the next launched plan, or when they are waited for.
    """

    def __init__(self, limits: EngineLimits, num_rows: int, *, asynchronous: bool = False) -> None:
        pages_per_row = -(-limits.max_seq_len // limits.page_size)
        self.limits = replace(limits, num_rows=num_rows)
        self.page_table_RP = np.full((num_rows, pages_per_row), GARBAGE, dtype=np.int32)
        self.token_pool_RL = np.full((num_rows, limits.num_row_tokens), GARBAGE, dtype=np.int32)
        self.kv_S: Fingerprints = np.full(
            limits.num_pages * limits.page_size, GARBAGE, dtype=np.int64
        )
        self.grammar_masks = np.empty((num_rows, 1), dtype=np.int32)
        self.plans: list[list[tuple[int, int, int, bool]]] = []
        self.num_grouped = 0  # decodes that were in groups, in all plans
        self._asynchronous = asynchronous
        self._newest: FakeSampledStep | None = None
        self._truth: dict[int, Fingerprints] = {}

    def unpadded_prompt_sizes(self, num_decodes: int) -> list[int]:
        return []

    def prepare(self, plan: BatchPlan) -> FakeStep:
        _check_plan(plan)
        return FakeStep(plan)

    def launch(self, prepared: FakeStep) -> FakeStep:
        plan = prepared.plan
        if self._newest:
            self._newest.compute()
        self.plans.append(
            [
                (req_slice.req.uid, req_slice.start, req_slice.end, req_slice.samples)
                for req_slice in plan.slices
            ]
        )
        self._write_tables(plan.writes)
        self._check_groups(plan)
        self._newest = FakeSampledStep(
            self, [self._remember(req_slice) for req_slice in plan.slices]
        )
        if not self._asynchronous:
            self._newest.compute()
        return prepared

    def sample(self, launched: FakeStep) -> FakeSampledStep:
        assert self._newest is not None
        assert [entry.req_slice for entry in self._newest.launched] == launched.plan.slices
        return self._newest

    def _write_tables(self, writes: TableWrites) -> None:
        for table, index, values in (
            (self.page_table_RP, writes.page_index, writes.pages),
            (self.token_pool_RL, writes.token_index, writes.tokens),
        ):
            assert len(set(index.tolist())) == len(index), "an index is written twice, in no order"
            table.reshape(-1)[index] = values
        for copy in writes.copies:
            num_pages = copy.num_tokens // self.limits.page_size
            self.page_table_RP[copy.target, :num_pages] = self.page_table_RP[
                copy.source, :num_pages
            ]
            tokens = slice(0, copy.num_tokens)
            self.token_pool_RL[copy.target, tokens] = self.token_pool_RL[copy.source, tokens]

    def _check_groups(self, plan: BatchPlan) -> None:
        """Decodes have in common what a plan says, in whole pages that are computed."""
        members = [member for group in plan.prefix_groups for member in group.members]
        assert len(members) == len(set(members))
        assert all(member < plan.num_decodes for member in members)
        for group in plan.prefix_groups:
            num_pages, rest = divmod(group.num_tokens, self.limits.page_size)
            assert num_pages > 0
            assert rest == 0
            decodes = [plan.slices[member] for member in group.members]
            rows = [self.page_table_RP[decode.row, :num_pages].tolist() for decode in decodes]
            assert all(row == rows[0] for row in rows)
            assert all(group.num_tokens <= decode.start for decode in decodes)
        self.num_grouped += len(members)

    def forget(self, pages: NDArray[np.int32]) -> None:
        """Overwrite the KV of pages that nobody holds, so that whoever reads them is found out."""
        self.kv_S.reshape(-1, self.limits.page_size)[pages] = GARBAGE

    def compute(self, launched: list[LaunchedSlice]) -> list[int]:
        """Like a layer: all slices write their KV, then each reads its own and what is before."""
        prefixes = [self._store(entry) for entry in launched]
        for entry in launched:
            self._check_kv(entry, entry.req_slice.end)
        tokens = []
        for entry, prefix in zip(launched, prefixes, strict=True):
            if entry.req_slice.samples:
                tokens.append(next_token(prefix, self.limits.vocab_size))
                self._write_token(entry, tokens[-1])
        return tokens

    def check_still_held(self, launched: list[LaunchedSlice]) -> None:
        """Until a plan is finished its requests keep their rows, and the rows keep their pages."""
        for entry in launched:
            assert entry.req_slice.req.row == entry.row, (
                f"{entry.req_slice.req} was released while a launched step refers to it"
            )
            now = self.page_table_RP[entry.row, : len(entry.pages)]
            assert np.array_equal(now, entry.pages), (
                f"{entry.req_slice.req} was remapped while a launched step refers to it"
            )

    def _remember(self, req_slice: ReqSlice) -> LaunchedSlice:
        row = req_slice.req.row
        assert row is not None
        num_pages = -(-req_slice.end // self.limits.page_size)
        return LaunchedSlice(
            req_slice, req_slice.scores_prompt, row, self.page_table_RP[row, :num_pages].copy()
        )

    def _store(self, entry: LaunchedSlice) -> int:
        """Write a slice's KV; the fingerprint of its last position."""
        start = entry.req_slice.start
        end = entry.req_slice.end
        tokens = self.token_pool_RL[entry.row, start:end].tolist()
        slots = self._slots(entry, end)
        before = int(self.kv_S[slots[start - 1]]) if start else EMPTY_PREFIX
        new = fingerprints(tokens, before)
        self.kv_S[slots[start:]] = new
        return new[-1]

    def _write_token(self, entry: LaunchedSlice, token: int) -> None:
        assert entry.req_slice.end < self.limits.num_row_tokens, (
            f"{entry.req_slice.req} has no room for another token"
        )
        self.token_pool_RL[entry.row, entry.req_slice.end] = token

    def _check_kv(self, entry: LaunchedSlice, end: int) -> None:
        kv = self.kv_S[self._slots(entry, end)]
        wrong = np.flatnonzero(kv != self._truth_of(entry.req_slice.req)[:end])
        assert len(wrong) == 0, (
            f"{entry.req_slice.req} reads wrong KV at positions {wrong.tolist()} of {end}"
        )

    def _slots(self, entry: LaunchedSlice, end: int) -> NDArray[np.int64]:
        position = np.arange(end)
        pages = self.page_table_RP[entry.row, position // self.limits.page_size]
        assert (pages >= 0).all(), f"{entry.req_slice.req} has no page for a position below {end}"
        return pages.astype(np.int64) * self.limits.page_size + position % self.limits.page_size

    def _truth_of(self, req: Req) -> Fingerprints:
        """The fingerprint of every position a request may reach; from its prompt alone."""
        if req.uid not in self._truth:
            prompt = req.tokens[: req.num_prompt].tolist()
            tokens = endless_answer(prompt, self.limits.max_seq_len, self.limits.vocab_size)
            self._truth[req.uid] = np.array(fingerprints(tokens), dtype=np.int64)
        return self._truth[req.uid]


def _ends_embedded_prompt(req_slice: ReqSlice) -> bool:
    return (
        req_slice.req.params.embeds
        and req_slice.samples
        and req_slice.end == req_slice.req.num_prompt
    )


def _scores(req_slice: ReqSlice) -> list[TokenLogprobs]:
    positions = range(req_slice.start + 1, min(req_slice.end + 1, req_slice.req.num_prompt))
    return [TokenLogprobs(float(req_slice.req.tokens[i]), [(i, 0.0)]) for i in positions]


def _check_plan(plan: BatchPlan) -> None:
    assert plan.slices, "an empty plan was launched"
    uids = [req_slice.req.uid for req_slice in plan.slices]
    assert len(uids) == len(set(uids)), f"a request stands in the plan twice: {uids}"
    for req_slice in plan.slices:
        req = req_slice.req
        assert req.finish is None, f"{req} has ended and is planned"
        assert req.num_computed == req_slice.start < req_slice.end <= req.num_tokens, (
            f"{req} cannot compute {req_slice}"
        )
        assert req_slice.samples == (req_slice.end == req.num_tokens), (
            f"{req}: {req_slice} must sample if it is the last"
        )
