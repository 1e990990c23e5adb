"""Schedules of requests, the traces that some come from, and the prompts that they stand for."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from minisgl.benchmark.online.prompts import PromptMaker
from minisgl.benchmark.online.traces import Arrival, read_trace
from minisgl.benchmark.online.workloads import (
    LONG_PROMPTS,
    STREAMS,
    Block,
    MixedShape,
    Replay,
    Shape,
    Workload,
    closed_loop,
    mixed,
    poisson,
    replay,
)
from minisgl.errors import ConfigError

SHAPE = Shape((100, 200), (1, 9))


def num_input(workload: Workload) -> list[int]:
    return [sum(block.num_tokens for block in each.prompt) for each in workload.requests]


def starts_s(workload: Workload) -> list[float]:
    return [each.start_s for each in workload.requests]


def test_clients_hang_up_anywhere_in_some_answers() -> None:
    workload = closed_loop("w6", Shape((1, 1), (10, 10), hang_up=0.3), 1000, concurrency=9)
    nums_read = [each.num_read for each in workload.requests if each.num_read is not None]
    assert 250 < len(nums_read) < 350
    assert set(nums_read) == set(range(1, 11))
    lengths = closed_loop("w6", SHAPE, 100, concurrency=9).requests
    assert not any(each.num_read for each in lengths)


def test_lengths_lie_within_their_bounds_and_are_the_same_each_time() -> None:
    first = closed_loop("closed", SHAPE, 500, 8)

    assert first == closed_loop("closed", SHAPE, 500, 8)
    assert set(num_input(first)) == set(range(100, 201))
    assert {each.num_output for each in first.requests} == set(range(1, 10))


def test_arrivals_of_a_rate_are_independent_and_as_many() -> None:
    starts = starts_s(poisson("poisson", SHAPE, 4000, rate=8.0))
    gaps = [after - before for before, after in pairwise(starts)]

    assert starts == sorted(starts)
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.1)  # as of an exponential


def test_requests_of_a_set_share_a_prefix_and_nothing_else() -> None:
    shape = Shape((10, 10), (1, 1), num_shared=30, num_sets=2)
    requests = closed_loop("shared", shape, 6, 6).requests
    prompts = [PromptMaker(7).prompt(each.prompt) for each in requests]

    assert [len(prompt) for prompt in prompts] == [40] * 6
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 2
    assert prompts[0][:30] == prompts[2][:30] == prompts[4][:30]
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 6


def test_long_prompts_come_among_streams() -> None:
    workload = mixed("w7", MixedShape(num_streams=3, num_long=2, long_start_s=5, long_every_s=1))

    assert [each.group for each in workload.requests] == [STREAMS] * 3 + [LONG_PROMPTS] * 2
    assert starts_s(workload) == [0, 0, 0, 5, 6]
    assert num_input(workload) == [512] * 3 + [16_000] * 2


# ---- prompts


def test_each_run_has_other_tokens() -> None:
    block = (Block(0, 64),)

    assert PromptMaker(1).prompt(block) == PromptMaker(1).prompt(block)
    assert PromptMaker(1).prompt(block) != PromptMaker(2).prompt(block)
    assert PromptMaker(1, run=1).prompt(block) != PromptMaker(1).prompt(block)
    assert PromptMaker(1, run=1).prompt(block) != PromptMaker(2).prompt(block)


def test_blocks_of_one_key_begin_alike() -> None:
    prompts = PromptMaker(1)
    long = prompts.prompt((Block(3, 512), Block(4, 100)))

    assert prompts.prompt((Block(3, 99),)) == long[:99]
    assert prompts.prompt((Block(4, 100),)) == long[512:]


def test_token_ids_keep_their_bounds() -> None:
    assert set(PromptMaker(1, (5, 7)).prompt((Block(0, 200),))) == {5, 6, 7}


def test_a_text_has_a_word_a_token() -> None:
    text = PromptMaker(1, as_text=True).prompt((Block(0, 40),))

    assert isinstance(text, str)
    assert len(text.split()) == 40


# ---- traces


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 700, "output_length": 6, "hash_ids": [0, 9]},
        {"timestamp": 9000, "input_length": 100, "output_length": 7, "hash_ids": [8]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.6805900,396,109\n"
    )
    return path


def test_equal_hashes_of_a_trace_are_equal_prefixes(mooncake: Path) -> None:
    workload = replay("w5", read_trace(mooncake), Replay(speed=2))
    first, second, _ = (PromptMaker(1).prompt(each.prompt) for each in workload.requests)

    assert num_input(workload) == [1100, 700, 100]
    assert starts_s(workload) == [0, 1.5, 4.5]
    assert first[:512] == second[:512]
    assert first[512:700] != second[512:]


def test_tokens_of_a_trace_beyond_its_hashes_are_fresh() -> None:
    arrivals = [Arrival(0.0, 700, 1, (4,)), Arrival(1.0, 700, 1, (4,))]
    workload = replay("w5", arrivals, Replay())
    first, second = (PromptMaker(1).prompt(each.prompt) for each in workload.requests)

    assert num_input(workload) == [700, 700]
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]


def test_requests_of_a_trace_without_hashes_share_nothing(azure: Path) -> None:
    workload = replay("w5", read_trace(azure), Replay())
    first, second = (PromptMaker(1).prompt(each.prompt) for each in workload.requests)

    assert num_input(workload) == [374, 396]
    assert [each.num_output for each in workload.requests] == [44, 109]
    assert starts_s(workload) == pytest.approx([0, 4])
    assert first != second[:374]


@pytest.mark.parametrize(
    ("part", "lengths"),
    [
        (Replay(max_requests=2), [1100, 700]),
        (Replay(duration_s=4), [1100, 700]),
        (Replay(speed=3, duration_s=4), [1100, 700, 100]),
        (Replay(max_input=1000), [700, 100]),
    ],
)
def test_a_part_of_a_trace_is_replayed(part: Replay, lengths: list[int], mooncake: Path) -> None:
    assert num_input(replay("w5", read_trace(mooncake), part)) == lengths


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.txt", "", "must end in one of .jsonl, .csv"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("a.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n", "GeneratedTokens"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,1\n", "after 0 requests.*soon"),
        ("a.jsonl", '{"timestamp": 0}\n', "input_length"),
    ],
)
def test_a_bad_trace_is_refused(name: str, text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)

    with pytest.raises(ConfigError, match=complaint):
        read_trace(path)


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.csv")
