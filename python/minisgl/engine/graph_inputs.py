"""The numbers that a captured graph reads of its tokens and requests, on the host.

A plan is padded to the size of its graph: padding tokens stand in the padding row, at its first
positions. Does not know where on the device the numbers go. Like those of `steps.py`, the
dataclasses are not frozen, to be made fast.
"""

# Dimensions: B requests of a step, or of a captured graph, T tokens of a step, or of a captured
# graph, X a selection out of another dimension.

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from minisgl.core import BatchPlan, IntArray
from minisgl.engine.graph_key import GraphKey, GraphKind


@dataclass(slots=True)
class GraphInputs(ABC):
    """What graphs of all kinds read; int32.

    Attributes:
        row_T, position_T: where in the tables each token stands.
        row_B, end_B: row and end of each request that samples.
        attn_start_X, attn_end_X: the slices that attention sees.
    """

    row_T: IntArray
    position_T: IntArray
    row_B: IntArray
    end_B: IntArray
    attn_start_X: IntArray
    attn_end_X: IntArray

    @abstractmethod
    def token_arrays(self) -> list[IntArray]:
        """What goes to the device: row_T, position_T, and what only this kind of graph reads."""


@dataclass(slots=True)
class DecodeInputs(GraphInputs):
    """One token a request; attention sees each as a slice, padding included.

    Attributes:
        num_shared_tokens: leading tokens that all requests have in common. On the device it is a
            tensor [1], hence `num_shared_tokens_1`.
    """

    num_shared_tokens: int

    @classmethod
    def of(cls, plan: BatchPlan, size: int, padding_row: int) -> DecodeInputs:
        """The inputs for a plan of decodes; if it has no slices, for padding alone."""
        num_decodes = len(plan.slices)
        row_B = np.full(size, padding_row, dtype=np.int32)
        row_B[:num_decodes] = [req_slice.row for req_slice in plan.slices]
        end_B = np.ones(size, dtype=np.int32)
        end_B[:num_decodes] = [req_slice.end for req_slice in plan.slices]
        position_B = end_B - 1
        return cls(
            row_T=row_B,
            position_T=position_B,
            row_B=row_B,
            end_B=end_B,
            attn_start_X=position_B,
            attn_end_X=end_B,
            num_shared_tokens=plan.num_shared_tokens,
        )

    def token_arrays(self) -> list[IntArray]:
        num_shared_tokens_1 = np.array([self.num_shared_tokens], dtype=np.int32)
        return [self.row_T, self.position_T, num_shared_tokens_1]


@dataclass(slots=True)
class SliceInputs(GraphInputs):
    """One slice of a request; attention sees it and its padding as two slices.

    Attributes:
        row: the request's row of the tables.
        padding_row: the row of the padding.
        last_index: of the slice's last token among the tokens.
    """

    row: int
    padding_row: int
    last_index: int

    @classmethod
    def of(cls, plan: BatchPlan, size: int, padding_row: int) -> SliceInputs:
        """The inputs for a plan of one slice; if it has none, for padding alone."""
        row = padding_row
        start = 0
        end = 1
        for req_slice in plan.slices:  # one at most
            row = req_slice.row
            start = req_slice.start
            end = req_slice.end
        length = end - start

        row_T = np.full(size, padding_row, dtype=np.int32)
        row_T[:length] = row
        positions = (np.arange(start, end), np.arange(size - length))
        attn_end_X = np.array([end, size - length], dtype=np.int32)
        return cls(
            row_T=row_T,
            position_T=np.concatenate(positions, dtype=np.int32),
            row_B=row_T[:1],
            end_B=attn_end_X[:1],
            attn_start_X=np.array([start, 0], dtype=np.int32),
            attn_end_X=attn_end_X,
            row=row,
            padding_row=padding_row,
            last_index=length - 1,
        )

    def token_arrays(self) -> list[IntArray]:
        slice_row_2 = np.array([self.row, self.padding_row], dtype=np.int32)
        last_index_1 = np.array([self.last_index], dtype=np.int32)
        return [self.row_T, self.position_T, slice_row_2, last_index_1]


def graph_inputs(plan: BatchPlan, key: GraphKey, padding_row: int) -> GraphInputs:
    """What the graph of a key reads of a plan."""
    if key.kind is GraphKind.ONE_SLICE:
        return SliceInputs.of(plan, key.size, padding_row)
    return DecodeInputs.of(plan, key.size, padding_row)
