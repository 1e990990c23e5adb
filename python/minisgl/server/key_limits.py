"""Rate limits of API keys: requests and tokens per minute, and open requests.

The limits are in a TOML file, one table per key. The file has digests of keys, not the keys:

    [batch]                   # a name, for errors
    sha256 = "9f86d0..."      # printf %s KEY | sha256sum
    requests_per_minute = 60
    tokens_per_minute = 100000
    open_requests = 8

Limits per minute are token buckets: a minute's worth may come at once, and is then refilled evenly.
How many tokens a request takes is known only at its end, so a key may overdraw and then waits
longer.
Imports little: the file is read before the workers start.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import reprlib
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from minisgl.errors import ConfigError, KeyLimitExceeded
from minisgl.processes.shared_numbers import SharedNumbers

logger = logging.getLogger(__name__)

_MAX_LIMIT = 2**53  # counts are shared as floats


@dataclass(frozen=True, slots=True)
class KeyLimit:
    """The limits of one key; None is no limit."""

    sha256: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    open_requests: int | None = None


class Bucket:
    """How much a key may still take; negative when the key has overdrawn.

    Args:
        per_minute: how much is refilled in a minute, and how much there is at most.
        numbers: two, which are zero at first: what was taken, and when that was so.
        clock: the time in seconds, equal in all processes.
    """

    def __init__(
        self,
        per_minute: int,
        numbers: memoryview[float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_minute = per_minute
        self._numbers = numbers
        self._clock = clock

    def wait_s(self, amount: int) -> float:
        """Seconds until the key may take `amount`; 0 if it may now."""
        taken = self._refill()
        return max(0.0, (taken + amount - self._per_minute) * 60 / self._per_minute)

    def take(self, amount: int) -> None:
        """Take `amount` now. The time in which the bucket was full refills none of it."""
        self._numbers[0] = self._refill() + amount

    def _refill(self) -> float:
        """Refill it up to now; returns what is still taken."""
        now = self._clock()
        taken, taken_at = self._numbers
        taken = max(0.0, taken - (now - taken_at) * self._per_minute / 60)
        self._numbers[0] = taken
        self._numbers[1] = now
        return taken


class KeyAccount:
    """How much one key has taken of its limits, in all API processes."""

    NUM_NUMBERS = 5

    def __init__(
        self, name: str, limit: KeyLimit, shared: SharedNumbers, numbers: memoryview[float]
    ) -> None:
        self._name = name
        self._limit = limit
        self._shared = shared
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        if limit.requests_per_minute:
            self._requests = Bucket(limit.requests_per_minute, numbers[0:2])
        if limit.tokens_per_minute:
            self._tokens = Bucket(limit.tokens_per_minute, numbers[2:4])
        self._num_open = numbers[4:5]

    def open(self) -> None:
        """Account for a new request.

        Raises:
            KeyLimitExceeded: it is above a limit.
        """
        with self._shared.locked():
            self._open()

    def _open(self) -> None:
        limit = self._limit
        if limit.open_requests is not None and self._num_open[0] >= limit.open_requests:
            raise KeyLimitExceeded(self._name, "open requests", limit.open_requests, 1)
        if self._tokens:
            self._check(self._tokens, "tokens a minute", limit.tokens_per_minute)
        if self._requests:
            self._check(self._requests, "requests a minute", limit.requests_per_minute)
            self._requests.take(1)
        self._num_open[0] += 1

    def _check(self, bucket: Bucket, what: str, limit: int | None) -> None:
        wait_s = bucket.wait_s(1)
        if wait_s > 0:
            assert limit is not None
            raise KeyLimitExceeded(self._name, what, limit, math.ceil(wait_s))

    def close(self, num_tokens: int) -> None:
        """Account for the end of a request that took `num_tokens`."""
        with self._shared.locked():
            self._num_open[0] -= 1
            self._take_tokens(num_tokens)

    def charge(self, num_tokens: int) -> None:
        """Account for tokens, whether or not their request has ended."""
        with self._shared.locked():
            self._take_tokens(num_tokens)

    def _take_tokens(self, num_tokens: int) -> None:
        if self._tokens:
            self._tokens.take(num_tokens)


def read_key_limits(path: Path, keys: Iterable[str]) -> str:
    """The text of a file of limits. A table that limits none of the keys is a warning.

    Raises:
        ConfigError: it cannot be read, a value is outside its bounds, or it is empty, as an editor
            may leave it for a moment. A file without limits has a comment.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it must be a regular file, because SIGHUP reads it again")
        text = path.read_text()
        if not text.strip():
            raise ValueError("it is empty; a comment says that there are no limits")
        limits = _parse(text)
    except OSError as error:
        raise ConfigError(f"--key-limits {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--key-limits {path}: {error}") from None
    digests = {hashlib.sha256(key.encode()).hexdigest() for key in keys}
    for name, limit in limits.items():
        if limit.sha256 not in digests:
            reason = "limits no key of --api-key or MINISGL_API_KEY"
            logger.warning("--key-limits: table %r %s", name, reason)
    return text


