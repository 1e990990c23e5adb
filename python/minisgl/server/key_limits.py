"""How much each API key may ask for: requests and tokens a minute, and requests at a time.

The limits stand in a TOML file, a table a key. The file has digests of keys and no key:

    [batch]                   # a name, for errors
    sha256 = "9f86d0..."      # printf %s KEY | sha256sum
    requests_per_minute = 60
    tokens_per_minute = 100000
    open_requests = 8

Limits a minute are token buckets: a minute's worth may come at once, and is then refilled evenly.
How many tokens a request takes is known at its end, so a key may overdraw and waits longer then.
Imports little: the file is read before the workers start.
"""

from __future__ import annotations

import math
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from minisgl.errors import ConfigError, KeyLimitExceeded

_AtLeast1 = Annotated[int, msgspec.Meta(ge=1)]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class KeyLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of one key; None is no limit."""

    sha256: _Digest
    requests_per_minute: _AtLeast1 | None = None
    tokens_per_minute: _AtLeast1 | None = None
    open_requests: _AtLeast1 | None = None


class Bucket:
    """What a key may still take of something; it is below zero when the key has overdrawn.

    Args:
        per_minute: how much is refilled in a minute, and how much there is at most.
        clock: the time in seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled_at = clock()

    def wait_s(self, amount: int) -> float:
        """Seconds until there is so much; 0 if there is."""
        now = self._clock()
        refill = (now - self._filled_at) * self._per_minute / 60
        self._level = min(self._per_minute, self._level + refill)
        self._filled_at = now
        return max(0.0, (amount - self._level) * 60 / self._per_minute)

    def take(self, amount: int) -> None:
        self._level -= amount


class KeyAccount:
    """What one key has taken of its limits."""

    def __init__(self, name: str, limit: KeyLimit) -> None:
        self._name = name
        self._limit = limit
        self._requests = Bucket(limit.requests_per_minute) if limit.requests_per_minute else None
        self._tokens = Bucket(limit.tokens_per_minute) if limit.tokens_per_minute else None
        self._num_open = 0

    def open(self) -> None:
        """Account for a new request.

        Raises:
            KeyLimitExceeded: it is above a limit.
        """
        limit = self._limit
        if limit.open_requests is not None and self._num_open >= limit.open_requests:
            raise KeyLimitExceeded(self._name, "open requests", limit.open_requests, 1)
        if self._tokens:
            self._check(self._tokens, "tokens a minute", limit.tokens_per_minute)
        if self._requests:
            self._check(self._requests, "requests a minute", limit.requests_per_minute)
            self._requests.take(1)
        self._num_open += 1

    def _check(self, bucket: Bucket, what: str, limit: int | None) -> None:
        wait_s = bucket.wait_s(1)
        if wait_s > 0:
            assert limit is not None
            raise KeyLimitExceeded(self._name, what, limit, math.ceil(wait_s))

    def close(self, num_tokens: int) -> None:
        """Account for the end of a request that took so many tokens."""
        self._num_open -= 1
        if self._tokens:
            self._tokens.take(num_tokens)


class KeyLimits:
    """The accounts of the keys in a file. A request ends in the account in which it began.

    Raises:
        ConfigError: the file cannot be read, or a value is outside its bounds.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._accounts: dict[bytes, KeyAccount] = {}
        self.reload()

    def reload(self) -> None:
        """Read the file again: all accounts begin anew. After an error nothing has changed."""
        try:
            tables = tomllib.loads(self._path.read_text())
            limits = msgspec.convert(tables, dict[str, KeyLimit])
        except (OSError, ValueError) as error:
            raise ConfigError(f"--key-limits {self._path}: {error}") from None
        self._accounts = {
            bytes.fromhex(limit.sha256): KeyAccount(name, limit) for name, limit in limits.items()
        }

    def account_of(self, digest: bytes) -> KeyAccount | None:
        """The account of a key, given its SHA-256; None if the file does not limit it."""
        return self._accounts.get(digest)
