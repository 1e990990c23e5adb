"""POST /tokenize and /detokenize, which are not OpenAI's: requests and objects of answers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from minisgl.errors import InvalidRequest
from minisgl.message import Conversation, Prompt, TokenIds, pack_ids
from minisgl.server.answers.objects import ResponseModel
from minisgl.server.openai.messages import Message
from minisgl.server.requests.generation_request import PromptIds
from minisgl.server.requests.prompts import PromptRequest
from minisgl.server.requests.unsupported import (
    EmptyListOnly,
    EmptyObjectOnly,
    FalseOnly,
    Refused,
    TrueOnly,
)
from minisgl.server.requests.validation import FITS_CONTEXT, ValidText


class TokenizeRequest(PromptRequest):
    """POST /tokenize: a text or a conversation."""

    other_prompt_fields: ClassVar[tuple[str, ...]] = ("messages",)

    model: str | None = None
    prompt: ValidText | None = None
    messages: Annotated[list[Message], Field(min_length=1), FITS_CONTEXT] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: TrueOnly = None
    chat_template: Refused = None
    chat_template_kwargs: EmptyObjectOnly = None
    continue_final_message: FalseOnly = None
    return_token_strs: FalseOnly = None
    tools: EmptyListOnly = None

    @model_validator(mode="after")
    def _check_one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        return self

    @property
    def given_field(self) -> str:
        """The field that has the text or the conversation."""
        return "prompt" if self.messages is None else "messages"

    def read_prompts(self) -> list[Prompt]:
        if self.prompt is not None:
            return [self.prompt]
        return [Conversation([message.for_template() for message in self.messages or ()])]


class Tokenized(ResponseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(PromptRequest):
    """POST /detokenize."""

    prompt_field: ClassVar[str] = "tokens"

    model: str | None = None
    tokens: PromptIds

    def placeholder(self) -> Any:
        return [0]

    def read_prompts(self) -> list[Prompt]:
        return [TokenIds(pack_ids(self.tokens))]


class Detokenized(ResponseModel):
    prompt: str
