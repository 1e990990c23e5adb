"""Tokens that a grammar forces are appended without a step each, and no answer changes by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from minisgl.core import SamplingParams
from minisgl.scheduler.grammars.progress import MIN_FORCED_ON_CPU
from tests.scheduler.fake_executor import (
    FakeExecutor,
    LaunchedSlice,
    endless_answer,
    reference_answer,
)
from tests.scheduler.harness import EOS, VOCAB_SIZE, Host, exactly, make_limits
from tests.scheduler.script import Script
from tests.scheduler.test_events import listen
from tests.scheduler.test_scheduler import prompt_of, was_retracted

OVERLAP = pytest.mark.parametrize("overlap", [True, False])


def guided(num_tokens: int, *runs: int, seed: int = 0, **fields: object) -> SamplingParams:
    """An answer of so many tokens, of which runs of these lengths are forced."""
    script = Script(num_tokens, seed, runs)
    given: dict[str, Any] = {"ignore_eos": True, "grammar": script.grammar, **fields}
    return SamplingParams(**given)


def prompt_without_end(num_answer: int) -> list[int]:
    """A prompt whose answer has no end-of-sequence token among its first ones."""
    for salt in range(1000):
        prompt = prompt_of(5, salt)
        answer = endless_answer(prompt, 5 + num_answer, VOCAB_SIZE)[5:]
        if not EOS & set(answer):
            return prompt
    raise AssertionError("no such prompt")


def slices_of(host: Host, uid: int) -> list[tuple[int, int]]:
    return [
        (start, end)
        for plan in host.executor.plans
        for req_uid, start, end, _ in plan
        if req_uid == uid
    ]


def test_a_forced_run_is_one_slice_without_overlap() -> None:
    """The first token is sampled by the prompt and forces five; with them the next is sampled."""
    host = Host(overlap=False)
    answer = host.ask(prompt_without_end(8), guided(8, 5))

    assert slices_of(host, 0) == [(0, 5), (5, 11), (11, 12)]
    assert (len(answer.tokens), answer.finish) == (8, "stop")
    host.check_answers()


def test_a_token_in_flight_is_the_first_of_those_that_are_forced_and_is_taken_back() -> None:
    """The slice [5, 6) is launched before the host knows the token at 5, which forces five."""
    host = Host(overlap=True)
    answer = host.ask(prompt_without_end(8), guided(8, 5))

    assert slices_of(host, 0)[:3] == [(0, 5), (5, 6), (6, 11)]
    assert (len(answer.tokens), answer.finish) == (8, "stop")
    host.check_answers()


class WrongToken(FakeExecutor):
    """Samples another token than the forced one, as from logits that are no numbers."""

    def compute(self, launched: list[LaunchedSlice]) -> list[int]:
        tokens = super().compute(launched)
        sampling = [entry for entry in launched if entry.req_slice.samples]
        for index, entry in enumerate(sampling):
            if entry.req_slice.req.params.grammar and entry.req_slice.end == 6:
                tokens[index] = (tokens[index] + 1) % VOCAB_SIZE
                self._write_token(entry, tokens[index])
        return tokens


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_a_step_in_flight_samples_in_place_of_a_forced_token_is_dropped(
    asynchronous: bool,
) -> None:
    """A mask cannot forbid a logit that is no number; what the grammar forces counts."""
    host = Host(overlap=True, executor_type=WrongToken, asynchronous=asynchronous)
    other = host.submit([7, 8], exactly(20))
    answer = host.ask(prompt_without_end(8), guided(8, 5))

    assert slices_of(host, 1)[:3] == [(0, 5), (5, 6), (6, 11)]
    assert (len(answer.tokens), answer.finish) == (8, "stop")
    assert len(host.answer(other).tokens) == 20
    host.check_answers()


@OVERLAP
@pytest.mark.parametrize("runs", [(0,), (3,)])
def test_a_match_that_breaks_ends_its_request_alone(overlap: bool, runs: tuple[int, ...]) -> None:
    host = Host(overlap=overlap)
    others = [host.submit([7, 8], exactly(20)), host.submit([9], guided(12, 2))]
    broken = Script(8, runs=runs, is_broken=True)
    params = SamplingParams(ignore_eos=True, grammar=broken.grammar)
    prompt = prompt_without_end(8)
    answer = host.ask(prompt, params)

    assert answer.error is not None
    assert (answer.error.message, answer.error.param) == ("the match is broken", "grammar")
    assert answer.finish is None
    assert answer.tokens == endless_answer(prompt, 12, VOCAB_SIZE)[5:]
    assert [len(host.answer(uid).tokens) for uid in others] == [20, 12]
    host.check_answers()


@OVERLAP
def test_the_outputs_of_a_step_have_all_its_tokens(overlap: bool) -> None:
    host = Host(overlap=overlap)
    uid = host.submit(prompt_without_end(12), guided(12, 5))
    lengths = []
    while host.is_busy:
        before = len(host.answer(uid).tokens)
        host.step()
        lengths.append(len(host.answer(uid).tokens) - before)
    assert max(lengths) == 6
    assert sum(lengths) == 12


@OVERLAP
def test_few_forced_tokens_are_not_worth_a_slice(overlap: bool) -> None:
    host = Host(overlap=overlap)
    host.ask(prompt_without_end(8), guided(30, MIN_FORCED_ON_CPU - 1))
    assert all(end - start == 1 for start, end in slices_of(host, 0)[1:])


@OVERLAP
def test_with_log_probabilities_every_token_is_sampled(overlap: bool) -> None:
    host = Host(overlap=overlap)
    host.ask(prompt_without_end(20), guided(20, 5, logprobs=0))
    assert all(end - start == 1 for start, end in slices_of(host, 0)[1:])


@OVERLAP
@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_a_forced_run_ends_at_max_tokens(overlap: bool, max_tokens: int) -> None:
    host = Host(overlap=overlap)
    answer = host.ask(prompt_without_end(12), guided(60, 7, max_tokens=max_tokens))
    assert (len(answer.tokens), answer.finish) == (max_tokens, "length")
    host.check_answers()


@OVERLAP
@pytest.mark.parametrize("index", range(12))
def test_nothing_is_delivered_behind_a_stop_token_in_a_forced_run(
    overlap: bool, index: int
) -> None:
    prompt = prompt_without_end(12)
    stop = endless_answer(prompt, 5 + 12, VOCAB_SIZE)[5:][index]
    host = Host(overlap=overlap)
    params = guided(60, 7, stop_token_ids=(stop,), max_tokens=40)
    answer = host.ask(prompt, params)
    assert (answer.tokens, answer.finish) == reference_answer(prompt, params, host.limits)
    assert answer.tokens[-1] == stop


@OVERLAP
def test_chunks_of_forced_tokens_come_out_of_the_budget_and_stand_after_the_decodes(
    overlap: bool,
) -> None:
    host = Host(overlap=overlap, max_prefill_length=6)
    for salt in range(2):
        host.submit(prompt_of(4, salt), exactly(40))
    for salt in range(2, 4):
        host.submit(prompt_of(4, salt), guided(40, 9, seed=salt))
    late = host.submit(prompt_of(20, 7), exactly(5))
    host.drain()
    host.check_answers()

    assert host.answer(late).finish == "length"
    for plan in host.executor.plans:
        slices = [(end - start, samples) for _, start, end, samples in plan]
        is_decode = [each == (1, True) for each in slices]
        assert sum(length for length, _ in slices) <= 6 + len(plan)
        assert is_decode == sorted(is_decode, reverse=True)


@OVERLAP
def test_forced_tokens_are_not_prompt_tokens_and_save_steps(overlap: bool) -> None:
    host = Host(overlap=overlap)
    heard = listen(host)
    for salt in range(3):
        host.submit(prompt_of(5, salt), guided(40, 0, 6, 9, seed=salt))
    host.drain()
    host.check_answers()

    assert host.stats[-1].num_computed_tokens == 15
    assert host.stats[-1].num_steps < 30
    new_tokens = [event.num_tokens for event in heard if hasattr(event, "num_tokens")]
    assert max(new_tokens) > 3


@OVERLAP
def test_an_answer_with_forced_tokens_is_found_by_the_next_turn(overlap: bool) -> None:
    host = Host(make_limits(page_size=4), overlap=overlap)
    prompt = prompt_without_end(14)
    answer = host.ask(prompt, guided(14, 6))
    follow_up = host.ask([*prompt, *answer.tokens, 2, 3], exactly(2))

    assert follow_up.num_cached == 12, "the forced tokens at its end were never computed"
    host.check_answers()


@OVERLAP
@pytest.mark.parametrize("num_steps", range(1, 9))
def test_a_request_with_forced_tokens_may_be_aborted_at_any_moment(
    overlap: bool, num_steps: int
) -> None:
    host = Host(overlap=overlap, max_prefill_length=4)
    other = host.submit(prompt_of(3, salt=1), guided(30, 0, 5))
    uid = host.submit(prompt_of(6), guided(40, 5, 9))
    host.step(num_steps)
    host.abort(uid)
    host.drain()
    host.check_answers()
    assert len(host.answer(other).tokens) == 30


@OVERLAP
@pytest.mark.parametrize("page_size", [1, 4])
def test_retraction_in_a_forced_run_changes_no_token(overlap: bool, page_size: int) -> None:
    limits = make_limits(60 // page_size, page_size, max_seq_len=48)
    host = Host(limits, overlap=overlap, cache="naive", max_prefill_length=16)
    for salt in range(6):
        host.submit(prompt_of(4, salt), replace(guided(30, 0, 0, 4, 7, seed=salt), max_tokens=40))
    host.drain()
    host.check_answers()
    assert was_retracted(host)
