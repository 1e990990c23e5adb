"""POST /v1/embeddings: the request, the objects of an answer, and how they are made.

An embedding is the last hidden state of an input, from the engine that also generates text.
Reference: https://platform.openai.com/docs/api-reference/embeddings
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from minisgl.core import SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.message import Prompt, UserReply
from minisgl.server.answers.objects import ResponseModel, Usage
from minisgl.server.requests.generation_request import Prompts, parse_prompts
from minisgl.server.requests.prompts import PromptRequest
from minisgl.server.requests.unsupported import Refused, TrueOnly
from minisgl.server.requests.validation import Integer, NeutralOnly, ValidText

EMBEDDING_SAMPLING = SamplingParams(max_tokens=0, embeds=True)


class EmbeddingRequest(PromptRequest):
    """POST /v1/embeddings."""

    prompt_field: ClassVar[str] = "input"

    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = None
    user: ValidText | None = None
    add_special_tokens: TrueOnly = None
    embed_dtype: Annotated[Any, NeutralOnly("float32")] = None
    endianness: Annotated[Any, NeutralOnly("native", "little")] = None
    input_type: Refused = None
    messages: Annotated[Any, NeutralOnly(instead="input")] = None
    normalize: TrueOnly = None
    truncate_prompt_tokens: Refused = None

    def read_prompts(self) -> list[Prompt]:
        return parse_prompts(self.input, "input")

    def check_dimensions(self, width: int) -> None:
        """
        Raises:
            InvalidRequest: `dimensions` is not the model's width.
        """
        if self.dimensions not in (None, width):
            message = f"dimensions must be {width}, got {self.dimensions}"
            raise InvalidRequest(message, param="dimensions", code="unsupported_parameter")


class Embedding(ResponseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(ResponseModel):
    prompt_tokens: int
    total_tokens: int

    def as_usage(self) -> Usage:
        return Usage(prompt_tokens=self.prompt_tokens, total_tokens=self.total_tokens)


class EmbeddingList(ResponseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def build_embeddings(
    request: EmbeddingRequest, replies: list[tuple[int, UserReply]]
) -> EmbeddingList:
    """The answer, from the final replies in any order."""
    vectors = {index: reply.embedding or b"" for index, reply in replies}
    data = [
        Embedding(index=index, embedding=_encode(vectors[index], request.encoding_format))
        for index in sorted(vectors)
    ]
    num_tokens = sum(reply.num_prompt for _, reply in replies)
    usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return EmbeddingList(data=data, model=request.model, usage=usage)


def _encode(vector: bytes, encoding_format: str | None) -> list[float] | str:
    """A vector of float32, little-endian, as numbers or as base64."""
    if encoding_format == "base64":
        return base64.b64encode(vector).decode()
    numbers: list[float] = np.frombuffer(vector, "<f4").tolist()
    return numbers
