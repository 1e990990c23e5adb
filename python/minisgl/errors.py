"""The error tree.

    MiniSGLError
    ├─ ConfigError            before start: names the option, the value, what is allowed
    │   └─ CheckpointError    a model's files are missing, damaged, or of an unknown architecture
    ├─ RequestError           one request is refused or ended; has `status`, `code` and `param`
    │   ├─ InvalidRequest     400: a field's value; names the bound
    │   ├─ PromptTooLong      400: prompt and answer do not fit the context
    │   ├─ InvalidApiKey      401
    │   ├─ UnknownModel       404
    │   ├─ ResponseNotFound   404: no response is kept
    │   ├─ SlowReader         408: an answer is not read
    │   ├─ QueueFull          429
    │   ├─ KeyLimitExceeded   429: a key asks for more than it may
    │   ├─ TooManyBodies      429
    │   ├─ RequestTimeout     504: an answer takes too long
    │   ├─ Unavailable        503: no request is accepted now
    │   ├─ TooManyConnections 503
    │   ├─ NoNumbers          500: the model's logits are not numbers
    │   ├─ UnknownHttpVersion 505
    │   └─ OutOfMemory        503: a request is ended because the device's memory is full
    ├─ CapacityError          more pages are taken than are left: our bug, since callers ask before
    ├─ StepOutOfMemory        the device's memory is full; the scheduler ends a request of the step
    ├─ KernelInputError       a tensor contract is broken: names the tensor, expected, actual
    ├─ OutputFailed           stdout cannot be written
    ├─ ClientGone             the client has disconnected; the request is aborted
    └─ EngineFailed           an engine or worker is gone: answers that have begun end with it

Raised anywhere, caught by type at a border (HTTP handler, worker entry, `LLM`). An `assert` is for
our own bugs only.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ClientGone",
    "ConfigError",
    "EngineFailed",
    "InvalidApiKey",
    "InvalidRequest",
    "KernelInputError",
    "KeyLimitExceeded",
    "MiniSGLError",
    "NoNumbers",
    "OutOfMemory",
    "OutputFailed",
    "PromptTooLong",
    "QueueFull",
    "RequestError",
    "RequestTimeout",
    "ResponseNotFound",
    "SlowReader",
    "StepOutOfMemory",
    "TooManyBodies",
    "TooManyConnections",
    "Unavailable",
    "UnknownHttpVersion",
    "UnknownModel",
]


class MiniSGLError(Exception):
    """Root of everything that this package raises on purpose."""


class ConfigError(MiniSGLError):
    """An option or a model folder cannot work; said before anything starts."""


class CheckpointError(ConfigError):
    """A checkpoint is missing, truncated, corrupt, wrongly shaped, or unknown here."""


class RequestError(MiniSGLError):
    """One request is refused, or ends with this; the others go on.

    `status` is the HTTP status, `code` the OpenAI error code, `param` the offending field.
    `retry_after_s` is what a 429 or a 503 says in `Retry-After`.
    """

    status: int = 400
    code: str = "invalid_value"
    retry_after_s: int = 1

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or type(self).code

    def name_field(self, field_of: Callable[[str | None], str | None]) -> None:
        """Say which field of the client is wrong, where the engine has named its parameter.

        An error that no field has caused names none.

        Args:
            field_of: from a parameter, or None, to a field of the request.
        """
        if self.status == 400:
            self.param = field_of(self.param)


class InvalidRequest(RequestError):
    """A field has a value outside its bounds, or is not supported."""


class PromptTooLong(RequestError):
    """Prompt plus requested tokens exceed what the engine can hold.

    The words are OpenAI's: clients recognise the error by them, or by its code.

    Args:
        limit: the length of the context, in tokens.
        cause: what exceeds it, as a clause.
        reason: why it is not longer, as a sentence; None if that is the model's own length.
    """

    code = "context_length_exceeded"
    words = (
        "This model's maximum context length is {limit} tokens. However, {cause}. "
        "Please reduce the length of the messages or completion."
    )

    def __init__(self, limit: int, cause: str, reason: str | None = None) -> None:
        message = self.words.format(limit=limit, cause=cause)
        super().__init__(message if reason is None else f"{message} {reason}.")

    @classmethod
    def of_tokens(
        cls,
        num_prompt: int,
        num_answer: int,
        limit: int,
        *,
        by_min_tokens: bool = False,
        reason: str | None = None,
    ) -> PromptTooLong:
        """The error of a prompt whose tokens were counted.

        Args:
            by_min_tokens: it is `min_tokens` that asks for so long an answer.
            reason: why the limit is not higher.
        """
        asked_by = ", by min_tokens" if by_min_tokens else ""
        return cls(
            limit,
            f"you requested {num_prompt + num_answer} tokens "
            f"({num_prompt} in the messages, {num_answer} in the completion{asked_by})",
            reason,
        )


class InvalidApiKey(RequestError):
    """The request has no key, or an unknown one. The message does not repeat it.

    Args:
        header: how a key is sent.
    """

    status = 401
    code = "invalid_api_key"

    def __init__(self, header: str = "Authorization: Bearer KEY") -> None:
        super().__init__(f"this server wants an API key that it knows: {header}")


class UnknownModel(RequestError):
    """The request names a model that is not served here.

    Args:
        name: an excerpt of it.
    """

    status = 404
    code = "model_not_found"

    def __init__(self, name: str, served: str) -> None:
        super().__init__(
            f"the model {name} does not exist; this server has {served!r}", param="model"
        )


class ResponseNotFound(RequestError):
    """A response is asked for by its id.

    Args:
        name: an excerpt of it.
    """

    status = 404
    code = "response_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is no response {name}: this server stores no responses", param="response_id"
        )


class SlowReader(RequestError):
    """A stream's reader is so far behind that what waits for it takes too much memory."""

    status = 408
    code = "slow_reader"

    def __init__(self, num_unread: int, limit: int) -> None:
        super().__init__(
            f"{num_unread} log probabilities of this answer wait to be read; the limit is {limit}"
        )


