"""POST /generate, which is not OpenAI's: one prompt, our own names of parameters, and one text in return."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from minisgl.message import Prompt, TextLogprobs, UserReply
from minisgl.server.openai.builder import Answer, told
from minisgl.server.openai.common import Answered, FinishReason, Usage
from minisgl.server.openai.generation_request import GenerationRequest, to_prompts
from minisgl.server.openai.validation import TokenId, ValidText
from minisgl.server.parsing.deltas import Delta


class GenerateRequest(GenerationRequest):
    """A text gets the model's special tokens, ids are taken as they are."""

    prompt: ValidText | list[TokenId]
    max_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def prompts(self) -> list[Prompt]:
        return to_prompts(self.prompt)

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class TokenLogprob(Answered):
    """A token and the likeliest in its place; null for the first of a prompt."""

    token: str
    logprob: float | None
    top: list[tuple[str, float]]

    @classmethod
    def of(cls, token: TextLogprobs) -> TokenLogprob:
        return cls(token=token.text, logprob=token.logprob, top=token.top)


def _shape(logprobs: list[TextLogprobs]) -> list[TokenLogprob]:
    return [TokenLogprob.of(token) for token in logprobs]


class Generated(Answered):
    text: str
    finish_reason: FinishReason
    prompt_logprobs: list[TokenLogprob] | None = None
    logprobs: list[TokenLogprob] | None = None
    usage: Usage


class GenerateAnswer(Answer):
    """An event of its stream has the new text; the last one has the reason and the usage too."""

    id_prefix = "gen-"

    def head(self) -> Iterable[str]:
        return []

    def news(self, _index: int, _deltas: list[Delta], reply: UserReply) -> Iterable[str]:
        if not (reply.text or reply.finish or told(reply)):
            return []
        piece: dict[str, Any] = {"text": reply.text, "finish_reason": reply.finish}
        if reply.prompt_logprobs:
            piece["prompt_logprobs"] = [
                token.model_dump() for token in _shape(reply.prompt_logprobs)
            ]
        if reply.logprobs:
            piece["logprobs"] = [token.model_dump() for token in _shape(reply.logprobs)]
        if reply.finish:
            piece["usage"] = self.usage().model_dump()
        return [f"data: {json.dumps(piece, ensure_ascii=False)}\n\n"]

    def tail(self) -> Iterable[str]:
        return ["data: [DONE]\n\n"]

    def whole(self) -> Generated:
        tokens, usage = _shape(self._logprobs[0]), self.usage()
        num_prompt = usage.prompt_tokens if tokens and tokens[0].logprob is None else 0
        return Generated(
            text=self._said[0].content,
            finish_reason=self.finish_reason(0),
            prompt_logprobs=tokens[:num_prompt] or None,
            logprobs=tokens[num_prompt:] if self._has_logprobs else None,
            usage=usage,
        )
