"""The times of one request's events, in seconds from the start of the load."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """A request and its answer. Only the client that sends it writes here.

    Attributes:
        due_s: when it was to be sent, at the earliest.
        sent_s: when it was sent, before a connection was chosen or opened.
        chunks_s: when each chunk that has tokens was read.
        chunk_tokens: how many tokens each chunk has; empty where the server does not say.
        num_read: chunks with tokens after which the client hangs up; None if it never does.
        has_hung_up: whether it has.
        error: why it failed, if it did.
    """

    group: str
    due_s: float = 0.0
    sent_s: float = 0.0
    ended_s: float = 0.0
    chunks_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    num_prompt: int = 0
    num_output: int = 0
    num_read: int | None = None
    has_hung_up: bool = False
    error: str | None = None

    @property
    def is_answered(self) -> bool:
        """Whether the whole answer has come."""
        return self.error is None and not self.has_hung_up

    @property
    def ttft_s(self) -> float | None:
        """The time to the first token, or rather to the first chunk that has one."""
        return self.chunks_s[0] - self.sent_s if self.chunks_s else None

    @property
    def tpot_s(self) -> float | None:
        """The time per token after the first chunk; None if all came in one chunk."""
        num_first = self.chunk_tokens[0] if self.counts_tokens else 1
        num_later = self.num_output - num_first
        if len(self.chunks_s) < 2 or num_later < 1:
            return None
        return (self.chunks_s[-1] - self.chunks_s[0]) / num_later

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def counts_tokens(self) -> bool:
        """Whether the number of tokens of every chunk is known."""
        return 0 < len(self.chunk_tokens) == len(self.chunks_s)
