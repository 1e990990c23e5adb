"""Two backends as one: prompts go to the first, decodes to the second."""

# Dimension key: T tokens in the batch, R requests of a graph, N query heads, K kv heads, H head dim.

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minisgl.attention.base import BaseAttnBackend
from minisgl.core import BaseAttnMetadata, Batch, BatchPlan, IntArray


@dataclass(slots=True)
class _Part:
    """Tokens of the batch that one backend attends for; `batch` is what it is shown of it, from `begin` on."""

    backend: BaseAttnBackend
    rows: slice
    metadata: BaseAttnMetadata
    batch: Batch | None = None


@dataclass(frozen=True, slots=True)
class HybridMetadata(BaseAttnMetadata):
    """In the order of the batch."""

    parts: list[_Part]


class HybridBackend(BaseAttnBackend):
    """Over two backends of one pool."""

    def __init__(self, prefill: BaseAttnBackend, decode: BaseAttnBackend) -> None:
        self._prefill, self._decode = prefill, decode
        self.captures_graphs = prefill.captures_graphs and decode.captures_graphs

    def prepare(self, plan: BatchPlan) -> HybridMetadata:
        n = plan.num_decodes
        parts = (
            (self._decode, slice(n), plan.slices[:n]),
            (self._prefill, slice(n, None), plan.slices[n:]),
        )
        return HybridMetadata(
            [
                _Part(backend, rows, backend.prepare(replace(plan, slices=slices)))
                for backend, rows, slices in parts
                if slices
            ]
        )

    def prepare_capture(
        self, row_R: Tensor, num_tokens: int, shared_1: Tensor | None = None
    ) -> HybridMetadata:
        backend = self._decode if num_tokens == len(row_R) else self._prefill
        return HybridMetadata(
            [_Part(backend, slice(None), backend.prepare_capture(row_R, num_tokens, shared_1))]
        )

    def prepare_replay(
        self, metadata: BaseAttnMetadata, start_R: IntArray, end_R: IntArray
    ) -> None:
        assert isinstance(metadata, HybridMetadata)
        [part] = metadata.parts
        part.backend.prepare_replay(part.metadata, start_R, end_R)

    def begin(self, batch: Batch) -> None:
        assert isinstance(batch.attn_metadata, HybridMetadata)
        for part in batch.attn_metadata.parts:
            row_T, position_T = batch.row_T[part.rows], batch.position_T[part.rows]
            part.batch = replace(
                batch, row_T=row_T, position_T=position_T, attn_metadata=part.metadata
            )
            part.backend.begin(part.batch)

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: int, batch: Batch
    ) -> Tensor:
        assert isinstance(batch.attn_metadata, HybridMetadata)
        outputs = []
        for part in batch.attn_metadata.parts:
            assert part.batch is not None
            outputs.append(
                part.backend.forward(
                    q_TNH[part.rows], k_TKH[part.rows], v_TKH[part.rows], layer, part.batch
                )
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
