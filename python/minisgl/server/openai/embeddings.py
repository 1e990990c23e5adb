"""POST /v1/embeddings: the request, the objects of an answer, and how they are made.

An embedding is the last hidden state of an input, from the engine that also generates text.
Reference: https://platform.openai.com/docs/api-reference/embeddings
"""

from __future__ import annotations

import asyncio
import base64
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np

from minisgl.core import SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.message import Prompt, UserReply
from minisgl.server.answers.objects import ResponseModel
from minisgl.server.requests.generation_request import Prompts, parse_prompts
from minisgl.server.requests.prompts import PromptRequest
from minisgl.server.requests.unsupported import Refused, TrueOnly
from minisgl.server.requests.validation import Integer, NeutralOnly, ValidText
from minisgl.utils.excerpts import excerpt

_MAX_BYTES_IN_LOOP = 2**17  # of vectors: they take milliseconds
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
            message = f"dimensions must be {width}, got {excerpt(self.dimensions)}"
            raise InvalidRequest(message, param="dimensions", code="unsupported_parameter")


class Embedding(ResponseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(ResponseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(ResponseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


async def encode_embeddings(
    request: EmbeddingRequest, replies: list[tuple[int, UserReply]]
) -> list[bytes]:
    """The JSON of an `EmbeddingList`, in pieces, from the final replies in any order.

    That of many vectors takes up to a second; a thread makes it, one vector at a time, and the loop
    goes on. They stay apart, because the loop would wait while they are joined.
    """
    vectors = {index: reply.embedding or b"" for index, reply in replies}
    if sum(map(len, vectors.values())) > _MAX_BYTES_IN_LOOP:
        entries = await asyncio.to_thread(_encode_all, vectors, request.encoding_format)
    else:
        entries = _encode_all(vectors, request.encoding_format)
    num_tokens = sum(reply.num_prompt for _, reply in replies)
    usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    answer = EmbeddingList(data=[], model=request.model, usage=usage)
    begin, end = answer.model_dump_json().encode().split(b"[]", 1)
    return [begin, b"[", *entries, b"]", end]


def _encode_all(vectors: dict[int, bytes], encoding_format: str | None) -> list[bytes]:
    """The entries of the list, with a comma before each but the first."""
    return [
        (b"," if number else b"") + _encode_entry(index, vectors[index], encoding_format)
        for number, index in enumerate(sorted(vectors))
    ]


def _encode_entry(index: int, vector: bytes, encoding_format: str | None) -> bytes:
    """The JSON of an `Embedding`."""
    entry = {"object": "embedding", "index": index, "embedding": _encode(vector, encoding_format)}
    return msgspec.json.encode(entry)


def _encode(vector: bytes, encoding_format: str | None) -> list[float] | str:
    """A vector of float32, little-endian, as numbers or as base64."""
    if encoding_format == "base64":
        return base64.b64encode(vector).decode()
    numbers: list[float] = np.frombuffer(vector, "<f4").tolist()
    return numbers
