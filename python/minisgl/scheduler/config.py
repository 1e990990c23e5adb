"""Options of the scheduler."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Self

from minisgl.engine.config import EngineConfig, option
from minisgl.kvcache import PREFIX_CACHES
from minisgl.utils import Hardware
from minisgl.utils.env import overlap_disabled


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(EngineConfig):
    """What the scheduler needs to know, besides what its engine does."""

    cache: str = option("radix", "prefix cache: radix shares the KV of equal prefixes", PREFIX_CACHES.names)
    overlap: bool | None = option(
        None,
        "plan the next step while the device computes; auto: on for GPUs (MINISGL_DISABLE_OVERLAP_SCHEDULING=1: off)",
    )
    seed: int | None = option(None, "seeds requests that bring no seed; auto: drawn at start")

    def __post_init__(self) -> None:
        super().__post_init__()
        PREFIX_CACHES[self.cache]

    def resolve(self, hardware: Hardware) -> Self:
        resolved = super().resolve(hardware)
        overlap = resolved.device == "cuda" if self.overlap is None else self.overlap
        seed = secrets.randbits(32) if self.seed is None else self.seed
        return replace(resolved, overlap=overlap and not overlap_disabled(), seed=seed)
