"""API processes ask each other for their metrics, and any of them answers for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minisgl.errors import Unavailable
from minisgl.message import EngineStats, MetricSample, PeerMsg, RefuseMsg, SuspendMsg
from minisgl.processes.addresses import Addresses
from minisgl.processes.private_folder import private_folder
from minisgl.server import peers as peers_module
from minisgl.server.metrics import Metrics
from minisgl.server.peers import Peers
from tests.server.harness import run, wait_until

Values = dict[str, float]


@asynccontextmanager
async def running_peers(number: int, silent: int | None = None) -> AsyncIterator[list[Peers]]:
    """Peers, of which each but the silent one answers with its own number."""
    with private_folder() as folder:
        peers = [Peers(Addresses(folder, num_api=number), api) for api in range(number)]
        tasks = [
            asyncio.create_task(one.run(lambda api=api: [MetricSample("n", {}, api)], print))
            for api, one in enumerate(peers)
            if api != silent
        ]
        try:
            yield peers
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            for one in peers:
                one.close()


def test_each_gets_the_samples_of_all_others() -> None:
    async def scenario() -> None:
        async with running_peers(3) as peers:
            answers = await asyncio.gather(*(one.samples() for one in peers for _ in range(2)))
            seen = [sorted(sample.value for sample in samples) for samples in answers]
            assert seen == [[1, 2], [1, 2], [0, 2], [0, 2], [0, 1], [0, 1]]

    run(scenario())


def test_one_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are lower than before would be taken for those of a new server."""
    monkeypatch.setattr(peers_module, "_ANSWER_S", 0.05)

    async def scenario() -> None:
        async with running_peers(3, silent=1) as peers:
            with pytest.raises(Unavailable, match="does not send its metrics"):
                await peers[0].samples()

    run(scenario())


def test_what_the_first_says_reaches_each_in_order() -> None:
    async def scenario() -> None:
        with private_folder() as folder:
            peers = [Peers(Addresses(folder, num_api=3), api) for api in range(3)]
            told = [SuspendMsg("it died", 2), RefuseMsg("going")]
            for msg in told:
                peers[0].post(msg)
            for one in peers[1:]:
                assert [await one.receive() for _ in told] == told
            for one in peers:
                one.close()

    run(scenario())


def test_a_peer_applies_what_is_no_question() -> None:
    async def scenario() -> None:
        with private_folder() as folder:
            first, second = (Peers(Addresses(folder, num_api=2), api) for api in range(2))
            applied: list[PeerMsg] = []
            task = asyncio.create_task(second.run(list, applied.append))
            first.post(RefuseMsg("going"))
            await wait_until(lambda: applied == [RefuseMsg("going")])
            task.cancel()
            for one in (first, second):
                one.close()

    run(scenario())


def values(metrics: Metrics, others: list[MetricSample]) -> Values:
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.expose(others).decode())
        for sample in family.samples
    }


def test_own_numbers_are_added_up_and_the_engines_are_not() -> None:
    stats = EngineStats(1, 2, 3, 4, 5, 6, 7, 8)
    first, second, third = all_metrics = [Metrics() for _ in range(3)]
    for metrics, tokens in zip(all_metrics, (1, 10, 100), strict=True):
        metrics.engine.update(stats)
        metrics.output_tokens.inc(tokens)
        metrics.inter_token_latency.observe(0.02)
        metrics.time_to_first_token.observe(tokens)
    first.count_request("/a", 200)
    second.count_request("/a", 200)
    second.count_request("/b", 400)

    seen = values(first, [*second.samples(), *third.samples()])

    assert seen["minisgl_output_tokens_total"] == 111
    assert seen["minisgl_inter_token_latency_seconds_bucket 0.02"] == 3
    assert seen["minisgl_inter_token_latency_seconds_bucket 0.01"] == 0
    assert seen["minisgl_time_to_first_token_seconds_sum"] == 111
    assert seen["minisgl_http_requests_total /a 200"] == 2
    assert seen["minisgl_http_requests_total /b 400"] == 1
    assert seen["minisgl_steps_total"] == 6
    assert seen["minisgl_requests_running"] == 1
    created = [
        sample.value
        for metrics in all_metrics
        for sample in metrics.samples()
        if sample.name == "minisgl_aborts_created"
    ]
    assert seen["minisgl_aborts_created"] == min(created)
