"""FlashInfer's kernels of prompts are compiled once and kept. FlashInfer itself is a stand-in."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl.attention import flashinfer_modules
from minisgl.attention.flashinfer_modules import PromptModules
from minisgl.checkpoint import AttentionSpec
from minisgl.errors import ConfigError
from minisgl.utils.cuda_toolkit import CudaToolkit

FULL = AttentionSpec(scale=0.1)
SLIDING = AttentionSpec(scale=0.1, window=8)


@dataclass
class FakeModule:
    """As `flashinfer.jit.core.JitSpec` of 0.6."""

    env: Any
    name: str

    @property
    def jit_library_path(self) -> Path:
        return Path(self.env.FLASHINFER_WORKSPACE_DIR / "cached_ops" / f"{self.name}.so")

    @property
    def is_aot(self) -> bool:
        return Path(self.env.FLASHINFER_AOT_DIR / self.name / f"{self.name}.so").exists()

    def build(self, verbose: bool) -> None:
        if self.env.failure:
            raise RuntimeError(self.env.failure)
        self.env.built.append(self.name)
        self.jit_library_path.parent.mkdir(parents=True, exist_ok=True)
        self.jit_library_path.write_text("a library")


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The settings of the stand-in."""
    env = SimpleNamespace(
        FLASHINFER_WORKSPACE_DIR=tmp_path / "0.6.12" / "90a",
        FLASHINFER_AOT_DIR=tmp_path / "site-packages",
        has_flashinfer_jit_cache=lambda: False,
        built=[],
        failure="",
    )

    def generate(kernels: str, *about: Any) -> FakeModule:
        *_, has_window, has_softcap, _fp16 = about
        return FakeModule(env, f"{kernels}_{has_window}_{has_softcap}")

    jit = ModuleType("flashinfer.jit")
    vars(jit).update(env=env, gen_batch_prefill_module=generate)
    package = ModuleType("flashinfer")
    vars(package).update(jit=jit, __path__=[])
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_HOME", "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flashinfer_modules, "find_cuda_toolkit", lambda: CudaToolkit(tmp_path))
    return env


def modules(*specs: AttentionSpec) -> PromptModules:
    return PromptModules(torch.device("cuda:0"), torch.bfloat16, 128, specs)


def test_each_kind_of_layer_is_compiled_once(env: Any) -> None:
    modules(FULL, SLIDING, FULL, SLIDING).build()
    assert env.built == ["fa3_False_False", "fa3_True_False"]


def test_what_is_kept_is_not_compiled_again_whatever_pip_does(env: Any) -> None:
    modules(FULL).build()
    for path in env.FLASHINFER_WORKSPACE_DIR.glob("*/*"):
        path.unlink()
    assert not modules(FULL).missing
    modules(FULL, SLIDING).build()
    assert env.built == ["fa3_False_False", "fa3_True_False"]


def test_another_version_is_compiled_anew(env: Any, tmp_path: Path) -> None:
    modules(FULL).build()
    env.FLASHINFER_WORKSPACE_DIR = tmp_path / "0.6.13" / "90a"
    modules(FULL).build()
    assert len(env.built) == 2


def test_a_library_that_others_can_write_is_not_used(env: Any) -> None:
    modules(FULL).build()
    (library,) = env.FLASHINFER_AOT_DIR.glob("*/*.so")
    library.chmod(0o777)
    assert modules(FULL).missing
    assert not library.exists()


def test_modules_that_were_installed_are_used(env: Any, tmp_path: Path) -> None:
    env.has_flashinfer_jit_cache = lambda: True
    installed = tmp_path / "site-packages" / "fa3_False_False" / "fa3_False_False.so"
    installed.parent.mkdir(parents=True)
    installed.touch()
    modules(FULL).build()
    assert not env.built


def test_without_a_compiler_the_error_says_how_to_get_one(
    env: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_modules, "find_cuda_toolkit", lambda: None)
    with pytest.raises(ConfigError, match=r"--attn fi needs .*nvcc.*pip install"):
        modules(FULL).build()


def test_of_a_compilers_output_the_error_is_told(env: Any, tmp_path: Path) -> None:
    env.failure = "Ninja build failed. Ninja output:\n[1/9] nvcc\nx.cu(3): error: no such thing\nx"
    with pytest.raises(ConfigError) as raised:
        modules(FULL).build()
    assert str(raised.value) == (
        f"FlashInfer cannot be compiled by {tmp_path}/bin/nvcc: x.cu(3): error: no such thing; "
        "--attn torch needs no compiler"
    )
