"""Rows of an embedding are those of torch, whoever takes them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minisgl.kernel import dispatch
from minisgl.kernel.embedding import embed

# Dimensions: D model width, T tokens of a step, V vocabulary.


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("token_T", [[], [0], [6, 0, 6, 3]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_those_of_torch(
    dtype: torch.dtype, token_T: list[int], is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(dispatch, "load_cpu_kernels", lambda: None)
    weight_VD = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids_T = torch.tensor(token_T, dtype=torch.int64)
    assert torch.equal(embed(ids_T, weight_VD), F.embedding(ids_T, weight_VD))
