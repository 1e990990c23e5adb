"""Limits of API keys: what is above them is refused, and other keys do not notice."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from minisgl.errors import ConfigError, KeyLimitExceeded
from minisgl.message import AbortMsg, KeyLimitsMsg, ReplyError, UserReply
from minisgl.processes.addresses import Addresses
from minisgl.processes.shared_numbers import SharedNumbers
from minisgl.server.api_process import ApiProcess
from minisgl.server.api_worker import _PeerMessages
from minisgl.server.key_limits import Bucket, KeyAccount, KeyLimit, KeyLimits, read_key_limits
from minisgl.server.metrics import Metrics
from minisgl.server.stopwatch import PromptCount, Stopwatch
from tests.server.harness import (
    BODIES,
    CHAT,
    CONFIG,
    App,
    HttpCall,
    assert_is_error,
    run_with_app,
    token_replies,
)

DIGEST = hashlib.sha256(b"sk-one").hexdigest()


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("minisgl"), "propagate", True)
    caplog.set_level("WARNING", "minisgl.server.key_limits")
    return caplog


def test_a_bucket_holds_a_minutes_worth_and_is_refilled_evenly() -> None:
    now = 0.0
    numbers = SharedNumbers().array("bucket", 2)
    bucket = Bucket(30, numbers, lambda: now)
    bucket.take(30)
    assert bucket.wait_s(1) == 2
    bucket.take(30)
    assert bucket.wait_s(1) == 62
    now = 60.0
    assert bucket.wait_s(1) == 2
    now = 1000.0
    assert bucket.wait_s(30) == 0
    assert bucket.wait_s(31) == 2


def test_the_time_in_which_a_bucket_was_full_refills_nothing_that_is_taken_later() -> None:
    now = 0.0
    bucket = Bucket(30, SharedNumbers().array("bucket", 2), lambda: now)
    assert bucket.wait_s(1) == 0  # a request begins
    now = 600.0
    bucket.take(60)  # it ends
    assert bucket.wait_s(1) == 62


@pytest.mark.parametrize(
    ("limits", "num_tokens", "reason", "retry_after_s"),
    [
        ({"requests_per_minute": 1}, 0, "1 requests a minute", 60),
        ({"tokens_per_minute": 60}, 70, "60 tokens a minute", 11),
    ],
)
def test_what_a_minute_has_is_refused_until_there_is_more(
    limits: dict[str, int], num_tokens: int, reason: str, retry_after_s: int
) -> None:
    shared = SharedNumbers()
    numbers = shared.array("account", KeyAccount.NUM_NUMBERS)
    account = KeyAccount("batch", KeyLimit(DIGEST, **limits), shared, numbers)
    account.open()
    account.close(num_tokens)
    with pytest.raises(KeyLimitExceeded, match=f"'batch' is at its limit of {reason}") as refusal:
        account.open()
    assert refusal.value.retry_after_s == retry_after_s


class _WatchedNumbers(SharedNumbers):
    """What another process may read of an array: its numbers whenever the lock is free again."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = self.array("account", KeyAccount.NUM_NUMBERS)
        self.seen: list[list[float]] = []

    @contextmanager
    def locked(self) -> Iterator[None]:
        yield
        self.seen.append(list(self.numbers))


def test_no_process_sees_a_place_free_before_its_tokens_are_charged() -> None:
    shared = _WatchedNumbers()
    limit = KeyLimit(DIGEST, tokens_per_minute=60, open_requests=1)
    account = KeyAccount("batch", limit, shared, shared.numbers)
    account.open()
    account.close(70)
    (_, _, taken, _, num_open) = shared.seen[1]
    assert (taken, num_open) == (70, 0)


TABLE = f"[a]\nsha256 = '{DIGEST}'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = 1", "'a' must be a table, got 1"),
        ("[a]", "table 'a': sha256 is missing"),
        ("[a]\nsha256 = 5", "table 'a': sha256 must be 64 digits of 0-9a-f, as a text"),
        ("[a]\nsha256 = 'sk-secret'", "table 'a': sha256 must be 64 digits of 0-9a-f, as a text"),
        (f"{TABLE}open_requests = 0", "table 'a': open_requests must be from 1 to 2^53, got 0"),
        (f"{TABLE}requests_per_minute = 1.5", "requests_per_minute must be from .*, got 1.5"),
        (f"{TABLE}requests_per_minute = true", "requests_per_minute must be from .*, got True"),
        (f"{TABLE}tokens_per_minute = 1{'0' * 400}", "tokens_per_minute must be from 1 to"),
        (f"{TABLE}requests = 1", "table 'a': 'requests' is no field; those are sha256, requests_"),
        ("[a", "end of document"),
        (f"a = {'[' * 5000}", "nested too deeply"),
        (" \n", "it is empty; a comment says that there are no limits"),
        (None, "No such file"),
    ],
    ids=range(13),
)
def test_a_bad_file_is_refused_with_the_reason(
    text: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message.replace("^", r"\^")) as refusal:
        read_key_limits(path, [])
    assert "\n" not in str(refusal.value)
    assert "sk-secret" not in str(refusal.value), "a key in the place of its digest"


