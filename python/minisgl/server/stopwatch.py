"""The times and the tokens of one answer: for the metrics, the access log and traces."""

from __future__ import annotations

import time
from collections.abc import Callable

from minisgl.message import UserReply
from minisgl.server.metrics import Metrics


class PromptCount:
    """Counts the tokens of a prompt once, with the first of its answers that has a token or ends.

    An answer that ends before a step has computed any of its prompt does not say how many they are.
    """

    __slots__ = ("_is_counted", "_metrics")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._is_counted = False

    def count(self, reply: UserReply) -> bool:
        """Count the tokens, if that is to be done; returns whether it was."""
        if self._is_counted or not reply.num_prompt:
            return False
        self._is_counted = True
        self._metrics.prompt_tokens.inc(reply.num_prompt)
        self._metrics.cached_tokens.inc(reply.num_cached)
        return True


class Stopwatch:
    """Measures the times of one answer, from now on, and counts its tokens.

    They count as they are delivered, whether or not the client reads them. The times are by
    `time.perf_counter`.

    Args:
        prompt_count: of its prompt, which other answers may share; None makes one.

    Attributes:
        started_at: when its prompt came.
        admitted_at: when it got its first pages. The time in which the first output came here
            counts as waiting.
        first_output_at: when its first token came, or its end without one.
        last_token_at: when its latest token came.
        num_prompt, num_cached: tokens of the prompt, and of it from the prefix cache; both are 0
            but for the answer with which the prompt is counted.
        num_output: tokens of the answer.
        charge_late: is called with the number of tokens of a prompt that is counted after its
            request has ended.
    """

    __slots__ = (
        "_metrics",
        "_prompt_count",
        "admitted_at",
        "charge_late",
        "first_output_at",
        "last_token_at",
        "num_cached",
        "num_output",
        "num_prompt",
        "started_at",
    )

    def __init__(self, metrics: Metrics, prompt_count: PromptCount | None = None) -> None:
        self._metrics = metrics
        self._prompt_count = prompt_count or PromptCount(metrics)
        self.num_prompt = 0
        self.num_cached = 0
        self.num_output = 0
        self.started_at = time.perf_counter()
        self.admitted_at: float | None = None
        self.first_output_at: float | None = None
        self.last_token_at = self.started_at
        self.charge_late: Callable[[int], None] | None = None

    def observe(self, reply: UserReply) -> None:
        """Account for a reply as it is delivered."""
        now = time.perf_counter()
        num_new = reply.num_output - self.num_output
        is_first = self.num_output == 0
        if is_first and (num_new or reply.is_final):
            self._count_prompt(reply)
        if is_first and (num_new or reply.finish):
            self.first_output_at = now
            if reply.prefill_s is not None:
                self.admitted_at = max(self.started_at, now - reply.prefill_s)
                self._metrics.queue_time.observe(self.admitted_at - self.started_at)
                self._metrics.prefill_time.observe(now - self.admitted_at)
        if num_new > 0:
            if is_first:
                self._metrics.time_to_first_token.observe(now - self.started_at)
                self._metrics.inter_token_latency.observe(0.0, times=num_new - 1)
            else:
                latency = (now - self.last_token_at) / num_new
                self._metrics.inter_token_latency.observe(latency, times=num_new)
            self._metrics.output_tokens.inc(num_new)
            self.last_token_at = now
            self.num_output = reply.num_output
        if reply.finish is not None:
            self._metrics.request_duration.observe(now - self.started_at)

    def observe_late(self, reply: UserReply) -> None:
        """Account for a reply that comes when the answer was aborted: count its prompt."""
        if self._count_prompt(reply) and self.charge_late is not None:
            self.charge_late(reply.num_prompt)

    def _count_prompt(self, reply: UserReply) -> bool:
        """Count the prompt with this answer, unless it was; returns whether it is now."""
        is_new = self._prompt_count.count(reply)
        if is_new:
            self.num_prompt = reply.num_prompt
            self.num_cached = reply.num_cached
        return is_new
