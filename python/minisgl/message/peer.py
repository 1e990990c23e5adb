"""Messages between the API processes of a server. The first of them is the parent process."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from minisgl.message.base import BaseMsg
from minisgl.worker_info import WorkerInfo


class ServeMsg(BaseMsg, frozen=True):
    """The first → the others: the workers are ready, serve.

    Attributes:
        workers: what they say of themselves.
        created: when the model was loaded, in seconds since the epoch.
        secret: which the salts of API keys are made with.
        key_limits: the text of the file of limits, if there is one.
    """

    workers: list[WorkerInfo]
    created: int
    secret: bytes
    key_limits: str | None = None


class SuspendMsg(BaseMsg, frozen=True):
    """The first → the others: there are no workers, for about so many seconds."""

    reason: str
    outage_s: int


class ResumeMsg(BaseMsg, frozen=True):
    """The first → the others: the workers of this epoch are ready."""

    epoch: int


class ReplaceMsg(BaseMsg, frozen=True):
    """The first → the others: a tokenizer or the detokenizer has failed and has a successor.

    Attributes:
        name: of the process.
        life: how often it was replaced in this epoch.
        reason: why it failed.
    """

    name: str
    life: int
    reason: str


class KeyLimitsMsg(BaseMsg, frozen=True):
    """The first → the others: the limits of API keys have changed.

    Attributes:
        text: of their file.
        text_number: as in `KeyLimits`.
    """

    text: str
    text_number: int


class RefuseMsg(BaseMsg, frozen=True):
    """The first → the others: refuse new requests from now on."""

    reason: str


class EndMsg(BaseMsg, frozen=True):
    """The first → the others: end open requests with this error, and then the process."""

    reason: str


class MetricsQuery(BaseMsg, frozen=True):
    """Any → all others: send your numbers. The answer is a MetricsReply with this number.

    api: who asks.
    """

    api: int
    number: int


class MetricSample(BaseMsg, frozen=True):
    """One number of a metric of Prometheus, by its name and labels."""

    name: str
    labels: dict[str, str]
    value: float


class MetricsReply(BaseMsg, frozen=True):
    """The answer to a MetricsQuery: the numbers that this process has counted."""

    number: int
    samples: list[MetricSample] = msgspec.field(default_factory=list)


PeerMsg: TypeAlias = (
    ServeMsg
    | SuspendMsg
    | ResumeMsg
    | ReplaceMsg
    | KeyLimitsMsg
    | RefuseMsg
    | EndMsg
    | MetricsQuery
    | MetricsReply
)
