"""Which libraries are made anew when a source changes: a start waits for their compilers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from minisgl.builds import cpu_library, cuda_library, kernels


@pytest.mark.parametrize(
    ("changed", "of_cpu", "of_gpu"),
    [
        ("cpu.h", True, False),
        ("cpu.cpp", True, False),
        ("launch.cuh", False, True),
        ("linear.cu", False, True),
    ],
)
def test_a_library_depends_on_its_own_sources_and_headers(
    changed: str, of_cpu: bool, of_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = shutil.copytree(kernels._SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(kernels, "_SOURCES", sources)
    before = (cpu_library().name, cuda_library((9, 0)).name)

    with (sources / changed).open("a") as file:
        file.write("\n")

    after = (cpu_library().name, cuda_library((9, 0)).name)
    assert (after[0] != before[0], after[1] != before[1]) == (of_cpu, of_gpu)
