"""POST /tokenize and /detokenize, which are not OpenAI's: requests and objects of answers."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from minisgl.errors import InvalidRequest
from minisgl.message import Conversation
from minisgl.server.openai.common import ResponseModel
from minisgl.server.openai.generation_request import PromptIds
from minisgl.server.openai.messages import Message
from minisgl.server.openai.validation import FITS_CONTEXT, RequestModel, ValidText


class TokenizeRequest(RequestModel):
    """POST /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: ValidText | None = None
    messages: Annotated[list[Message], Field(min_length=1), FITS_CONTEXT] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        return self

    def content(self) -> str | Conversation:
        if self.prompt is not None:
            return self.prompt
        return Conversation([message.for_template() for message in self.messages or ()])


class Tokenized(ResponseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(RequestModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: PromptIds


class Detokenized(ResponseModel):
    prompt: str