def test_a_comment_alone_limits_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("# none today\n")
    assert read_key_limits(path, []) == "# none today\n"


def test_two_tables_for_one_key_are_refused_by_their_names(tmp_path: Path) -> None:
    """The last one would win, and the limits of the first would not hold."""
    path = tmp_path / "keys.toml"
    path.write_text(TABLE + TABLE.replace("[a]", "[b]"))
    with pytest.raises(ConfigError, match="tables 'a' and 'b' have the same sha256"):
        read_key_limits(path, [])


def test_a_name_that_is_too_long_for_a_file_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"--key-limits xxx.*: File name too long$"):
        read_key_limits(Path("x" * 5000), [])


def test_a_table_that_limits_no_key_is_a_warning_that_names_it(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """As one whose digest was made with a newline behind the key."""
    path = tmp_path / "keys.toml"
    other = hashlib.sha256(b"sk-one\n").hexdigest()
    path.write_text(f"{TABLE}[b]\nsha256 = '{other}'\n")
    read_key_limits(path, ["sk-one", "sk-two"])
    assert [record.getMessage() for record in log.records] == [
        "--key-limits: table 'b' limits no key of --api-key or MINISGL_API_KEY"
    ]


@pytest.mark.timeout(10)
def test_a_pipe_is_refused_because_it_can_be_read_only_once(tmp_path: Path) -> None:
    path = tmp_path / "limits"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="limits: it must be a regular file"):
        read_key_limits(path, [])


@pytest.mark.parametrize("is_shared", [False, True])
def test_other_limits_begin_anew(tmp_path: Path, is_shared: bool) -> None:
    text = f"[a]\nsha256 = '{DIGEST}'\nopen_requests = 1"
    limits = KeyLimits(text, SharedNumbers(tmp_path if is_shared else None))
    before = limits.account_of(bytes.fromhex(DIGEST))
    assert before
    before.open()
    limits.replace(text, 1)
    after = limits.account_of(bytes.fromhex(DIGEST))
    assert after
    after.open()
    before.close(0)  # ends where it began
    with pytest.raises(KeyLimitExceeded):
        after.open()
    limits.replace("", 2)
    assert limits.account_of(bytes.fromhex(DIGEST)) is None


def test_limits_stay_and_are_shared_when_the_disk_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    text = f"[a]\nsha256 = '{DIGEST}'\nopen_requests = 1"
    first, second = (KeyLimits(text, SharedNumbers(tmp_path, 2)) for _ in range(2))
    before = first.account_of(bytes.fromhex(DIGEST))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail)
        with pytest.raises(ConfigError, match="full"):
            first.replace("", 1)
    assert first.account_of(bytes.fromhex(DIGEST)) is before

    accounts = []
    for limits in (first, second):
        limits.replace(text, 1)
        account = limits.account_of(bytes.fromhex(DIGEST))
        assert account
        accounts.append(account)
    accounts[0].open()
    with pytest.raises(KeyLimitExceeded):
        accounts[1].open()


def test_a_process_that_cannot_take_other_limits_keeps_its_own_and_shares_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    text = f"[a]\nsha256 = '{DIGEST}'\nopen_requests = 1"
    first, second = (KeyLimits(text, SharedNumbers(tmp_path, 2)) for _ in range(2))
    process = SimpleNamespace(frontend=None, key_limits=second)
    messages = _PeerMessages(cast(ApiProcess, process), Addresses(tmp_path))
    before = second.account_of(bytes.fromhex(DIGEST))
    first.replace("", 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail)
        messages.apply(KeyLimitsMsg("", 1))
    assert second.account_of(bytes.fromhex(DIGEST)) is before
    assert "too many open files; the limits stay as they were in this process" in caplog.text

    first.replace(text, 2)
    messages.apply(KeyLimitsMsg(text, 2))
    account = first.account_of(bytes.fromhex(DIGEST))
    assert account
    account.open()
    same_account = second.account_of(bytes.fromhex(DIGEST))
    assert same_account
    with pytest.raises(KeyLimitExceeded):
        same_account.open()


def test_limits_that_are_read_again_and_again_leave_nothing_behind(tmp_path: Path) -> None:
    text = f"[a]\nsha256 = '{DIGEST}'\nopen_requests = 1"
    first, second = (KeyLimits(text, SharedNumbers(tmp_path, 2)) for _ in range(2))

    def kept() -> tuple[int, int, list[str]]:
        """Descriptors, mapped files, and files of the folder."""
        maps = Path("/proc/self/maps").read_text().count(str(tmp_path))
        files = sorted(path.name for path in tmp_path.iterdir())
        return len(os.listdir("/proc/self/fd")), maps, files

    before = kept()
    assert before[2] == ["numbers.lock"]
    for text_number in range(1, 101):
        first.replace(text, text_number)
        second.replace(text, text_number)
    assert kept() == before


