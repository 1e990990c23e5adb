"""GGUF files of tiny models, made once a module."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from tests.checkpoint.gguf_files import saved_weights, write_gguf
from tests.checkpoints import tiny_model


@pytest.fixture(scope="module")
def written(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Type], Path]:
    """From an architecture and a type to a file, made once; not to be written to."""
    root = tmp_path_factory.mktemp("gguf")

    @cache
    def write(arch: str, type_: Type = Type.F32) -> Path:
        folder = checkpoint(arch)
        return write_gguf(
            root / f"{arch}-{type_.name}.gguf",
            tiny_model(arch),
            saved_weights(folder),
            lambda _: type_,
        )

    return write
