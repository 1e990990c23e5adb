"""Load for any OpenAI-compatible server: streaming completions at given times, and when each piece of text came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI


@dataclass(frozen=True, slots=True)
class Load:
    """One request of a load: token ids, tokens to generate, and when to send it, in seconds from the start."""

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
        return self.pieces_s[0] - self.sent_s

    @property
    def inter_token_s(self) -> list[float]:
        return [b - a for a, b in zip(self.pieces_s, self.pieces_s[1:], strict=False)]


async def run_load(
    base_url: str, model: str, load: Sequence[Load], concurrency: int
) -> list[RequestTrace]:
    """Send all requests, at most `concurrency` at a time; greedy, past end-of-sequence tokens.

    Args:
        base_url: up to and with /v1.
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
        except Exception as error:  # whatever fails belongs to this request's trace
            trace.error = f"{type(error).__name__}: {error}"
    return trace