def test_api_processes_share_what_a_key_has_taken(tmp_path: Path) -> None:
    text = f"[a]\nsha256 = '{DIGEST}'\nopen_requests = 2\nrequests_per_minute = 3"
    accounts = []
    for _ in range(2):
        account = KeyLimits(text, SharedNumbers(tmp_path, 2)).account_of(bytes.fromhex(DIGEST))
        assert account
        accounts.append(account)
    first, second = accounts
    first.open()
    second.open()
    for account in accounts:
        with pytest.raises(KeyLimitExceeded, match="2 open requests"):
            account.open()
    second.close(0)
    first.open()
    first.close(0)
    with pytest.raises(KeyLimitExceeded, match="3 requests a minute"):
        second.open()


def post(app: App, key: str, **fields: Any) -> HttpCall:
    headers = [(b"authorization", b"Bearer " + key.encode())]
    return app.call("POST", CHAT, json.dumps({**BODIES[CHAT], **fields}).encode(), headers=headers)


def test_a_key_at_its_limit_gets_429s_and_another_key_its_answers() -> None:
    text = f"[a]\nsha256 = '{DIGEST}'\nopen_requests = 1\ntokens_per_minute = 5"

    async def scenario(app: App) -> None:
        first = post(app, "sk-one", stream=True)
        msg = await app.worker.receive()
        second = post(app, "sk-one")
        await second.done
        error = assert_is_error(second, 429, type="rate_limit_error", code="rate_limit_exceeded")
        assert "1 open requests" in error["message"]
        assert int(second.headers["retry-after"]) >= 1

        for reply in token_replies("a", "b", num_prompt=9)(msg):
            app.worker.send(reply)
        await first.done
        assert first.status == 200
        third = post(app, "sk-one")
        await third.done
        assert "5 tokens a minute" in assert_is_error(third, 429)["message"]
        assert int(third.headers["retry-after"]) >= 60

        models = [(b"authorization", b"Bearer sk-one")]
        listing = app.call("GET", "/v1/models", headers=models)
        await listing.done
        assert listing.status == 200
        app.worker.answer_with(token_replies("ok"))
        other = post(app, "sk-two")
        await other.done
        assert other.status == 200

    run_with_app(
        scenario,
        config=replace(CONFIG, api_key=("sk-one", "sk-two")),
        key_limits=KeyLimits(text, SharedNumbers()),
    )


def one_after_an_abort(*late: UserReply, **end: Any) -> int | None:
    """The status of a key's next request after its client has left one without a token.

    The key has five tokens a minute.

    Args:
        late: replies that come when the request has ended; their uids are set here.
        end: of a reply that ends it before; without, the client goes away.
    """
    text = f"[a]\nsha256 = '{DIGEST}'\ntokens_per_minute = 5"
    statuses: list[int | None] = []

    async def scenario(app: App) -> None:
        first = post(app, "sk-one", n=2)
        uids = [(await app.worker.receive()).uid for _ in range(2)]
        if end:
            app.worker.send(UserReply(uids[0], **end))
        else:
            first.disconnect()
        await first.done
        for uid in uids[bool(end) :]:
            assert await app.worker.receive() == AbortMsg(uid)
            for reply in late:
                app.worker.send(structs.replace(reply, uid=uid))
        app.worker.answer_with(token_replies("ok"))
        other = post(app, "sk-two")  # its replies come behind the late ones
        await other.done
        assert other.status == 200
        next_one = post(app, "sk-one")
        await next_one.done
        statuses.append(next_one.status)

    run_with_app(
        scenario,
        config=replace(CONFIG, api_key=("sk-one", "sk-two")),
        key_limits=KeyLimits(text, SharedNumbers()),
    )
    return statuses[0]


LATE_TOKEN = UserReply(0, "a", num_prompt=9, num_output=1)


@pytest.mark.parametrize("late", [[], [LATE_TOKEN]], ids=["no token", "a late token"])
def test_a_prompt_that_was_begun_counts_also_if_its_client_leaves(late: list[UserReply]) -> None:
    """Else a key could have prompts computed for nothing, again and again."""
    assert one_after_an_abort(*late, UserReply(0, finish="abort", num_prompt=9)) == 429


def test_a_prompt_that_was_not_begun_counts_nothing() -> None:
    assert one_after_an_abort(UserReply(0, finish="abort")) == 200


def test_a_prompt_that_was_begun_counts_also_if_an_error_ends_it() -> None:
    """As that of a grammar which fails at the first token."""
    error = ReplyError(400, "invalid_request", "the grammar takes too long")
    assert one_after_an_abort(error=error, num_prompt=9) == 429
    assert one_after_an_abort(error=error) == 200


def test_a_prompt_counts_once_however_many_of_its_answers_end_late() -> None:
    metrics = Metrics()
    prompt_count = PromptCount(metrics)
    charged: list[int] = []
    for _ in range(2):
        watch = Stopwatch(metrics, prompt_count)
        watch.charge_late = charged.append
        watch.observe_late(LATE_TOKEN)
        watch.observe_late(UserReply(0, finish="abort", num_prompt=9))
    assert charged == [9]
