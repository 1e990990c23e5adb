"""The objects of /v1/models."""

from __future__ import annotations

from typing import Literal

from minisgl.server.answers.objects import ResponseModel


class ModelCard(ResponseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "minisgl"
    max_model_len: int


class ModelList(ResponseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
