"""The tokenizers of this folder's tests, each loaded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from minisgl.checkpoint import fetch_model
from minisgl.tokenizer import Tokenizer
from tests.tokenizer.vocabularies import byte_fallback, byte_level, metaspace, word_pieces


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    """From a name to a tokenizer: of a kind in `vocabularies.py`, or the "default" model's."""
    root = tmp_path_factory.mktemp("tokenizers")
    makers = {
        "byte level": byte_level,
        "byte fallback": byte_fallback,
        "word pieces": word_pieces,
        "metaspace": metaspace,
    }
    return cache(
        lambda name: Tokenizer(makers[name](root / name) if name in makers else fetch_model(None))
    )
