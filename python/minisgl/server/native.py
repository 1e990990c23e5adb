"""POST /generate, which is not OpenAI's: one prompt, our own names of parameters, and one text in return."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel

from minisgl.message import Prompt, TextLogprobs, TokenIds, UserReply, pack_ids
from minisgl.server.answers import Answer
from minisgl.server.deltas import Content, Delta
from minisgl.server.objects import FinishReason, Usage
from minisgl.server.protocol import GenerationRequest, TokenId, ValidText, require_prompts


class GenerateRequest(GenerationRequest):
    """A text gets the model's special tokens, ids are taken as they are."""

    prompt: ValidText | list[TokenId]
    logprobs: int | None = None
    n: Literal[1] | None = None
    stream_options: None = None

    def prompts(self) -> list[Prompt]:
        require_prompts([self.prompt])
        return [self.prompt if isinstance(self.prompt, str) else TokenIds(pack_ids(self.prompt))]

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class TokenLogprob(BaseModel):
    """A token and the likeliest in its place."""

    token: str
    logprob: float
    top: list[tuple[str, float]]

    @classmethod
    def of(cls, told: TextLogprobs) -> TokenLogprob:
        return cls(token=told.text, logprob=told.own, top=told.top)


class Generated(BaseModel):
    text: str
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None = None
    usage: Usage


class GenerateAnswer(Answer):
    """An event of its stream has the new text; the last one has the reason and the usage too."""

    id_prefix = "gen"
    chunk_object = "generate"

    def _event(self, choices: list[dict[str, Any]], **_: Any) -> str:
        return f"data: {json.dumps(choices[0], ensure_ascii=False)}\n\n"

    def opening(self, index: int) -> list[dict[str, Any]]:  # noqa: ARG002
        return []

    def pieces(self, index: int, deltas: list[Delta], reply: UserReply) -> list[dict[str, Any]]:  # noqa: ARG002
        if not (deltas or reply.finish or reply.logprobs):
            return []
        text = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        piece: dict[str, Any] = {"text": text, "finish_reason": reply.finish}
        if self._has_logprobs:
            piece["logprobs"] = [TokenLogprob.of(told).model_dump() for told in [reply.logprobs] if told]
        if reply.finish:
            piece["usage"] = self.usage().model_dump()
        return [piece]

    def whole(self) -> Generated:
        return Generated(
            text=self._said[0].content,
            finish_reason=self.finish_reason(0),
            logprobs=[TokenLogprob.of(told) for told in self._logprobs[0]] if self._has_logprobs else None,
            usage=self.usage(),
        )
