"""A seeded request's tokens depend on its logits, its seed and its positions, on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl.core import SamplingParams
from tests.checkpoints import ARCHITECTURES, VOCAB_SIZE
from tests.engine.harness import Host, WatchedEngine, config_of, random_prompts

PROMPT, *CROWD = random_prompts([17, 1, 9, 30, 64, 17, 5], VOCAB_SIZE)
Engines = Callable[..., WatchedEngine]


def seeded(seed: int | None) -> SamplingParams:
    return SamplingParams(max_tokens=24, temperature=1.0, top_p=0.95, seed=seed, ignore_eos=True)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_seeded_request_gets_the_same_tokens_alone_and_in_a_crowd(
    arch: str, engine: Engines
) -> None:
    alone = Host(engine(arch), config_of(Path())).ask([PROMPT], seeded(7))[0]
    config = config_of(Path(), overlap=True, max_prefill_length=7, seed=3)
    others = [
        seeded(None),
        seeded(7),
        seeded(8),
        SamplingParams(max_tokens=9),
        seeded(-1),
        seeded(None),
    ]
    *_, last = Host(engine(arch, 16), config).ask([*CROWD, PROMPT], [*others, seeded(7)])
    assert last.tokens == alone.tokens


def test_a_seeded_request_that_lost_its_pages_gets_the_same_tokens(
    checkpoint: Callable[[str], Path], engine: Engines
) -> None:
    prompts = [PROMPT, *CROWD]
    alone = [
        Host(engine("llama"), config_of(Path())).ask([prompt], seeded(7))[0] for prompt in prompts
    ]
    config = config_of(checkpoint("llama"), num_pages=24, overlap=True)
    host = Host(WatchedEngine(config), config)
    crowded = host.ask(prompts, seeded(7))
    assert host.scheduler.statistics.counts.num_retractions > 0
    assert [answer.tokens for answer in crowded] == [answer.tokens for answer in alone]


def test_seeds_differ_and_so_do_positions(engine: Engines) -> None:
    one, other = (
        Host(engine("llama"), config_of(Path())).ask([PROMPT], seeded(seed))[0] for seed in (1, 2)
    )
    assert one.tokens != other.tokens
    assert len(set(one.tokens)) > 12


def test_requests_without_a_seed_follow_the_seed_of_the_scheduler(engine: Engines) -> None:
    def ask(seed: int) -> list[list[int]]:
        host = Host(engine("llama"), config_of(Path(), seed=seed))
        return [answer.tokens for answer in host.ask([PROMPT, PROMPT], seeded(None))]

    assert ask(1) == ask(1)
    assert ask(1) != ask(2)
    assert ask(1)[0] != ask(1)[1]
