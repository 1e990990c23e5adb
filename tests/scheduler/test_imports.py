"""What the process of a scheduler imports: a start takes as long as that."""

from __future__ import annotations

import subprocess
import sys

# They take long, and few models or none need them there.
RARELY_NEEDED = {"gguf", "transformers", "fastapi", "flashinfer", "pydantic", "tokenizers", "yaml"}


def test_a_scheduler_imports_nothing_that_few_models_need() -> None:
    script = "import sys, minisgl.scheduler; print(*sys.modules)"
    imported = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    assert not RARELY_NEEDED & set(imported)
