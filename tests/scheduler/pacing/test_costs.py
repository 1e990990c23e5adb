"""The model of how long steps take finds what they cost, whatever hiccups there are."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.core import Req, ReqSlice, SamplingParams
from minisgl.scheduler.pacing.costs import StepCostFit, StepCosts, StepWork

COSTS = st.builds(
    StepCosts,
    step=st.floats(1e-3, 0.1),
    mixed=st.floats(0, 0.02),
    token=st.floats(1e-6, 1e-3),
    attended=st.floats(0, 1e-7),
    decode=st.floats(0, 1e-3),
    context=st.floats(0, 1e-6),
)
WORK = st.builds(
    StepWork,
    num_tokens=st.integers(0, 8192),
    num_attended=st.floats(0, 1e9),
    num_decodes=st.integers(0, 256),
    num_context=st.integers(0, 10**6),
)


def random_work(random: Random) -> StepWork:
    """A step of a server: some requests run, and there is often a chunk of a long prompt."""
    num_decodes = random.randint(1, 64)
    num_context = num_decodes * random.randint(100, 4000)
    if random.random() < 0.3:
        return StepWork(0, 0.0, num_decodes, num_context)
    num_tokens = random.randint(16, 2048)
    position = random.randint(0, 16_000)
    return StepWork(num_tokens, num_tokens * (position + num_tokens / 2), num_decodes, num_context)


def fit_to(costs: StepCosts, noise: float, num_steps: int, hiccups: float = 0.0) -> StepCostFit:
    random = Random(0)
    fit = StepCostFit()
    for _ in range(num_steps):
        work = random_work(random)
        factor = 1 + noise * random.uniform(-1, 1)
        if random.random() < hiccups:
            factor *= random.choice([0.01, 100])
        fit.observe(work, costs.seconds(work) * factor)
    return fit


def errors(fit: StepCostFit, costs: StepCosts) -> list[float]:
    random = Random(1)
    works = [random_work(random) for _ in range(50)]
    return [abs(math.log(fit.costs.seconds(work) / costs.seconds(work))) for work in works]


def median_error(fit: StepCostFit, costs: StepCosts) -> float:
    return sorted(errors(fit, costs))[25]


@settings(deadline=None, max_examples=15)
@given(COSTS)
def test_the_costs_of_steps_are_found(costs: StepCosts) -> None:
    fit = fit_to(costs, noise=0.1, num_steps=200)
    assert median_error(fit, costs) < 0.1
    assert max(errors(fit, costs)) < 0.5


@settings(deadline=None, max_examples=15)
@given(COSTS)
def test_hiccups_change_little(costs: StepCosts) -> None:
    fit = fit_to(costs, noise=0.1, num_steps=200, hiccups=0.05)
    assert median_error(fit, costs) < 0.4


@pytest.mark.parametrize("factor", [0.2, 5])
def test_a_machine_that_changes_is_noticed(factor: float) -> None:
    fit = StepCostFit()
    costs = StepCosts(0.01, 0.002, 5e-5, 2e-9, 5e-5, 1e-8)
    random = Random(2)
    for _ in range(200):
        work = random_work(random)
        fit.observe(work, costs.seconds(work))
    for _ in range(200):
        work = random_work(random)
        fit.observe(work, factor * costs.seconds(work))
    assert fit.costs.seconds(work) / costs.seconds(work) == pytest.approx(factor, rel=0.3)


def test_steps_without_prompts_leave_what_prompts_cost() -> None:
    costs = StepCosts(0.01, 0.002, 5e-5, 2e-9, 5e-5, 1e-8)
    fit = fit_to(costs, noise=0.0, num_steps=200)
    for _ in range(2000):
        work = StepWork(0, 0.0, 8, 8000)
        fit.observe(work, costs.seconds(work))
    assert max(errors(fit, costs)) < 0.1


def test_the_first_steps_are_ascribed_to_their_tokens() -> None:
    """One step does not tell a cost a token from a cost a step; the first is the safe guess."""
    fit = StepCostFit()
    fit.observe(StepWork(400, 400 * 200.0, 0, 0), 0.12)
    assert fit.costs.token * 400 > 0.06


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(WORK, st.floats(0, 1e6)), max_size=30), WORK, WORK)
def test_no_cost_is_negative_whatever_is_measured(
    steps: list[tuple[StepWork, float]], work: StepWork, more: StepWork
) -> None:
    fit = StepCostFit()
    for observed, seconds in steps:
        fit.observe(observed, seconds)
    both = StepWork(
        work.num_tokens + more.num_tokens,
        work.num_attended + more.num_attended,
        work.num_decodes + more.num_decodes,
        work.num_context + more.num_context,
    )
    assert math.isfinite(fit.costs.seconds(both))
    assert fit.costs.seconds(both) >= fit.costs.seconds(work) >= 0


@pytest.mark.parametrize("num_between", [0, 2, 10])
def test_a_first_step_with_prompts_that_was_held_up_is_soon_forgotten(num_between: int) -> None:
    """However many steps without prompts are between, and though little is dared at a time."""
    costs = StepCosts(step=6e-3, mixed=2e-3, token=3e-5, decode=2e-5, context=2e-8)
    decodes = StepWork(0, 0.0, 32, 32 * 800)
    first = replace(decodes, num_tokens=2048, num_attended=2048 * 1024)
    fit = StepCostFit()
    fit.observe(first, 300 * costs.seconds(first))
    some = replace(decodes, num_tokens=16, num_attended=16 * 8)
    for _ in range(30):
        for _ in range(num_between):
            fit.observe(decodes, costs.seconds(decodes))
        fit.observe(some, costs.seconds(some))
    assert fit.costs.seconds(some) < 2 * costs.seconds(some)


@pytest.mark.parametrize("num_short", range(1, 11))
def test_some_steps_that_seemed_short_change_little(num_short: int) -> None:
    costs = StepCosts(step=6e-3, mixed=2e-3, token=3e-5, decode=2e-5, context=2e-8)
    fit = fit_to(costs, noise=0.1, num_steps=200)
    random = Random(2)
    for _ in range(num_short):
        work = random_work(random)
        fit.observe(work, 0.01 * costs.seconds(work))
    for _ in range(5):
        work = random_work(random)
        fit.observe(work, costs.seconds(work))
    assert max(errors(fit, costs)) < math.log(2)


@given(COSTS, st.floats(1e-4, 10), st.integers(0, 100_000))
def test_the_tokens_within_a_time_take_that_time(
    costs: StepCosts, seconds: float, start: int
) -> None:
    num_tokens = costs.num_tokens_within(seconds, start)
    attended = num_tokens * (start + num_tokens / 2)
    assert costs.token * num_tokens + costs.attended * attended == pytest.approx(seconds)


def test_what_costs_nothing_is_not_bounded() -> None:
    assert StepCosts().num_tokens_within(0.1, 0) == math.inf
    assert StepCosts(token=1e-3).num_tokens_within(-0.1, 0) == 0


def test_the_work_of_a_step_is_counted() -> None:
    req = Req(0, np.zeros(100, dtype=np.int32), SamplingParams(), 200, seed=0)
    slices = [
        ReqSlice(req, 9, 10, samples=True),
        ReqSlice(req, 29, 30, samples=True),
        ReqSlice(req, 10, 20, samples=False),
    ]
    assert StepWork.of(slices) == StepWork(10, 150.0, 2, 40)
