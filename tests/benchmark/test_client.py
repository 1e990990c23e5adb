"""One client against sockets that answer in every way a server may, or should not."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from minisgl.benchmark.online.client import Client, Endpoint
from minisgl.benchmark.online.load import shares
from minisgl.benchmark.online.prompts import PromptMaker
from minisgl.benchmark.online.records import RequestRecord
from minisgl.benchmark.online.sse import EventReader
from minisgl.benchmark.online.workloads import Shape, closed_loop, poisson
from minisgl.errors import ConfigError


def event(text: str | None = None, num_output: int | None = None, **fields: Any) -> bytes:
    body: dict[str, Any] = {"id": "cmpl-1", "choices": [], **fields}
    if text is not None:
        body["choices"] = [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}]
    if num_output is not None:
        body["usage"] = {"prompt_tokens": 7, "completion_tokens": num_output, "total_tokens": 9}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


# ---- events


@pytest.mark.parametrize("size", [1, 2, 7, 50, 1000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_events_may_be_cut_anywhere(size: int, newline: bytes) -> None:
    stream = b": ping\n\n" + event("a") + event("b") + event("") + event(num_output=2) + DONE
    stream = stream.replace(b"\n", newline)
    record = RequestRecord("requests")
    reader = EventReader(record)
    for start in range(0, len(stream), size):
        reader.feed(stream[start : start + size], now_s=float(start))

    assert reader.is_done
    assert len(record.chunks_s) == 2
    assert record.num_prompt == 7
    assert record.num_output == 2
    assert not record.counts_tokens


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_events_are_read_as_their_standard_says(size: int, newline: bytes) -> None:
    """https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation"""
    stream = (
        b"\xef\xbb\xbfdata:\n\n"  # a byte order mark, and an event without data
        b"event: ping\n\n"
        b'data: {"choices":\ndata:[{"text": "a"}]}\nid: 1\n\n'  # one event of two lines
        b"data\n\n\n"
        b'database: {oh\ndata:{"usage": {"completion_tokens": 1}}\n\n'
        b"data:[DONE]\n\n"
        b"data: {oh\n"  # an event that does not end is none
    )
    stream = stream.replace(b"\n", newline)
    record = RequestRecord("requests")
    reader = EventReader(record)
    for start in range(0, len(stream), size):
        reader.feed(stream[start : start + size], now_s=float(start))

    assert reader.is_done
    assert len(record.chunks_s) == 1
    assert record.num_output == 1


def test_an_event_is_read_when_its_blank_line_comes() -> None:
    """Whether or not the LF of a CR LF comes after it: a CR alone ends a line, too."""
    record = RequestRecord("requests")
    reader = EventReader(record)
    for at_s, part in enumerate(
        [b'data: {"choices": [{"text": "a"}]}', b"\r", b"\n", b"\r", b"\n"]
    ):
        reader.feed(part, now_s=float(at_s))

    assert record.chunks_s == [3.0]


def test_usage_of_each_chunk_tells_its_tokens() -> None:
    record = RequestRecord("requests")
    reader = EventReader(record)
    reader.feed(event("a", 1) + event("bcd", 4) + event("", 4) + event(num_output=4), 1.0)

    assert record.chunk_tokens == [1, 3]
    assert record.counts_tokens


def test_a_token_without_text_counts() -> None:
    record = RequestRecord("requests")
    EventReader(record).feed(event("", 1) + event("é", 2), 1.0)

    assert record.chunk_tokens == [1, 1]


def test_an_error_in_the_stream_is_kept() -> None:
    record = RequestRecord("requests")
    EventReader(record).feed(event("a") + event(error={"message": "engine failed"}), 1.0)

    assert record.error is not None
    assert "engine failed" in record.error


# ---- connections


def answer(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


GOOD = answer(event("a") + event("b") + event(num_output=2) + DONE)


def exchange(
    *answers: bytes,
    look: Callable[[bytes], None] = lambda head: None,
    timeout_s: float = 10.0,
    nums_read: Sequence[int | None] | None = None,
) -> tuple[list[RequestRecord], int]:
    """Send a request for each answer, one after the other; an empty answer never comes.

    Returns:
        The records, and the number of connections.
    """
    coming = iter(answers)
    connections = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                look(head)
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                json.loads(await reader.readexactly(length))
                reply = next(coming)
                writer.write(reply)
                if b"Connection: close" in reply or b"cut off" in reply:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async def main() -> list[RequestRecord]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        endpoint = Endpoint(f"http://127.0.0.1:{port}/v1", "tiny", "sk-1", timeout_s=timeout_s)
        client = Client(endpoint, asyncio.get_running_loop().time())
        ends = nums_read or [None] * len(answers)
        records = [RequestRecord("requests", num_read=num_read) for num_read in ends]
        for record in records:
            await client.send(endpoint.request([1, 2], 2), record)
        client.close()
        server.close()
        return records

    return asyncio.run(main()), len(connections)


def test_a_connection_serves_one_request_after_the_other() -> None:
    records, num_connections = exchange(GOOD, GOOD, GOOD)

    assert [record.error for record in records] == [None] * 3
    assert [len(record.chunks_s) for record in records] == [2] * 3
    assert num_connections == 1


def test_a_client_that_hangs_up_reads_no_further_and_has_not_failed() -> None:
    records, num_connections = exchange(GOOD, GOOD, nums_read=[1, None])

    assert [record.error for record in records] == [None, None]
    assert [record.has_hung_up for record in records] == [True, False]
    assert [record.is_answered for record in records] == [False, True]
    assert num_connections == 2


@pytest.mark.parametrize("rest", [b"", event(error="boom") + DONE])
def test_a_client_that_has_hung_up_does_not_fail_by_what_came_in_the_same_read(rest: bytes) -> None:
    """It would count twice: as hung up, and as failed."""
    [record], _ = exchange(answer(event("a") + rest), nums_read=[1])

    assert record.has_hung_up
    assert record.error is None


def test_an_error_in_the_stream_is_said_even_if_the_connection_ends_then() -> None:
    whole = answer(event("a") + event(error="boom") + DONE)
    [record], _ = exchange(whole[: -len(DONE)] + b": cut off")

    assert record.error == "in the stream: boom"


def test_a_connection_that_the_server_closes_is_not_used_again() -> None:
    closing = GOOD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    records, num_connections = exchange(closing, GOOD)

    assert [record.error for record in records] == [None, None]
    assert num_connections == 2


@pytest.mark.parametrize("interim", ["100 Continue", "103 Early Hints"])
def test_interim_answers_are_not_the_answer(interim: str) -> None:
    before = f"HTTP/1.1 {interim}\r\nLink: x\r\n\r\n".encode()
    (record, good), num_connections = exchange(before + before + GOOD, GOOD)

    assert [record.error, good.error] == [None, None]
    assert len(record.chunks_s) == 2
    assert num_connections == 1


def test_an_interim_answer_and_no_other_is_a_failure() -> None:
    [record], _ = exchange(b"HTTP/1.1 100 Continue\r\nConnection: close\r\n\r\n")

    assert record.error is not None
    assert "closed before the end" in record.error


def until_the_end(body: bytes, status: str = "200 OK") -> bytes:
    """An answer that ends with its connection (RFC 9112, 6.3)."""
    return f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode() + body


def test_an_answer_may_end_with_its_connection() -> None:
    whole = event("a") + event("b") + event(num_output=2) + DONE
    records, num_connections = exchange(until_the_end(whole), GOOD)

    assert [record.error for record in records] == [None, None]
    assert [len(record.chunks_s) for record in records] == [2, 2]
    assert num_connections == 2


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (answer(b'{"error": "busy"}', "429 Too Many Requests"), 'HTTP 429: {"error": "busy"}'),
        (answer(event("a")), "without [DONE]"),
        (until_the_end(event("a") + event(num_output=1)), "without [DONE]"),
        (until_the_end(b"busy", "503 Busy"), "HTTP 503: busy"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", "closed before the end"),
        (
            b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n",
            "closed before the end",
        ),
        (GOOD[:-20] + b"cut off", "closed before the end"),
        (b"nonsense\r\n\r\n", "HttpParser"),
        (b"HTTP/1.1 101 -\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "HTTP 101"),
        (answer(b"data: {oh\n\n"), "JSON is malformed"),
        (answer(event(error={"message": "engine failed"})), "engine failed"),
        (answer(event("a") + event(num_output=-1) + DONE), ">= 0"),
        (answer(event("a") + event(num_output=10**12) + DONE), "<= 100000000"),
        (answer(event("ab", 2) + event("c", 1) + DONE), "counts fewer tokens than before: 1"),
        (answer(DONE), "no token came"),
        (answer(event(num_output=0) + DONE), "no token came"),
        (
            answer(event(num_output=5) + DONE),
            "usage counts 5 tokens, but no chunk of an answer came",
        ),
        (answer(event("a") + DONE), "no usage counts them"),
        (answer(event("a") + event(num_output=0) + DONE), "no usage counts them"),
    ],
)
def test_what_fails_is_said_and_the_next_request_succeeds(reply: bytes, error: str) -> None:
    (failed, good), _ = exchange(reply, GOOD)

    assert failed.error is not None
    assert error in failed.error
    assert failed.ended_s > 0
    assert good.error is None


def test_an_answer_that_does_not_come_ends() -> None:
    [record], _ = exchange(b"", timeout_s=0.05)

    assert record.error == "no whole answer within 0.05 s"


def test_a_server_that_is_not_there_is_said() -> None:
    async def send() -> RequestRecord:
        server = await asyncio.start_server(lambda *streams: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        endpoint = Endpoint(f"http://127.0.0.1:{port}/v1", "tiny")
        record = RequestRecord("requests")
        await Client(endpoint, 0.0).send(endpoint.request("a", 1), record)
        return record

    assert "ConnectionRefusedError" in str(asyncio.run(send()).error)


def test_the_key_is_sent() -> None:
    heads: list[bytes] = []
    exchange(GOOD, look=heads.append)

    assert b"Authorization: Bearer sk-1\r\n" in heads[0]
    assert heads[0].startswith(b"POST /v1/completions HTTP/1.1\r\n")


def test_a_request_asks_for_a_stream_with_usage() -> None:
    endpoint = Endpoint(
        "https://host/v1/", "tiny", extra={"ignore_eos": True}, has_continuous_usage=True
    )
    head, _, body = endpoint.request([5, 6], 9).partition(b"\r\n\r\n")

    assert endpoint.port == 443
    assert b"POST /v1/completions " in head
    assert json.loads(body) == {
        "model": "tiny",
        "prompt": [5, 6],
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
    }


BAD_HOSTS = ["http://a..b/v1", "http://.a/v1", f"http://{'a' * 64}.b/v1"]
WITH_MORE = ["http://me:secret@host/v1", "http://host/v1?key=1", "http://host/v1#here"]


@pytest.mark.parametrize(
    "url", ["localhost:8000/v1", "ftp://host/v1", "http:///v1", "", *BAD_HOSTS, *WITH_MORE]
)
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=f"--url is {re.escape(url)}; it must be http://HOST"):
        Endpoint(url, "tiny")


@pytest.mark.parametrize("host", ["[::1]", "[fe80::1%25lo]", "host.", "a_b", "xn--bcher-kva.de"])
def test_a_good_url_is_taken(host: str) -> None:
    assert Endpoint(f"http://{host}:8000/v1", "tiny").port == 8000


# ---- the shares of processes

ENDPOINT = Endpoint("http://host/v1", "tiny")
SHAPE = Shape((1, 1), (1, 1))


@pytest.mark.parametrize(("num_processes", "gates"), [(1, [10]), (4, [3, 3, 2, 2]), (50, [1] * 10)])
def test_processes_share_requests_and_concurrency(num_processes: int, gates: list[int]) -> None:
    workload = closed_loop("closed", SHAPE, 30, 10)
    parts = shares(workload, ENDPOINT, PromptMaker(0), num_processes)

    assert [part.concurrency for part in parts] == gates
    assert sorted(each.prompt[0].key for part in parts for each in part.requests) == list(
        range(1, 31)
    )


@pytest.mark.parametrize(("concurrency", "nums"), [(4, [5, 5, 5, 5]), (5, [8, 4, 4, 4])])
def test_a_process_has_requests_for_the_places_that_it_fills(
    concurrency: int, nums: list[int]
) -> None:
    """Else a process with more places ends early, and fewer requests are open than asked for."""
    parts = shares(closed_loop("closed", SHAPE, 20, concurrency), ENDPOINT, PromptMaker(0), 4)

    assert [len(part.requests) for part in parts] == nums


def test_without_a_bound_every_process_sends_what_arrives() -> None:
    parts = shares(poisson("poisson", SHAPE, 30, 5.0), ENDPOINT, PromptMaker(0), 4)

    assert [part.concurrency for part in parts] == [None] * 4
