"""OpenAI's embeddings: the last hidden state of each input, from the same engine as the answers."""

from __future__ import annotations

import base64
from typing import Literal

import numpy as np

from minisgl.core import SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.message import Prompt, UserReply
from minisgl.server.openai.common import Answered
from minisgl.server.openai.generation_request import Prompts, to_prompts
from minisgl.server.openai.validation import Strict, ValidText

ONLY_EMBED = SamplingParams(max_tokens=0, embeds=True)


class EmbeddingRequest(Strict):
    """POST /v1/embeddings."""

    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: ValidText | None = None

    def prompts(self) -> list[Prompt]:
        return to_prompts(self.input, "input")

    def check_dimensions(self, width: int) -> None:
        """
        Raises:
            InvalidRequest: another number than the model's width is asked for.
        """
        if self.dimensions not in (None, width):
            message = f"dimensions must be {width}, got {self.dimensions}"
            raise InvalidRequest(message, param="dimensions", code="unsupported_parameter")

    def shape(self, raw: bytes) -> list[float] | str:
        """A vector as it was asked for; base64 is of float32, little-endian, which `raw` is."""
        if self.encoding_format == "base64":
            return base64.b64encode(raw).decode()
        vector: list[float] = np.frombuffer(raw, "<f4").tolist()
        return vector


class Embedding(Answered):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answered):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Answered):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage

    @classmethod
    def of(cls, request: EmbeddingRequest, replies: list[tuple[int, UserReply]]) -> EmbeddingList:
        """From the final replies, in any order."""
        data = [
            Embedding(index=index, embedding=request.shape(reply.embedding or b""))
            for index, reply in sorted(replies, key=lambda it: it[0])
        ]
        num_tokens = sum(reply.num_prompt for _, reply in replies)
        usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
        return cls(data=data, model=request.model, usage=usage)
