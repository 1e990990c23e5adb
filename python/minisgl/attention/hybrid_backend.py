"""Two backends as one: prompts go to the first, decodes to the second."""

# Dimensions: B requests of a step, H head width, K kv heads, N query heads, T tokens of a step, X a
# selection out of another dimension.

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from minisgl.attention.base import BaseAttnBackend, CapturedSlices
from minisgl.core import BaseAttnMetadata, BatchPlan, IntArray, Queries


@dataclass(slots=True)
class _SubBatch:
    """Tokens of the batch that one backend attends for.

    Attributes:
        slices: theirs, of those of a captured graph.
        queries: the tokens, from `prepare_on_device` on.
    """

    backend: BaseAttnBackend
    tokens: slice
    metadata: BaseAttnMetadata
    slices: slice = field(default_factory=lambda: slice(None))
    queries: Queries | None = None


@dataclass(frozen=True, slots=True)
class HybridMetadata(BaseAttnMetadata):
    """The parts of a step, in the order of the batch.

    Attributes:
        decode_position_B: of a captured graph with decodes and prompts, where decodes may be
            missing. Both parts then have the tokens of those.
    """

    sub_batches: list[_SubBatch]
    decode_position_B: Tensor | None = None


class HybridBackend(BaseAttnBackend):
    """Sends prompts to one backend and decodes to another. Both have the same pool."""

    def __init__(self, prefill: BaseAttnBackend, decode: BaseAttnBackend) -> None:
        self._prefill = prefill
        self._decode = decode
        self.can_be_captured = prefill.can_be_captured and decode.can_be_captured

    def make_metadata(self, plan: BatchPlan) -> HybridMetadata:
        num_decodes = plan.num_decodes
        sub_batches = []
        if num_decodes:
            decodes = replace(plan, slices=plan.slices[:num_decodes])
            metadata = self._decode.make_metadata(decodes)
            sub_batches.append(_SubBatch(self._decode, slice(num_decodes), metadata))
        if num_decodes < len(plan.slices):
            prompts = replace(plan, slices=plan.slices[num_decodes:], prefix_groups=())
            metadata = self._prefill.make_metadata(prompts)
            sub_batches.append(_SubBatch(self._prefill, slice(num_decodes, None), metadata))
        return HybridMetadata(sub_batches)

    def make_capture_metadata(self, slices: CapturedSlices) -> HybridMetadata:
        num_decodes = slices.num_decodes
        sub_batches = []
        if num_decodes:
            metadata = self._decode.make_capture_metadata(slices.decodes)
            decodes = slice(num_decodes)
            sub_batches.append(_SubBatch(self._decode, decodes, metadata, decodes))
        if slices.prompt_indptr is not None:
            metadata = self._prefill.make_capture_metadata(slices.prompts)
            prompts = slice(num_decodes, None)
            sub_batches.append(_SubBatch(self._prefill, slice(None), metadata, prompts))
        has_both = len(sub_batches) == 2
        return HybridMetadata(sub_batches, slices.decode_position_B if has_both else None)

    def update_metadata(
        self,
        metadata: BaseAttnMetadata,
        start_X: IntArray,
        end_X: IntArray,
        first_token: int = 0,
    ) -> None:
        assert isinstance(metadata, HybridMetadata)
        for sub_batch in metadata.sub_batches:
            part = sub_batch.slices
            starts_X = start_X[part]
            ends_X = end_X[part]
            sub_batch.backend.update_metadata(sub_batch.metadata, starts_X, ends_X, first_token)
            first_token += int((ends_X - starts_X).sum())

    def prepare_on_device(self, queries: Queries) -> None:
        assert isinstance(queries.attn_metadata, HybridMetadata)
        for sub_batch in queries.attn_metadata.sub_batches:
            sub_batch.queries = Queries(
                queries.row_X[sub_batch.tokens],
                queries.position_X[sub_batch.tokens],
                sub_batch.metadata,
            )
            sub_batch.backend.prepare_on_device(sub_batch.queries)

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: int, queries: Queries
    ) -> Tensor:
        assert isinstance(queries.attn_metadata, HybridMetadata)
        outputs = []
        for sub_batch in queries.attn_metadata.sub_batches:
            assert sub_batch.queries is not None
            tokens = sub_batch.tokens
            outputs.append(
                sub_batch.backend.forward(
                    q_TNH[tokens], k_TKH[tokens], v_TKH[tokens], layer, sub_batch.queries
                )
            )
        if len(outputs) == 1:
            return outputs[0]
        position_B = queries.attn_metadata.decode_position_B
        if position_B is None:
            return torch.cat(outputs)
        decoded_BNH, o_TNH = outputs
        num_decodes = len(position_B)
        is_decode_B11 = (position_B >= 0)[:, None, None]
        o_TNH[:num_decodes] = torch.where(is_decode_B11, decoded_BNH, o_TNH[:num_decodes])
        return o_TNH
