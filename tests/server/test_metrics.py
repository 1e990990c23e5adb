"""/metrics: every number is what was asked and answered, and nothing of the texts is there."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minisgl.core import SamplingParams
from minisgl.message import BatchFrontendMsg, EngineStats, ReplyError, UserReply
from minisgl.server.metrics import EngineMetrics, Metrics
from minisgl.server.stopwatch import Stopwatch
from tests.server.harness import (
    CHAT,
    CONFIG,
    MAX_BODY,
    TEXT,
    App,
    restartable_frontend,
    run,
    run_with_app,
    running_frontend,
    token_replies,
    wait_until,
)
from tests.server.http.test_middleware import KEYS, bearer

DOCS = Path(__file__).parents[2] / "docs"
OPERATING = DOCS / "operating.md"
SUFFIXES = ("", "_total", "_bucket", "_count", "_sum")
Samples = dict[str, float]


def parse(text: str) -> Samples:
    """The samples, under their names and labels."""
    return {
        sample.name.removeprefix("minisgl_")
        + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scrape(app: App, **options: Any) -> Samples:
    call = app.call("GET", "/metrics", **options)
    await call.done
    assert call.status == 200
    assert call.headers["content-type"].startswith("text/plain; version=")
    return parse(call.body.decode())


def test_an_answer_is_counted_token_by_token_and_timed_once() -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("a", "", "b", "c", num_prompt=7, num_cached=4))
        for route in (CHAT, TEXT):
            for stream in (False, True):
                await app.post(route, stream=stream).done
        seen = await scrape(app)
        assert (seen["prompt_tokens_total"], seen["cached_prompt_tokens_total"]) == (28, 16)
        assert seen["output_tokens_total"] == 16
        assert (
            seen["time_to_first_token_seconds_count"] == seen["request_duration_seconds_count"] == 4
        )
        assert seen["inter_token_latency_seconds_count"] == 12
        assert seen["aborts_total"] == 0
        assert (
            seen[f"http_requests_total {CHAT} 200"] == seen[f"http_requests_total {TEXT} 200"] == 2
        )

    run_with_app(scenario)


def test_times_are_those_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5, 10.75, 12.75, 13.0, 14.0, 15.0])
    monkeypatch.setattr("minisgl.server.stopwatch.time.perf_counter", lambda: next(clock))
    metrics = Metrics()
    watch = Stopwatch(metrics)
    watch.observe(UserReply(0, num_output=1))
    watch.observe(UserReply(0, num_output=2))
    watch.observe(UserReply(0, num_output=6))  # four at once
    watch.observe(UserReply(0, num_output=6, finish="abort"))
    seen = parse(metrics.expose().decode())
    assert seen["time_to_first_token_seconds_sum"] == 0.5
    assert seen["inter_token_latency_seconds_sum"] == 12.75 - 10.5
    assert seen["inter_token_latency_seconds_count"] == 6 - 1
    assert seen["inter_token_latency_seconds_bucket 0.25"] == 1
    assert seen["inter_token_latency_seconds_bucket 0.5"] == 5
    assert seen["request_duration_seconds_sum"] == 3
    assert seen["output_tokens_total"] == 6

    watch = Stopwatch(metrics)
    watch.observe(UserReply(0, num_output=3))  # three at once, the first
    seen = parse(metrics.expose().decode())
    assert seen["inter_token_latency_seconds_sum"] == 12.75 - 10.5
    assert seen["inter_token_latency_seconds_count"] == 6 - 1 + 3 - 1


def test_the_time_to_the_first_token_is_waiting_and_computing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([10.0, 10.75, 11.0])
    monkeypatch.setattr("minisgl.server.stopwatch.time.perf_counter", lambda: next(clock))
    metrics = Metrics()
    watch = Stopwatch(metrics)
    watch.observe(UserReply(0, num_output=1, prefill_s=0.5))
    watch.observe(UserReply(0, num_output=2))
    seen = parse(metrics.expose().decode())
    assert seen["request_queue_seconds_sum"] == 0.25
    assert seen["request_prefill_seconds_sum"] == 0.5
    assert seen["request_queue_seconds_count"] == seen["request_prefill_seconds_count"] == 1


def test_a_prompt_with_several_answers_is_counted_once() -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("a", "b", num_prompt=7, num_cached=4))
        await app.post(TEXT, n=3, prompt=["p", "q"]).done
        seen = await scrape(app)
        assert (seen["prompt_tokens_total"], seen["cached_prompt_tokens_total"]) == (14, 8)
        assert seen["output_tokens_total"] == 12
        assert seen["request_duration_seconds_count"] == 6

    run_with_app(scenario)


def test_a_prompt_without_an_answer_is_counted_once() -> None:
    metrics = Metrics()
    watch = Stopwatch(metrics)
    watch.observe(UserReply(0))
    watch.observe(UserReply(0, finish="length", num_prompt=5, num_cached=4))
    seen = parse(metrics.expose().decode())
    assert (
        seen["prompt_tokens_total"],
        seen["cached_prompt_tokens_total"],
        seen["output_tokens_total"],
    ) == (5, 4, 0)


@pytest.mark.parametrize(
    "end", [{"error": ReplyError(503, "timeout", "late")}, {"finish": "abort"}], ids=str
)
def test_a_prompt_whose_first_answer_ends_without_a_token_is_counted_with_the_next(
    end: dict[str, Any],
) -> None:
    async def scenario() -> None:
        async with running_frontend() as (frontend, worker):
            generation = frontend.submit(["p"], SamplingParams(), num_answers=3)
            uids = [(await worker.receive()).uid for _ in range(3)]
            worker.send(UserReply(uids[0], **end))
            for uid in uids[1:]:
                worker.send(UserReply(uid, "a", num_prompt=7, num_cached=4, num_output=1))
            await wait_until(
                lambda: parse(frontend.metrics.expose().decode())["output_tokens_total"] == 2
            )
            seen = parse(frontend.metrics.expose().decode())
            assert (seen["prompt_tokens_total"], seen["cached_prompt_tokens_total"]) == (7, 4)
            generation.close()

    run(scenario())


def test_requests_are_counted_by_route_and_status_and_errors_by_code() -> None:
    async def scenario(app: App) -> None:
        for method, path in (
            ("GET", "/v1/models/m"),
            ("GET", "/v1/models/x/y"),
            ("GET", "/v1/models/z"),
            ("GET", "/secret/page"),
            ("DELETE", CHAT),
        ):
            await app.call(method, path).done
        await app.post(CHAT, messages=[]).done
        await app.post(CHAT, raw=b" " * (MAX_BODY + 1)).done
        await app.call("GET", "/version", headers=[]).done
        seen = await scrape(app)
        model = "/v1/models/{name:path}"
        assert (
            seen[f"http_requests_total {model} 200"],
            seen[f"http_requests_total {model} 404"],
        ) == (1, 2)
        assert seen["http_requests_total other 404"] == 1
        assert seen["http_requests_total /version 200"] == 1
        assert [seen[f"http_requests_total {CHAT} {status}"] for status in (400, 405, 413)] == [
            1,
            1,
            1,
        ]
        assert {
            name: value for name, value in seen.items() if name.startswith("errors_total ")
        } == {
            "errors_total model_not_found": 2,
            "errors_total http_404": 1,
            "errors_total http_405": 1,
            "errors_total http_413": 1,
            "errors_total too_short": 1,
        }

    run_with_app(scenario)


def test_a_bug_is_a_500_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(app: App) -> None:
        monkeypatch.setattr(app.frontend.questions, "encode", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await app.post("/tokenize", prompt="a").done
        seen = await scrape(app)
        assert (seen["http_requests_total /tokenize 500"], seen["errors_total http_500"]) == (1, 1)

    run_with_app(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_a_worker_is_an_error_and_no_tokens(stream: bool) -> None:
    async def scenario(app: App) -> None:
        refusal = ReplyError(400, "context_length_exceeded", "101 tokens", "prompt")
        app.worker.answer_with(lambda msg: [UserReply(msg.uid, error=refusal)])
        await app.post(CHAT, stream=stream).done
        seen = await scrape(app)
        assert (
            seen[f"http_requests_total {CHAT} 400"],
            seen["errors_total context_length_exceeded"],
        ) == (1, 1)
        assert seen["prompt_tokens_total"] == seen["request_duration_seconds_count"] == 0

    run_with_app(scenario)


def test_a_refused_prompt_is_one_error_and_the_answers_to_the_others_are_aborts() -> None:
    async def scenario(app: App) -> None:
        call = app.post(TEXT, prompt=["a", "b", "c"])
        msgs = [await app.worker.receive() for _ in range(3)]
        refusal = ReplyError(400, "context_length_exceeded", "101 tokens", "prompt")
        app.worker.send(UserReply(msgs[1].uid, error=refusal))
        await call.done
        seen = await scrape(app)
        assert seen["errors_total context_length_exceeded"] == 1
        assert seen["aborts_total"] == 2

    run_with_app(scenario)


def test_an_engine_that_dies_is_one_error_for_a_stream_and_one_for_a_whole_answer() -> None:
    async def scenario(app: App) -> None:
        stream = app.post(CHAT, stream=True)
        app.worker.send(UserReply((await app.worker.receive()).uid, "part", num_output=1))
        await wait_until(lambda: b"part" in stream.body)
        whole = app.post(CHAT)
        await app.worker.receive()
        app.frontend.fail("gone")
        await asyncio.gather(stream.done, whole.done)
        seen = await scrape(app)
        assert seen["errors_total engine_failed"] == 2
        assert (
            seen[f"http_requests_total {CHAT} 200"],
            seen[f"http_requests_total {CHAT} 503"],
        ) == (1, 1)
        assert seen["aborts_total"] == 0

    run_with_app(scenario)


def test_readers_that_go_away_are_aborts() -> None:
    async def scenario(app: App) -> None:
        call = app.post(TEXT, prompt=["a", "b"])
        await app.worker.receive()
        call.disconnect()
        await call.done
        seen = await scrape(app)
        assert (seen["aborts_total"], seen[f"http_requests_total {TEXT} 499"]) == (2, 1)
        assert seen["request_duration_seconds_count"] == 0

    run_with_app(scenario)


def test_how_the_scheduler_stands_is_what_it_said_last() -> None:
    async def scenario(app: App) -> None:
        before = await scrape(app)
        assert (
            before["requests_running"]
            == before["requests_waiting"]
            == before["kv_pages_used_ratio"]
            == 0
        )
        app.worker.send_message(BatchFrontendMsg([], EngineStats(9, 8, 7, 10, 2, 20, 200, 0)))
        app.worker.send_message(
            BatchFrontendMsg([], EngineStats(3, 2, 4, 16, 5, 30, 300, 48, 512, 62.5))
        )
        app.worker.send_message(BatchFrontendMsg([]))
        app.worker.answer_with(token_replies("a"))
        await app.post(TEXT).done  # comes after them
        seen = await scrape(app)
        assert (seen["requests_running"], seen["requests_waiting"]) == (3, 2)
        assert seen["kv_pages_used_ratio"] == 0.25
        assert seen["retractions_total"] == 5
        assert seen["steps_total"] == 30
        assert seen["computed_tokens_total"] == 300
        assert seen["cached_tokens_total"] == 48
        assert (seen["step_budget_tokens"], seen["step_budget_seconds"]) == (512, 0.0625)

    run_with_app(scenario)


def steps(num_steps: int, epoch: int) -> BatchFrontendMsg:
    return BatchFrontendMsg([], EngineStats(1, 0, 0, 10, 0, num_steps, 0, 0, epoch=epoch))


def test_what_a_dead_scheduler_counted_may_come_late_and_is_dropped() -> None:
    """The next one counts from zero: its steps would be taken for those of the dead one."""

    async def scenario() -> None:
        async with restartable_frontend() as (frontend, worker, restart):

            def seen(name: str) -> float:
                return parse(frontend.metrics.expose().decode())[name]

            for num_steps in (20, 30):
                worker.send_message(steps(num_steps, epoch=0))
            await wait_until(lambda: seen("steps_total") == 30)
            frontend.suspend("it died", 1)
            restarted = await restart()
            restarted.send_message(steps(30, epoch=0))
            await asyncio.sleep(0.1)
            assert (seen("steps_total"), seen("requests_running")) == (30, 0)
            for num_steps in (5, 12):
                restarted.send_message(steps(num_steps, epoch=1))
            await wait_until(lambda: seen("steps_total") == 30 + 12)

    run(scenario())


def test_counts_that_come_late_from_a_detokenizer_before_its_successors_are_not_counted_twice() -> (
    None
):
    metrics = Metrics()
    for num_steps in (20, 30, 25, 31):
        metrics.engine.update(EngineStats(0, 0, 0, 10, 0, num_steps, 0, 0))
    assert parse(metrics.expose().decode())["steps_total"] == 31


def test_whichever_process_is_asked_the_engines_numbers_are_the_same() -> None:
    """Processes start one after the other, so when they began to count is none of them."""
    first = EngineMetrics()
    second = EngineMetrics()
    for engine in (first, second):
        engine.update(EngineStats(1, 2, 3, 10, 4, 5, 6, 7))
    assert first.expose() == second.expose()


def test_it_wants_a_key_and_counts_who_has_none() -> None:
    async def scenario(app: App) -> None:
        call = app.call("GET", "/metrics")
        await call.done
        assert call.status == 401
        seen = await scrape(app, **bearer(KEYS[0]))
        assert seen["errors_total invalid_api_key"] == seen["http_requests_total /metrics 401"] == 1

    run_with_app(scenario, config=replace(CONFIG, api_key=KEYS))


def test_no_text_of_a_request_or_an_answer_is_in_it_and_two_servers_do_not_mix() -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("confidential"))
        await app.post(CHAT, messages=[{"role": "user", "content": "confidential"}]).done
        await app.post(CHAT, confidential=1).done
        await app.call("GET", "/confidential").done
        call = app.call("GET", "/metrics")
        await call.done
        assert b"confidential" not in call.body
        assert parse(Metrics().expose().decode())["output_tokens_total"] == 0

    run_with_app(scenario)


def test_the_documentation_lists_every_metric_with_its_type_and_no_other() -> None:
    documented = re.findall(
        r"^\| `(minisgl_[a-z_]+)` \| ([a-z]+) \|", OPERATING.read_text(), re.MULTILINE
    )
    families = list(text_string_to_metric_families(Metrics().expose().decode()))
    total = {"counter": "_total"}
    assert documented == [
        (family.name.removesuffix("_total") + total.get(family.type, ""), family.type)
        for family in families
        if not family.name.endswith("_created")
    ]


@pytest.mark.parametrize("name", ["alerts.yml", "dashboard.json"])
def test_what_operators_are_given_names_metrics_that_there_are(name: str) -> None:
    text = (DOCS / "operating" / name).read_text()
    named = set(re.findall(r"minisgl_\w+", text))
    families = text_string_to_metric_families(Metrics().expose().decode())
    there_are = {f"{family.name}{suffix}" for family in families for suffix in SUFFIXES}
    assert named
    assert named <= there_are