class QueueFull(RequestError):
    """Too many requests are open."""

    status = 429
    code = "queue_full"

    def __init__(self, num_more: int, num_open: int, limit: int) -> None:
        super().__init__(
            f"there is no room for {num_more} more: {num_open} requests are open and the limit is "
            f"{limit}; try again later"
        )


class KeyLimitExceeded(RequestError):
    """The request's key has taken all that it may take for now.

    Args:
        name: of the key, in the operator's file.
        what: is limited.
    """

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, name: str, what: str, limit: int, retry_after_s: int) -> None:
        super().__init__(
            f"the API key {name!r} is at its limit of {limit} {what}; "
            f"try again in {retry_after_s} s"
        )
        self.retry_after_s = retry_after_s


class TooManyBodies(RequestError):
    """The bodies of other requests take all the memory that there is for them."""

    status = 429
    code = "too_many_bodies"

    def __init__(self, num_bytes: int, limit: int) -> None:
        super().__init__(
            f"{num_bytes} bytes of bodies have come and the limit is {limit}; try again later"
        )


class RequestTimeout(RequestError):
    """A request has taken longer than this server lets one take."""

    status = 504
    code = "timeout"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the request took longer than the limit of {limit_s:g} s")


class Unavailable(RequestError):
    """The server accepts no request now: it is shutting down, or its engine starts again."""

    status = 503
    code = "unavailable"

    def __init__(self, reason: str, retry_after_s: int = 1) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class TooManyConnections(RequestError):
    """The request has come over a connection above the limit."""

    status = 503
    code = "too_many_connections"

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} connections are open, which is the limit; try again later")


class UnknownHttpVersion(RequestError):
    """The request is in another major version of HTTP."""

    status = 505
    code = "unknown_http_version"

    def __init__(self, version: str) -> None:
        super().__init__(f"this server reads HTTP/1.1 and HTTP/1.0, got HTTP/{version}")


class NoNumbers(RequestError):
    """The model has given logits of which none that may be chosen is a number."""

    status = 500
    code = "no_numbers"

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are not numbers (NaN or infinite), so no token can be chosen; "
            "its weights may be damaged, or exceed the range of --dtype"
        )


class OutOfMemory(RequestError):
    """The device's memory is full, and the request was the least urgent of a step."""

    status = 503
    code = "out_of_memory"

    def __init__(self) -> None:
        super().__init__(
            "the memory of the device is full; this request was ended so that others go on. "
            "Try again later"
        )


class CapacityError(MiniSGLError):
    """Fewer pages are free or evictable than were asked for."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} pages wanted, {available} free or evictable")


class StepOutOfMemory(MiniSGLError):
    """The device's memory was full before a step was launched; what the step held is freed."""


class KernelInputError(MiniSGLError):
    """A kernel was called with tensors that break its contract."""


class OutputFailed(MiniSGLError):
    """What a program writes to stdout is lost."""


class ClientGone(MiniSGLError):
    """The client of a request has disconnected; its answer will not be read."""


class EngineFailed(MiniSGLError):
    """The engine is gone; requests that were open have no answer.

    To a client it is an error as others are, so it has what a `RequestError` has.
    """

    status = 503
    code = "engine_failed"
    param = None
    retry_after_s = 1
