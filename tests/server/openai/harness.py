"""Requests of chats and text completions, as they come through JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minisgl.core import SamplingParams
from minisgl.server.openai.chat import ChatRequest
from minisgl.server.openai.completions import CompletionRequest

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
TEXT = {"model": "m", "prompt": "hello"}
BODIES = {ChatRequest: CHAT, CompletionRequest: TEXT}
both = pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])


def read(kind: type[ChatRequest] | type[CompletionRequest], **fields: Any) -> Any:
    """The request as it comes over the wire: through JSON."""
    return kind.model_validate(json.loads(json.dumps({**BODIES[kind], **fields})))


def sampling(kind: type[ChatRequest] | type[CompletionRequest], **fields: Any) -> SamplingParams:
    return read(kind, **fields).sampling({})  # type: ignore[no-any-return]
