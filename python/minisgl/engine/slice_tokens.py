"""Where the tokens of a step stand, from the slices that follow each other in it."""

# Dimensions: T tokens of a step, X a selection out of another dimension: slices of a step.

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from minisgl.core import IntArray


class SliceTokens(NamedTuple):
    """Where the tokens of a step stand. All int32, on the host.

    Attributes:
        row_T, position_T: where in the tables each token stands.
        first_X, last_X: the indices of the first and the last token of each slice. In a slice
            without tokens the first is behind the last.
    """

    row_T: IntArray
    position_T: IntArray
    first_X: IntArray
    last_X: IntArray

    @classmethod
    def of(cls, row_X: IntArray, start_X: IntArray, end_X: IntArray) -> SliceTokens:
        """The tokens of slices from `start` to `end` of rows."""
        length_X = end_X - start_X
        last_X = np.cumsum(length_X, dtype=np.int32) - 1
        first_X = last_X + 1 - length_X
        position_T = np.arange(last_X[-1] + 1, dtype=np.int32)
        position_T += np.repeat(start_X - first_X, length_X)
        return cls(np.repeat(row_X, length_X), position_T, first_X, last_X)
