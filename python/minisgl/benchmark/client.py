"""Load for any OpenAI-compatible server: streams completions and keeps when their text came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from openai import AsyncOpenAI


@dataclass(frozen=True, slots=True)
class Load:
    """One request of a load.

    Attributes:
        prompt: token ids.
        max_tokens: how many to generate.
        start_s: when to send it, in seconds from the start of the load.
    """

    prompt: list[int]
    max_tokens: int
    start_s: float = 0.0


@dataclass(slots=True)
class RequestTrace:
    """When things happened to one request, in seconds from the start of the load.

    Attributes:
        pieces_s: when each piece of text arrived.
        error: why it failed, if it did.
    """

    sent_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)
    num_output: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """The time to the first token, or rather to its text."""
        return self.pieces_s[0] - self.sent_s

    @property
    def inter_token_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.pieces_s)]


async def run_load(
    base_url: str, model: str, load: Sequence[Load], concurrency: int
) -> list[RequestTrace]:
    """Send all requests, at most `concurrency` at a time; greedy, and past end-of-sequence tokens.

    Args:
        base_url: up to and with /v1.

    Returns:
        A trace for each item of the load, in its order.
    """
    async with AsyncOpenAI(
        base_url=base_url, api_key="unused", max_retries=0, timeout=None
    ) as client:
        gate = asyncio.Semaphore(concurrency)
        began = time.perf_counter()
        return await asyncio.gather(*(_send(client, model, item, gate, began) for item in load))


async def _send(
    client: AsyncOpenAI, model: str, item: Load, gate: asyncio.Semaphore, began: float
) -> RequestTrace:
    trace = RequestTrace()
    await asyncio.sleep(max(0.0, item.start_s - (time.perf_counter() - began)))
    async with gate:
        trace.sent_s = time.perf_counter() - began
        try:
            stream: Any = await client.completions.create(
                model=model,
                prompt=item.prompt,
                max_tokens=item.max_tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].text:
                    trace.pieces_s.append(time.perf_counter() - began)
                if chunk.usage:
                    trace.num_output = chunk.usage.completion_tokens
        except Exception as error:  # whatever fails is recorded in this request's trace
            trace.error = f"{type(error).__name__}: {error}"
    return trace
