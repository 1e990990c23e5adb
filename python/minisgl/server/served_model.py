"""The served model, as the API describes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from minisgl.errors import UnknownModel
from minisgl.server.openai.models import ModelCard
from minisgl.server.parsing import Dialect
from minisgl.utils.excerpts import excerpt


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model, as the API describes it.

    Attributes:
        sampling_defaults: the model's recommendation for sampling parameters that a request leaves
            out.
        created: when it was loaded, in seconds since the epoch.
        width: of its hidden states.
        dialect: how it writes tool calls and reasoning.
        has_reasoning_switch: whether its chat template can be told how much to reason.
    """

    name: str
    max_seq_len: int
    sampling_defaults: dict[str, float]
    created: int
    width: int
    dialect: Dialect = field(default_factory=Dialect)
    has_reasoning_switch: bool = True

    @property
    def always_reasons(self) -> bool:
        """Whether its chat template begins the reasoning whatever a request says."""
        reasoning = self.dialect.reasoning_format
        return reasoning is not None and reasoning.is_open and not self.has_reasoning_switch

    @property
    def card(self) -> ModelCard:
        created_at = datetime.fromtimestamp(self.created, UTC)
        return ModelCard(
            id=self.name,
            created=self.created,
            max_model_len=self.max_seq_len,
            display_name=self.name,
            created_at=f"{created_at:%Y-%m-%dT%H:%M:%SZ}",
            max_input_tokens=self.max_seq_len,
            max_tokens=self.max_seq_len,
        )

    def check_name(self, name: str | None) -> None:
        """
        Raises:
            UnknownModel: there is a name and it is not this model's.
        """
        if name is not None and name != self.name:
            raise UnknownModel(excerpt(name), self.name)
