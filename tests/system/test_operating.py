"""A server as operators run it: with API keys and metrics."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.system.harness import (
    MAX_RUNNING,
    MODEL,
    TIMEOUT_S,
    Program,
    endless_body,
    open_stream,
    small_server,
    wait_until,
)
from tests.system.oracle import answer_to

pytestmark = pytest.mark.slow
KEY = "sk-of-the-environment"
OTHER_KEY = "sk-of-the-arguments"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[Program]:
    """A server with two keys and two API processes, which logs at DEBUG."""
    options = ["--api-key", OTHER_KEY, "--api-workers", "2", "--log-level", "DEBUG"]
    argv = small_server(folder, *options)
    with Program(*argv, env={"MINISGL_API_KEY": KEY}) as program:
        yield program.wait_ready()


@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
def test_openais_client_is_served_with_a_key(key: str, guarded: Program) -> None:
    with guarded.client(key) as client:
        assert client.models.retrieve(MODEL).id == MODEL
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "the dog"}],
            temperature=0,
            max_tokens=8,
            extra_body={"ignore_eos": True},
        )
    assert answer.choices[0].message.content == answer_to("the dog", 8)


def test_openais_client_is_refused_without_one_and_no_key_is_ever_written(guarded: Program) -> None:
    with (
        guarded.client("sk-guessed") as client,
        pytest.raises(openai.AuthenticationError) as refusal,
    ):
        client.models.list()
    assert refusal.value.code == "invalid_api_key"
    assert httpx.get(f"{guarded.url}/health").status_code == 200
    assert "sk-" not in guarded.stderr


def test_a_prefix_is_cached_for_its_key_only(guarded: Program) -> None:
    body = {"model": MODEL, "prompt": "Pack my box with five dozen liquor jugs. " * 8}

    def num_cached_tokens(key: str) -> int:
        with guarded.client(key) as client:
            answer = client.completions.create(**body, temperature=0, max_tokens=1)
        cached = answer.usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr]
        assert cached is not None
        return cached

    assert num_cached_tokens(KEY) == 0
    assert num_cached_tokens(KEY) > 0
    assert num_cached_tokens(OTHER_KEY) == 0
    assert num_cached_tokens(OTHER_KEY) > 0
    assert "cache_salt" not in guarded.stderr


def flush(program: Program, headers: dict[str, str]) -> httpx.Response:
    return httpx.post(f"{program.url}/flush_cache", headers=headers, timeout=TIMEOUT_S)


def test_a_flush_drops_the_prefixes_that_nobody_uses(guarded: Program) -> None:
    assert flush(guarded, {}).status_code == 401
    flush(guarded, BEARER)
    with guarded.client(KEY) as client:
        body = {"model": MODEL, "prompt": "the quick brown fox jumps " * 8, "temperature": 0}
        usages = [client.completions.create(**body, max_tokens=1).usage for _ in range(2)]  # type: ignore[call-overload]
        assert usages[1].prompt_tokens_details.cached_tokens > 0
        num_tokens = flush(guarded, BEARER).json()["num_tokens"]
        assert num_tokens >= usages[1].prompt_tokens_details.cached_tokens
        again = client.completions.create(**body, max_tokens=1).usage  # type: ignore[call-overload]
        assert again.prompt_tokens_details.cached_tokens == 0
    assert flush(guarded, BEARER).json()["num_tokens"] > 0
    assert flush(guarded, BEARER).json() == {"num_tokens": 0}


def limits_of(key: str, open_requests: int) -> str:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f"[batch]\nsha256 = '{digest}'\nopen_requests = {open_requests}\n"


def post_completion(program: Program, key: str) -> httpx.Response:
    """On a connection of its own, which any of the API processes may accept."""
    return httpx.post(
        f"{program.url}/v1/completions",
        json=endless_body(max_tokens=1),
        headers={"Authorization": f"Bearer {key}"},
        timeout=TIMEOUT_S,
    )


def test_a_key_at_its_limit_gets_429s_of_all_processes_until_the_limits_are_read_again(
    folder: Path, tmp_path: Path
) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text(limits_of(KEY, 1))
    options = ["--api-key", f"{KEY},{OTHER_KEY}", "--key-limits", str(limits)]
    options += ["--api-workers", "2", "--tp", "2"]
    with Program(*small_server(folder, *options)) as program:
        program.wait_ready()
        with open_stream(program, headers=BEARER):
            refusals = [post_completion(program, KEY) for _ in range(16)]
            assert {refusal.status_code for refusal in refusals} == {429}
            assert all(int(refusal.headers["retry-after"]) >= 1 for refusal in refusals)
            assert post_completion(program, OTHER_KEY).status_code == 200

            limits.write_text(limits_of(KEY, 2))
            program.process.send_signal(signal.SIGHUP)
            wait_until(
                lambda: all(post_completion(program, KEY).status_code == 200 for _ in range(8)),
                "the new limit holds",
            )
        with open_stream(program, headers=BEARER), open_stream(program, headers=BEARER):
            answers = [post_completion(program, KEY) for _ in range(16)]
            assert {answer.status_code for answer in answers} == {429}, "counted over processes"
        # The streams that were closed count until the server has noticed, and keep their tokens.
        unlimited = {"authorization": f"Bearer {OTHER_KEY}"}
        wait_until(lambda: flush(program, unlimited).json()["num_tokens"] > 0, "some are dropped")
        wait_until(lambda: flush(program, unlimited).json()["num_tokens"] == 0, "none is left")


def test_limits_that_change_while_the_server_starts_are_read_again_when_it_serves(
    folder: Path, tmp_path: Path
) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text(limits_of(KEY, 1))
    options = ["--api-key", KEY, "--key-limits", str(limits), "--api-workers", "1"]
    with Program(*small_server(folder, *options)) as program:
        wait_until(lambda: list(program.folder.glob("minisgl-*")), "it loads")
        limits.write_text(limits_of(KEY, 2))
        program.process.send_signal(signal.SIGHUP)
        program.wait_ready()
        with open_stream(program, headers=BEARER):
            assert post_completion(program, KEY).status_code == 200
        program.process.send_signal(signal.SIGTERM)
        while program.process.poll() is None:
            program.process.send_signal(signal.SIGHUP)
            time.sleep(0.01)
        assert program.wait() == 0


def scrape(program: Program) -> dict[str, float]:
    response = httpx.get(f"{program.url}/metrics", headers=BEARER, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return {
        sample.name.removeprefix("minisgl_")
        + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_what_was_asked_is_what_is_counted(guarded: Program) -> None:
    before = scrape(guarded)

    def more(name: str) -> float:
        return scrape(guarded)[name] - before.get(name, 0)

    with guarded.client(KEY) as client:
        body = {
            "model": MODEL,
            "prompt": "the dog and the fox " * 8,
            "temperature": 0,
            "max_tokens": 10,
        }
        whole = [
            client.completions.create(**body, extra_body={"ignore_eos": True}) for _ in range(2)
        ]  # type: ignore[call-overload]
        chunks = list(
            client.completions.create(  # type: ignore[call-overload]
                **body,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
        )
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt="a", temperature=-1)
    usages = [*(answer.usage for answer in whole), chunks[-1].usage]
    assert usages[1].prompt_tokens_details.cached_tokens > 0
    assert more("prompt_tokens_total") == sum(usage.prompt_tokens for usage in usages)
    assert more("cached_prompt_tokens_total") == sum(
        usage.prompt_tokens_details.cached_tokens for usage in usages
    )
    assert more("output_tokens_total") == 30
    assert more("inter_token_latency_seconds_count") == 27
    assert more("time_to_first_token_seconds_count") == more("request_duration_seconds_count") == 3
    assert more("request_queue_seconds_count") == more("request_prefill_seconds_count") == 3
    assert more("http_requests_total /v1/completions 200") == 3
    assert (
        more("http_requests_total /v1/completions 400") == more("errors_total invalid_value") == 1
    )
    duration = more("request_duration_seconds_sum")
    assert duration == pytest.approx(
        more("time_to_first_token_seconds_sum") + more("inter_token_latency_seconds_sum"), rel=0.01
    )


def test_the_schedulers_state_is_seen_while_it_works_and_when_it_rests(guarded: Program) -> None:
    aborts = scrape(guarded)["aborts_total"]
    stream = endless_body(stream=True, prompt=["a"] * MAX_RUNNING)
    with (
        httpx.stream(
            "POST", f"{guarded.url}/v1/completions", json=stream, headers=BEARER, timeout=TIMEOUT_S
        ),
        closing(HTTPConnection("127.0.0.1", guarded.port, timeout=TIMEOUT_S)) as one_more,
    ):
        headers = {"content-type": "application/json", **BEARER}
        one_more.request("POST", "/v1/completions", json.dumps(endless_body()), headers)
        seen = wait_until(
            lambda: (now := scrape(guarded))["requests_waiting"] and now, "it is said what waits"
        )
        assert (seen["requests_running"], seen["requests_waiting"]) == (MAX_RUNNING, 1)
        assert 0 < seen["kv_pages_used_ratio"] < 1
    wait_until(
        lambda: scrape(guarded)["aborts_total"] == aborts + MAX_RUNNING + 1, "all are aborted"
    )
    names = ("requests_running", "requests_waiting", "kv_pages_used_ratio")
    wait_until(lambda: all(scrape(guarded)[name] == 0 for name in names), "all have ended")


# ---- the benchmark of a running server


def test_the_benchmark_measures_a_running_server(server: Program, tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    flags = {
        "--url": f"{server.url}/v1",
        "--processes": "2",
        "--warm-up": "1",
        "--token-ids": "4-300",
        "--streams": "2",
        "--stream-output": "400",
        "--long": "1",
        "--long-input": "200",
        "--long-start": "0.1",
        "--out": str(out),
        "--machine": "this one",
    }
    command = [sys.executable, "-m", "minisgl.benchmark.serve", "w7", "--continuous-usage"]
    done = subprocess.run(
        [*command, *(word for option in flags.items() for word in option)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    values = {(line["workload"], line["metric"]): line["value"] for line in lines}

    assert values["mixed", "requests"] == 3
    assert values["mixed", "failed"] == 0
    num_output = values["mixed", "out_tok_s"] * values["mixed", "wall_s"]
    assert num_output == pytest.approx(2 * 400 + 16)
    num_input = values["mixed", "in_tok_s"] * values["mixed", "wall_s"]
    assert num_input == pytest.approx(2 * 512 + 200)
    # Chunks that come in one read are 0 ms apart. Even a busy machine does not read all at once.
    assert values["mixed", "itl_max_ms"] > 0
    assert values["mixed: long prompts", "ttft_p50_ms"] > 0
    assert values["mixed", "cpu scheduler-0"] >= 0
    assert values["mixed", "client_cpu_share"] > 0
    assert "ttft, ms" in done.stdout
