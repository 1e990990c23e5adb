"""Requests with prompts, and how a large request is divided in two.

A large request is parsed in another process. There its prompts become bytes that only the tokenizer
decodes. The rest, its parameters, is small, and is parsed again in the process that answers the
request. Knows no endpoint and no process.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Any, ClassVar, Literal, Self

import msgspec
from pydantic import PrivateAttr, field_validator

from minisgl.message import Prompt, encode_prompt, encoded_prompt
from minisgl.server.requests.validation import (
    IgnoredField,
    RequestBounds,
    RequestContext,
    RequestModel,
    check_text,
)


class PackedRequest(msgspec.Struct, frozen=True):
    """A request in two parts.

    Attributes:
        parameters: its other fields, in JSON, and a placeholder for the prompts.
        prompts: each of its prompts, as `encode_prompt` writes it.
        ignored_fields: what the request had beside them.
    """

    parameters: bytes
    prompts: list[bytes]
    ignored_fields: list[IgnoredField]


class PromptRequest(RequestModel):
    """A request with prompts.

    Attributes:
        prompt_field: the field that has the prompt.
        other_prompt_fields: fields that may have it instead, or a part of it.
    """

    prompt_field: ClassVar[str] = "prompt"
    other_prompt_fields: ClassVar[tuple[str, ...]] = ()
    _packed_prompts: list[Prompt] | None = PrivateAttr(None)
    _ignored_fields: list[IgnoredField] = PrivateAttr([])

    @field_validator("model", check_fields=False)  # each kind of request declares the field
    @classmethod
    def _check_model_name(cls, name: str | None) -> str | None:
        """Refuse half a surrogate pair, which would become another character between processes."""
        return None if name is None else check_text(name)

    @classmethod
    def read(cls, body: Any, bounds: RequestBounds) -> Self:
        """The request, from a decoded body.

        Raises:
            ValidationError: the body is not a valid request.
        """
        context = RequestContext(bounds)
        extra: Literal["forbid", "ignore"] = "forbid" if bounds.strict_fields else "ignore"
        request = cls.model_validate(body, context=context, extra=extra)
        request._ignored_fields = sorted(context.ignored_fields)
        return request

    @property
    def ignored_fields(self) -> list[IgnoredField]:
        """Fields that no model declares, at any depth."""
        return self._ignored_fields

    @abstractmethod
    def read_prompts(self) -> list[Prompt]:
        """The prompts, from the fields.

        Raises:
            InvalidRequest: there is no prompt, or an empty one.
        """

    def prompts(self) -> list[Prompt]:
        """The prompts, whether they were taken out of the request or not. Raises as above."""
        if self._packed_prompts is not None:
            return self._packed_prompts
        return self.read_prompts()

    def placeholder(self) -> Any:
        """A valid value of `prompt_field`, for a request whose prompts are taken out."""
        return "-"

    def pack(self, body: dict[str, Any]) -> PackedRequest:
        """
        Args:
            body: the body that the request was validated from.

        Raises:
            InvalidRequest: there is no prompt, or an empty one.
        """
        prompt_fields = {self.prompt_field, *self.other_prompt_fields}
        declared = self.declared_fields(body)
        fields = {name: value for name, value in declared.items() if name not in prompt_fields}
        fields[self.prompt_field] = self.placeholder()
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        parameters = text.encode(errors="replace")  # half a pair can only be in an ignored field
        prompts = [encode_prompt(prompt) for prompt in self.read_prompts()]
        return PackedRequest(parameters, prompts, self._ignored_fields)

    @classmethod
    def unpack(cls, parameters: Any, packed: PackedRequest, bounds: RequestBounds) -> Self:
        """The request again, from its decoded parameters and the rest of it."""
        request = cls.read(parameters, bounds)
        request._packed_prompts = [encoded_prompt(raw) for raw in packed.prompts]
        request._ignored_fields = packed.ignored_fields
        return request
