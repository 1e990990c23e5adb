"""Before torch is imported, a rank compiles what it will load, and knows its GPU.

A GPU's driver is a stand-in, built here; so is CUDA's compiler. The process is a real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Of a machine with one Hopper GPU. It writes down that a context is made.
DRIVER = """
#include <cstdio>
#include <cstdlib>
extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int) { *device = 0; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
    *value = attribute == 75 ? 9 : 0;
    return 0;
}
int cuDevicePrimaryCtxRetain(void**, int) {
    fclose(fopen(getenv("CONTEXT"), "w"));
    return 0;
}
}
"""
COMPILER = """#!/bin/sh
echo "$@" >> "$LOG"
while [ $# -gt 0 ]; do
    [ "$1" = -o ] && echo a library > "$2"
    shift
done
"""
FAILING_COMPILER = """#!/bin/sh
echo broken >&2; exit 1
"""
PREPARE = """
import json, sys, threading
from minisgl.config import SchedulerConfig
from minisgl.rank_process import prepare
prepare(SchedulerConfig(**json.loads(sys.argv[1])), 0)
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
assert "torch" not in sys.modules
"""


class Machine:
    """With a GPU, or without, and with CUDA's compiler."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._model = model
        self.context = folder / "context"
        self.environment = {
            **os.environ,
            "MINISGL_CACHE": str(folder / "cache"),
            "CUDA_HOME": str(folder),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "CONTEXT": str(self.context),
            "LOG": str(folder / "log"),
        }
        self.install_compiler(COMPILER)

    def install_compiler(self, script: str) -> None:
        (self._folder / "bin").mkdir(exist_ok=True)
        for name in ("nvcc", "c++"):
            compiler = self._folder / "bin" / name
            compiler.write_text(script)
            compiler.chmod(0o700)

    def install_driver(self) -> None:
        source = self._folder / "driver.cpp"
        source.write_text(DRIVER)
        library = self._folder / "lib" / "libcuda.so.1"
        library.parent.mkdir()
        command = ["c++", "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        self.environment["LD_LIBRARY_PATH"] = str(library.parent)

    def prepare(self, **options: str | int) -> list[str]:
        """Prepare a rank in a process of its own.

        Returns:
            what it wrote to stderr, in lines.
        """
        config = json.dumps({"model": str(self._model), **options})
        done = subprocess.run(
            [sys.executable, "-c", PREPARE, config],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr.splitlines()

    @property
    def libraries(self) -> list[str]:
        """Names without digests."""
        files = (self._folder / "cache").rglob("*.so")
        return sorted(file.stem.partition("-")[0] for file in files)


@pytest.fixture
def machine(tmp_path: Path, checkpoint: Callable[[str], Path]) -> Machine:
    return Machine(tmp_path, checkpoint("qwen3"))


def test_a_gpus_kernels_are_compiled_and_its_context_is_made(machine: Machine) -> None:
    machine.install_driver()
    assert machine.prepare() == []
    assert "gpu" in machine.libraries
    assert machine.context.exists()


def test_without_a_gpu_a_processors_kernels_are_compiled(machine: Machine) -> None:
    assert machine.prepare(device="cpu") == []
    assert machine.libraries == ["cpu"]


def test_on_a_machine_with_a_gpu_a_rank_on_the_cpu_leaves_that_alone(machine: Machine) -> None:
    machine.install_driver()
    machine.prepare(device="cpu")
    assert machine.libraries == ["cpu"]
    assert not machine.context.exists()


@pytest.mark.parametrize("options", [{"model": "no such folder"}, {"tp": 2}, {"comm": "pynccl"}])
def test_what_cannot_work_is_left_to_the_engine_to_tell(
    machine: Machine, options: dict[str, str | int]
) -> None:
    assert machine.prepare(**{"device": "cuda", **options}) == []
    assert machine.libraries == []


def test_a_compiler_that_fails_is_left_to_the_engine_to_tell(machine: Machine) -> None:
    machine.install_compiler(FAILING_COMPILER)
    assert machine.prepare(device="cpu") == []
    assert machine.libraries == []
