"""Reads the server-sent events of a completion, byte by byte, into a request's record.

A chunk may have several tokens, since servers merge waiting tokens. Their number is known only if
the server sends usage with every chunk (`continuous_usage_stats`).

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from minisgl.benchmark.online.records import RequestRecord

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DONE = b"[DONE]"
_Count = Annotated[int, msgspec.Meta(ge=0, le=10**8)]  # no context is that long


class _Choice(msgspec.Struct):
    text: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


class EventReader:
    """Reads one stream.

    Attributes:
        is_done: whether the stream's last event has come.
        has_chunks: whether an event had a part of the answer, also one without text.
    """

    def __init__(self, record: RequestRecord) -> None:
        self.is_done = False
        self.has_chunks = False
        self._record = record
        self._rest = b""  # the beginning of a line
        self._data: list[bytes] = []  # of the event that has begun, by lines
        self._has_begun = False
        self._may_continue_crlf = False

    def feed(self, data: bytes, now_s: float) -> None:
        """Process received bytes, which may begin and end anywhere.

        Raises:
            msgspec.MsgspecError: an event is no JSON of a completion, or has impossible counts.
        """
        if self._may_continue_crlf:
            data = data.removeprefix(b"\n")
        self._may_continue_crlf = data.endswith(b"\r")
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if lines and not self._has_begun:
            self._has_begun = True
            lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:])
            elif not line and self._data:
                payload = b"\n".join(self._data).strip()
                self._data.clear()
                if payload:  # without data it is a sign of life
                    self._take(payload, now_s)

    def _take(self, payload: bytes, now_s: float) -> None:
        if payload == _DONE:
            self.is_done = True
            return
        event = _decoder.decode(payload)
        record = self._record
        num_before = record.num_output
        if event.error is not None:
            record.error = f"in the stream: {event.error}"
        if event.usage is not None:
            record.num_prompt = event.usage.prompt_tokens
            record.num_output = event.usage.completion_tokens
        num_new = record.num_output - num_before
        if num_new < 0:
            raise msgspec.ValidationError(
                f"usage counts fewer tokens than before: {record.num_output} after {num_before}"
            )
        if event.choices:
            self.has_chunks = True
        if event.choices and (num_new or any(choice.text for choice in event.choices)):
            record.chunks_s.append(now_s)
            if event.usage is not None:
                record.chunk_tokens.append(num_new)
