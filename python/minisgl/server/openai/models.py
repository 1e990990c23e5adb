"""The objects of /v1/models, which clients of both APIs read.

Each object has the fields of OpenAI's and of Anthropic's. A client ignores those of the other.
"""

from __future__ import annotations

from typing import Literal

from minisgl.server.answers.objects import ResponseModel


class ModelCard(ResponseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "minisgl"
    max_model_len: int

    # Anthropic's.
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelList(ResponseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]

    # Anthropic's, of one page.
    has_more: Literal[False] = False
    first_id: str
    last_id: str