def _parse(text: str) -> dict[str, KeyLimit]:
    """The limits by the names of their tables.

    Raises:
        ValueError: the text is no TOML, or a value is outside its bounds.
    """
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    limits = {name: _parse_table(name, table) for name, table in tables.items()}
    name_of: dict[str, str] = {}
    for name, limit in limits.items():
        first = name_of.setdefault(limit.sha256, name)
        if first != name:
            raise ValueError(f"tables {first!r} and {name!r} have the same sha256")
    return limits


def _parse_table(name: str, table: object) -> KeyLimit:
    if not isinstance(table, dict):
        raise ValueError(f"{name!r} must be a table, got {reprlib.repr(table)}")
    if "sha256" not in table:
        raise ValueError(f"table {name!r}: sha256 is missing")
    known = [each.name for each in fields(KeyLimit)]
    for field, value in table.items():
        if field not in known:
            raise ValueError(f"table {name!r}: {field!r} is no field; those are {', '.join(known)}")
        if field == "sha256":
            _check_digest(name, value)
        elif type(value) is not int or not 1 <= value <= _MAX_LIMIT:
            raise ValueError(
                f"table {name!r}: {field} must be from 1 to 2^53, got {reprlib.repr(value)}"
            )
    return KeyLimit(**table)


def _check_digest(name: str, value: object) -> None:
    """The value is in no message: it may be the key itself."""
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError(f"table {name!r}: sha256 must be 64 digits of 0-9a-f, as a text")


class KeyLimits:
    """The accounts of the keys that have limits. A request ends in the account where it began.

    API processes that share numbers share the accounts of each text.

    Args:
        text: from `read_key_limits`.

    Attributes:
        text_number: which text it is; the first is 0.
    """

    def __init__(self, text: str, shared: SharedNumbers) -> None:
        self._shared = shared
        self._accounts: dict[bytes, KeyAccount] = {}
        self.text_number = 0
        self.replace(text, self.text_number)

    def replace(self, text: str, text_number: int) -> None:
        """Take other limits: all accounts begin anew.

        Args:
            text_number: of this text in all API processes.

        Raises:
            ConfigError: the disk is full; the limits stay as they were.
        """
        limits = _parse(text)
        size = KeyAccount.NUM_NUMBERS
        numbers = self._shared.array(f"key-limits-{text_number}", 1 + size * len(limits))
        self.text_number = text_number
        self._accounts = {
            bytes.fromhex(limit.sha256): KeyAccount(
                name, limit, self._shared, numbers[size * i : size * (i + 1)]
            )
            for i, (name, limit) in enumerate(limits.items())
        }

    def account_of(self, digest: bytes) -> KeyAccount | None:
        """The account of a key, given its SHA-256; None if the file does not limit it."""
        return self._accounts.get(digest)
