"""Fixtures of the kernels' tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(0)
