"""What the process of a scheduler imports: a start takes as long as that."""

from __future__ import annotations

import subprocess
import sys

import pytest

# They take long, and few models or none need them there.
RARELY_NEEDED = {"gguf", "transformers", "fastapi", "flashinfer", "pydantic", "tokenizers", "yaml"}


def imported_by(module: str) -> set[str]:
    script = f"import sys, {module}; print(*sys.modules)"
    return set(subprocess.check_output([sys.executable, "-c", script], text=True).split())


def test_a_scheduler_imports_nothing_that_few_models_need() -> None:
    assert not RARELY_NEEDED & imported_by("minisgl.scheduler")


@pytest.mark.parametrize("module", ["minisgl.rank_process", "minisgl.builds"])
def test_what_comes_before_torch_imports_nothing_that_takes_long(module: str) -> None:
    assert not (RARELY_NEEDED | {"torch", "tvm_ffi", "triton"}) & imported_by(module)
